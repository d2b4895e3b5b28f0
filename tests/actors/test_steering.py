"""What an operator wants of a run, and what the canary makes of evidence: over the control loop, in the coordinator."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from driven import KEY, OTHER, REAL, RING, TREE, Run, experiment_of, one_term
from pydantic import ValidationError
from rich.console import Console

from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.actors.overview import answer, overview, status_of
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.steering import check
from dynamiccl_ray.agent.observation import decode
from dynamiccl_ray.cli.live import _page
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import CHANNEL_VALUES
from dynamiccl_ray.plugin_bridge.layout import MOST_DUTY

__all__ = ["one_term"]
pytestmark = pytest.mark.usefixtures("one_term")


def _learned(**changes: Any) -> Run:
    """Ring is faster by a fifth, and in force."""
    run = Run(**changes).join()
    run.us[KEY][RING.flat] = 80.0
    run.until(Phase.EXPLOIT)
    run.epoch()
    assert run.its.in_force == {KEY: RING.flat}
    return run


def _mode(run: Run, mode: str) -> None:
    run.core.order({"order": "mode", "mode": mode})


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_off_wants_nccls_own_choice_from_the_next_epoch_on(mode: str) -> None:
    run = _learned()
    _mode(run, mode)
    assert run.core.handed_in(run.core.phases.epoch), "the epoch that is under way goes on to its end"
    run.epoch()  # the one that was under way
    assert run.its.wanted.tolist() == [0]
    assert not len(run.its.due.row)
    assert (run.its.duty == MOST_DUTY) == (mode == "off")
    run.epoch()
    assert run.its.in_force == {}
    for _ in range(20):
        run.epoch()
    assert run.its.in_force == {}
    _mode(run, "active")
    run.epoch()
    run.epoch()
    assert run.its.in_force == {KEY: RING.flat}, "what was learned is not forgotten"


def test_a_successor_follows_the_same_orders_and_the_next_run_does_not() -> None:
    run = _learned()
    _mode(run, "off")
    run.epoch()
    experiment = run.core.experiment
    successor = Coordinator(Plan(run="r", experiment=experiment), run.store)
    assert successor.steering.mode == "off"
    state = run.store.get("r/state")
    assert state is not None
    run.store.put("another/state", state)
    assert Coordinator(Plan(run="another", experiment=experiment), run.store).steering.mode == "active"


def test_rollback_goes_back_to_what_was_exploited_before_the_key_learned_anew() -> None:
    run = _learned()
    run.core.loop.shift(run.core.comms[run.comm].rows)  # as after an alarm
    run.us[KEY] = dict.fromkeys(run.us[KEY], 50.0) | {TREE.flat: 30.0}
    for _ in range(60):
        run.epoch(wants=TREE)
    assert run.its.in_force == {KEY: TREE.flat}
    run.core.order({"order": "rollback"})
    run.epoch()
    run.epoch()
    assert run.its.in_force == {KEY: RING.flat}
    for _ in range(10):
        run.epoch()
    assert run.its.in_force == {KEY: RING.flat}, "it stays there"
    _mode(run, "active")
    run.epoch()
    run.epoch()
    assert run.its.in_force == {KEY: TREE.flat}


def test_what_was_never_exploited_is_rolled_back_to_nccls_own_choice() -> None:
    run = _learned()
    run.core.order({"order": "rollback"})
    run.epoch()
    run.epoch()
    assert run.its.in_force == {}


def test_what_shadow_decided_is_no_evidence_once_tables_are_applied() -> None:
    run = Run(mode="shadow").join()
    version = run.context.version
    run.us[KEY][RING.flat] = 20.0  # booked on it while NCCL's own choice ran
    for _ in range(20):
        run.epoch()
    assert not run.context.apply
    assert run.context.applied_since > 1 << 40
    _mode(run, "active")
    run.epoch()
    assert run.context.apply
    assert version < run.context.applied_since <= run.context.version
    assert run.core.loop.evidence.samples[0, RING.flat] <= 1, "of what is left, one new decision outweighs it"
    assert run.core.loop.phase.tolist() == [Phase.BASELINE]


def test_a_table_that_was_only_recorded_is_replaced_once_it_is_to_be_applied() -> None:
    run = _learned()
    comm = run.core.comms[run.comm]
    shadow = DecisionTable.of(comm.version + 1, {KEY: RING}, max_channels=8, apply=False)
    comm.propose(shadow)
    comm.switch(shadow.version)
    run.epoch(n=1)
    assert not run.its.applied
    assert run.its.in_force == {KEY: RING.flat}


def test_a_canary_tunes_its_share_and_widens_when_that_has_settled() -> None:
    run = Run(canary={"share": 0.5})
    run.us[OTHER] = dict(run.us[KEY])
    run.join()
    for of in run.us.values():
        of[RING.flat] = 80.0
    tuned: set[int] = set()
    while run.core.steering.canary:
        run.epoch()
        tuned |= run.its.in_force.keys()
        if run.core.steering.canary:
            assert len(tuned) <= 1, "more than the canary's share was tuned"
            assert len(run.its.due.row) <= 1
        assert run.core.phases.epoch < 200
    assert len(tuned) == 1
    assert status_of(run.core).orders[-1]["by"] == "evidence"
    for _ in range(40):
        run.epoch()
    assert run.its.in_force == {KEY: RING.flat, OTHER: RING.flat}


def _steps(run: Run, seconds: float, first: int) -> Any:
    return run.news(steps={first: (seconds, float("nan")), first + 1: (seconds * 1.001, float("nan"))})


def test_a_canary_does_not_widen_while_steps_take_longer() -> None:
    run = Run(canary={"share": 0.5}, control={"learning": {"baseline_samples": 100, "draws": 4, "draw_samples": 2}})
    run.us[OTHER] = dict(run.us[KEY])
    run.join()
    run.us[KEY][RING.flat] = run.us[OTHER][RING.flat] = 80.0
    step = 0
    for _ in range(160):
        baseline = not any(run.its.in_force)
        run.epoch(news=_steps(run, 1.0 if baseline else 1.1, step))
        step += 2
    assert len(run.its.in_force) == 1
    assert "longer than with NCCL" in status_of(run.core).canary["waits"]  # type: ignore[index]
    run.core.order({"order": "canary", "share": 1, "communicators": []})
    run.epoch()
    assert status_of(run.core).canary is None


def test_a_canary_may_be_communicators_by_name() -> None:
    run = Run(canary={"communicators": ["data-parallel"], "widen": False}).join(name="tensor-parallel")
    run.epoch()
    run.epoch()
    assert not len(run.its.due.row)
    run = Run(canary={"communicators": ["data-parallel"], "widen": False}).join(name="data-parallel")
    run.epoch()
    assert len(run.its.due.row)
    run = Run(canary={"communicators": [f"{run.comm:016x}"[:15]], "widen": False}).join()
    run.epoch()
    assert len(run.its.due.row)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("off", "not an order"),
        ({}, "not an order"),
        ({"order": "halt"}, "there are mode, rollback, canary"),
        ({"order": "mode", "mode": "fast"}, "there are off, observe, shadow, active"),
        ({"order": "mode", "mode": ["off"]}, "there are off"),
        ({"order": "canary", "share": 0}, "above 0"),
        ({"order": "canary", "share": float("nan")}, "above 0"),
        ({"order": "canary", "share": "half"}, "above 0"),
        ({"order": "canary", "communicators": "all"}, "a list of names"),
        ({"order": "canary", "communicators": [""]}, "a list of names"),
    ],
)
def test_orders_that_are_none(order: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(order)


def test_the_overview_says_what_is_in_force_and_what_it_gains() -> None:
    run = _learned()
    for _ in range(50):
        run.epoch()
    said = overview(run.core)
    (comm,) = said["communicators"]
    (key,) = comm["keys"]
    assert (key["phase"], key["in_force"]) == ("exploit", RING.name)
    assert key["time_vs_nccl"] == pytest.approx(0.8, rel=0.02)
    assert 1.1 < said["speedup"] < 1.27
    assert said["own_s"] / said["took_s"] == said["speedup"]
    assert answer(run.core, {"order": "mode", "mode": "off"})["mode"] == "active", "it is followed with the next epoch"


def test_every_decision_that_ends_says_why_and_what_came_of_it() -> None:
    run = _learned()
    rows = np.concatenate([epoch.decisions for epoch in run.epochs])
    assert rows["samples"].sum() == sum(len(epoch.samples) for epoch in run.epochs)
    assert rows["why"].tolist()[:2] == [0, 1]
    assert {0, 1, 2, 3} == set(rows["why"].tolist())
    best = rows[rows["why"] == 3][-1]
    assert best["action"] == RING.flat
    assert best["expected_us"] == pytest.approx(80, rel=0.02)
    assert best["got_us"] == pytest.approx(80, rel=0.02)
    assert best["own_us"] == pytest.approx(100, rel=0.02)
    first = rows[rows["action"] == RING.flat][0]
    assert np.isnan(first["expected_us"]), "nothing was known of it"


def test_some_communicators_are_described_otherwise_or_left_alone() -> None:
    rules = [
        {"name": "tp_*", "tune": False},
        {"ranks": 2, "nodes": 2, "actions": {"channels": [0, 4]}, "llm": {"parallelism": "tp"}},
    ]
    told = {"fabric": REAL, "communicators": rules, "actions": {"channels": [0, 8, 16]}}
    alone = Run(**told).join(name="tp_0")
    assert status_of(alone.core).off == {f"{alone.comm:x}": "the experiment does not tune it"}
    assert alone.its.duty == MOST_DUTY
    other = Run(**told).join(name="dp")
    other.epoch()
    allowed = other.core.loop.allowed(np.zeros(1, np.int64))[0, RING.pair].any(-1)
    assert np.array(CHANNEL_VALUES)[allowed].tolist() == [0, 4]
    assert decode(other.its.due.observation[0])["parallelism"] == "tp"
    successor = Coordinator(other.core.plan, other.store)
    other.core.save()
    assert Coordinator(other.core.plan, other.store).plan.rule_of(other.core.comms[other.comm].example) is not None
    assert not successor.comms, "nothing had been saved"


def test_a_rule_says_which_communicators_it_is_for() -> None:
    with pytest.raises(ValidationError, match="say which communicators: by name, ranks or nodes"):
        experiment_of(communicators=[{"tune": False}])


def test_what_no_choice_of_nccls_can_hide_is_said_once_all_is_learned() -> None:
    run = Run(computation_s=0.1).join()
    step = 0

    def epoch(seconds: float) -> None:
        nonlocal step
        run.epoch(news=run.news(steps={step + i: (seconds, 1.0) for i in range(30)}))
        step += 30

    while run.core.phases.phase is not Phase.EXPLOIT:
        assert status_of(run.core).lossless_saturated is None
        epoch(0.12)
    # What steps took while it was learned is not what they take now.
    for epochs, seconds, limited in ((1, 0.105, False), (20, 0.12, True)):
        for _ in range(epochs):
            epoch(seconds)
        assert status_of(run.core).lossless_saturated is limited
    run.core.order({"order": "rollback"})
    run.epoch()
    assert status_of(run.core).lossless_saturated is None, "not all that was learned is in force"
    silent = Run().join()
    silent.until(Phase.EXPLOIT)
    assert status_of(silent.core).lossless_saturated is None, "nobody has said what computation takes"


def test_a_communicator_without_a_key_has_nothing_to_explore_and_a_page() -> None:
    run = Run().join()
    said = overview(run.core)
    assert [comm["may_explore"] for comm in said["communicators"]] == [0.0]
    with Console(file=io.StringIO()) as console:
        console.print(_page(said, keys=True))
