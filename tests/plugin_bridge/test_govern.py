"""Which collectives are profiled: whole windows of calls, the same on all ranks, and no call that is in no count."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from rig import BELIEF, CALLS, SIZE, Play, Rig, exec_ns, play, used_of, wait_for, write_at
from test_plugin import SHIPPED, drain_all, finish

from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.layout import DECIDED, MOST_DUTY, TIMED_ONE_IN, StatusWords, library
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob
from dynamiccl_ray.plugin_bridge.program import Comm, Ops, Program

# docs/channel.md; nothing here comes from the code under test.
WINDOW = 256
MASK = 2**64 - 1

HEARD = [call for call in CALLS if call[0] is not Collective.BROADCAST]
"""From 2.29 on a profiler hears nothing of broadcasts."""


def is_profiled(window: int, duty: int) -> bool:
    x = window * 0x9E3779B97F4A7C15 & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) % (1 << duty) == 0


def profiled_calls(calls: int, duty: int) -> list[int]:
    """Of a communicator that has that duty from its first call on."""
    return [d for d in range(1, calls + 1) if is_profiled(d // WINDOW, duty)]


def check_sums(channel: Channel, calls: int) -> None:
    """Every call was tuned or bypassed for a cause; every collective was measured, lost or not profiled."""
    status = channel.status
    assert status.dseq == calls
    assert status.applied + sum(status.passthrough.values()) == calls
    assert status.records - status.undecided + sum(status.dropped.values()) + status.unprofiled == calls


def governed(rig: Rig, duty: int, *, steps: int, release: str = "2.30") -> tuple[NcclJob, list[Channel]]:
    job = rig.start(play(HEARD, places=(0, 5), steps=steps), release=release)
    channels = [of_process[0] for of_process in rig.channels(job)]
    for channel in channels:
        channel.govern(duty)
    return job, channels


def go_on(job: NcclJob, steps: int) -> None:
    job.set_credit(steps)
    wait_for(lambda: job.progress().min() >= steps, what="the steps")


@pytest.mark.parametrize("release", [r for r, (_, profiler) in SHIPPED.items() if profiler >= 4])
@pytest.mark.parametrize("duty", [0, 2, 4])
def test_all_ranks_profile_the_same_windows(rig: Rig, release: str, duty: int) -> None:
    steps = 2000
    job, channels = governed(rig, duty, steps=steps, release=release)
    finish(job)
    expected = profiled_calls(steps * len(HEARD), duty)
    for process, channel in enumerate(channels):
        records = drain_all(channel)
        used = used_of(job.log(process))
        assert np.all(records["flags"] & DECIDED)
        assert sorted(records["dseq"].tolist()) == expected
        assert np.array_equal(records["exec_ns"], exec_ns(used[records["dseq"] - 1]))
        check_sums(channel, steps * len(HEARD))
        assert channel.status.unprofiled == steps * len(HEARD) - len(expected)
        assert channel.status.dropped == dict.fromkeys(("full", "busy", "incomplete", "timer"), 0)
        # NCCL was told to be silent, and not only we.
        assert channel.status.spared <= 16 * (1 + len(expected) // WINDOW)


def test_windows_of_a_longer_duty_are_among_those_of_a_shorter(rig: Rig) -> None:
    for duty in range(MOST_DUTY):
        sparse = set(profiled_calls(WINDOW * 2000, duty + 1))
        assert sparse < set(profiled_calls(WINDOW * 2000, duty))
        assert len(sparse) == pytest.approx(WINDOW * 2000 / 2 ** (duty + 1), rel=0.5)


def test_old_profilers_are_not_governed(rig: Rig) -> None:
    """Before 2.26 NCCL reads the mask with a kernel, into one word for all threads."""
    job, channels = governed(rig, 4, steps=300, release="2.24")
    finish(job)
    for channel in channels:
        assert channel.status.unprofiled == 0
        check_sums(channel, 300 * len(HEARD))


@pytest.mark.parametrize("word", [MOST_DUTY + 1, 64, 2**63, 2**64 - 1])
def test_whatever_is_in_the_word_something_is_profiled(rig: Rig, word: int) -> None:
    steps = 8000
    job = rig.start(play(HEARD[:1], places=(0, 1), steps=steps, syncs=False))
    channels = [of_process[0] for of_process in rig.channels(job)]
    for channel in channels:
        write_at(channel.path, 23376, word.to_bytes(8, "little"))
        assert channel.status.duty == MOST_DUTY
    finish(job)
    for channel in channels:
        assert sorted(drain_all(channel)["dseq"].tolist()) == profiled_calls(steps, MOST_DUTY)
        check_sums(channel, steps)


def test_a_change_reaches_ranks_at_different_calls_and_they_measure_in_common(rig: Rig) -> None:
    """One rank hears of each change some thousand calls after the other."""
    n = len(HEARD)
    job = rig.start(play(HEARD, places=(0, 5), steps=6000, window=1))
    first, second = (of_process[0] for of_process in rig.channels(job))
    done = 0
    for duty in (3, 1, 5, 0):
        for channel in (first, second):
            channel.govern(duty)
            done += 600
            go_on(job, done)
    finish(job)
    seen = [set(drain_all(channel)["dseq"].tolist()) for channel in (first, second)]
    for channel in (first, second):
        check_sums(channel, 6000 * n)
    assert seen[0] != seen[1]
    # What both were told to measure, they both did: the windows of the sparsest duty are everywhere.
    assert set(profiled_calls(4800 * n, 5)) <= seen[0] & seen[1]
    from_the_end = set(range(4800 * n + 2 * WINDOW, 6000 * n + 1))
    assert from_the_end <= seen[0] & seen[1]


def test_groups_and_aggregates_across_the_edges_of_windows(rig: Rig) -> None:
    """Groups of several calls, some of them aggregates, whose decisions lie on both sides of an edge."""

    def per_step(ops: Ops, comm: Comm) -> None:
        with ops.group():
            for collective, nbytes in HEARD:
                ops.collective(comm, collective, nbytes)
                ops.collective(comm, collective, nbytes)

    steps = 3000
    job = rig.start(play(HEARD, places=(0, 5), steps=steps, per_step=per_step))
    channels = [of_process[0] for of_process in rig.channels(job)]
    for channel in channels:
        channel.govern(2)
    finish(job)
    calls = channels[0].status.dseq
    expected = profiled_calls(calls, 2)
    for channel in channels:
        records = drain_all(channel)
        assert sorted(records["dseq"].tolist()) == expected
        assert channel.status.merged == len(expected)
        check_sums(channel, calls)


def test_several_communicators_have_windows_of_their_own(rig: Rig) -> None:
    """The mask is one for all: while one communicator wants events, NCCL tells of the others', too."""
    steps = 1500
    job = rig.start(play(HEARD, places=(2, 3), comms=2, steps=steps))
    found = rig.channels(job, 2)
    for of_process in found:
        of_process[0].govern(1)
        of_process[1].govern(4)
    finish(job)
    for of_process in found:
        for channel, duty in zip(of_process, (1, 4), strict=True):
            expected = profiled_calls(steps * len(HEARD), duty)
            assert sorted(drain_all(channel)["dseq"].tolist()) == expected
            check_sums(channel, steps * len(HEARD))
        assert of_process[1].status.spared > of_process[0].status.spared


