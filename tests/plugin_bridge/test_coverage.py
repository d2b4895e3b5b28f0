"""What became of a job's collectives, as it is counted and as ``doctor`` says it."""

from __future__ import annotations

from rig import CALLS, Rig, play, stage, wait_for
from test_govern import go_on, profiled_calls
from test_plugin import ACTIONS, finish, table_of

from dynamiccl_ray.plugin_bridge.coverage import Coverage
from dynamiccl_ray.plugin_bridge.doctor import diagnose


def test_every_call_is_in_the_sums(rig: Rig) -> None:
    """A table for some of the keys; broadcasts, of which nothing is heard; windows that are not profiled."""
    steps = 200
    job = rig.start(play(places=(0, 1), steps=steps))
    channels = [of_process[0] for of_process in rig.channels(job)]
    for channel in channels:
        stage(channel, table_of(ACTIONS), 9)
        channel.govern(3)
    finish(job)
    calls = steps * len(CALLS)
    broadcasts = [d for d in profiled_calls(calls, 3) if CALLS[(d - 1) % len(CALLS)][0] == 0]
    for coverage in [Coverage.of(channel.status) for channel in channels]:
        assert coverage.calls == calls
        assert coverage.bypassed == {"no_table": 9, "no_entry": calls // 6 - 1}
        assert coverage.tuned == calls - sum(coverage.bypassed.values())
        assert coverage.not_profiled == calls - len(profiled_calls(calls, 3))
        assert coverage.unheard == len(broadcasts)
        assert coverage.measured + coverage.lost + len(broadcasts) + coverage.not_profiled == calls
    both = Coverage.sum(Coverage.of(channel.status) for channel in channels)
    assert both.calls == 2 * calls
    assert both.as_dict()["bypassed"] == {"no_table": 18, "no_entry": 2 * (calls // 6 - 1)}
    assert both.share(both.calls) == 1
    assert Coverage().share(0) == 0


def test_doctor_says_what_becomes_of_a_jobs_collectives(rig: Rig) -> None:
    job = rig.start(play(CALLS[:4], places=(0, 1), steps=300))
    for (channel,) in rig.channels(job):
        channel.govern(3)
        channel.note_overhead(0.0031)
    name = f"job {rig.job_id}"

    def found() -> str:
        return next(check.found for check in diagnose() if check.name == name)

    assert found() == "no collective yet"
    go_on(job, 200)
    wait_for(lambda: found().startswith("1,600 collectives over its ranks here: 0.0% tuned, bypassed: no_table 100.0%"))
    expected = len(profiled_calls(800, 3)) / 800
    wait_for(lambda: f"; {expected:.1%} measured, {1 - expected:.1%} not profiled, 0.0% lost;" in found())
    assert found().endswith("; 1 window in 8 is profiled; the plugin takes 0.31% of a process's time")