def test_replays_are_spared_between_windows(rig: Rig) -> None:
    """What was captured under events has them for ever, and no decision."""
    program = Program(ranks_per_node=1, steps=3000, window=4)
    comm = program.comm("world", places=(0,), size=SIZE, nodes=[place // 4 for place in range(SIZE)])
    (rank,) = program.ranks
    rank.setup.init(comm)
    rank.setup.capture()
    rank.setup.collective(comm, *HEARD[1])
    rank.setup.end_capture(0)
    rank.step.collective(comm, *HEARD[0])
    rank.step.replay(0)
    rank.step.sync()
    rank.end.drop(0)
    rank.end.destroy(comm)
    what = Play(program=program, belief=BELIEF, times=None, calls=HEARD[:2])
    job = rig.start(what)
    ((channel,),) = rig.channels(job)
    channel.govern(2)
    finish(job)
    status, used = channel.status, used_of(job.log(0))
    replays = int(np.count_nonzero(used["bytes"] == HEARD[1][1]))
    assert replays == 3000
    measured = len(profiled_calls(status.dseq, 2))
    # NCCL reads the times of earlier work for a few replays; those are dropped.
    lost = sum(status.dropped.values())
    assert measured - lost <= status.records - status.undecided <= measured
    assert status.records + lost + status.spared >= measured + replays
    assert status.undecided <= measured + WINDOW
    assert status.spared >= replays - measured - WINDOW


def test_the_plugin_times_a_few_of_its_calls(rig: Rig) -> None:
    """Not how long they take, but that they are timed, and what comes of that."""
    job, channels = governed(rig, 0, steps=3000)
    finish(job)
    for channel in channels:
        assert 0 < channel.status.own_ns < 1e9 * 60
        raw = StatusWords()
        library().dcc_status(channel.mapped, ctypes.byref(raw))
        assert raw.overhead_calls == (3000 * len(HEARD) + TIMED_ONE_IN // 2 - 1) // TIMED_ONE_IN
        assert raw.profile_ns > 0
