"""The coordinator without Ray: reduction over ranks, fingerprints, phases, communicators that come and go, restarts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driven import COMM, COST, KEY, LEARNING, OTHER, REAL, RING, TERM, TREE, Run, experiment_of, member_of, one_term
from test_reduction import collectives

from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.actors.overview import status_of
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.control.agreement import Answer, Decision, MemoryStore, Standing
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.keys import key_name
from dynamiccl_ray.knobs import Algorithm, Protocol, pair_index

__all__ = ["one_term"]
pytestmark = pytest.mark.usefixtures("one_term")


def test_a_collective_costs_what_it_takes_its_fastest_rank_and_the_rest_is_skew() -> None:
    run = Run().join()
    run.hand_in(
        run.report(0, collectives([1, 2, 3], [100, 120, 140], key=KEY)),
        run.report(1, collectives([1, 2, 3, 4], [110, 90, 200, 999], key=KEY)),
    )
    samples = run.epochs[-1].samples
    assert samples["time_us"].tolist() == [0.1, 0.09, 0.14]
    assert samples["skew"] == pytest.approx(np.log([1.1, 120 / 90, 200 / 140]))
    assert samples["dseq"].tolist() == [1, 2, 3]
    assert status_of(run.core).collectives == 3


def test_whatever_teaches_nothing_is_counted() -> None:
    run = Run().join()
    unknown = collectives([1], key=KEY, version=7)
    run.hand_in(run.report(0, unknown, unmatched=3, news=run.news(unused=2, dropped=5)), run.report(1, unknown))
    status = status_of(run.core)
    assert (status.collectives, status.unused, status.dropped) == (0, 1 + 3 + 2, 5)


def test_groups_are_measured_as_groups_unless_the_key_also_runs_alone() -> None:
    run = Run().join()
    grouped = collectives([1, 2], key=KEY, aggregate=1)
    run.hand_in(run.report(0, grouped), run.report(1, grouped))
    assert status_of(run.core).collectives == 2
    both = collectives([3, 4, 5], key=KEY, aggregate=[0, 1, 0])
    run.hand_in(run.report(0, both), run.report(1, both))
    assert status_of(run.core).collectives == 4
    assert status_of(run.core).unused == 1


def test_from_baseline_through_learning_to_exploitation() -> None:
    run = Run().join()
    run.us[KEY][RING.flat] = 80.0
    assert run.core.phases.phase is Phase.BASELINE
    run.epoch()
    assert run.context.comms[0].due.draw.tolist() == [True]
    run.epoch()
    assert run.core.phases.phase is Phase.LEARN
    assert run.its.reward == pytest.approx([np.log(100 / 80)], abs=0.03)
    run.until(Phase.EXPLOIT)
    run.epoch()
    assert run.its.in_force == {KEY: RING.flat}
    assert run.context.watching
    before = run.core.phases.round
    run.epoch()
    assert run.core.phases.round == before + 1, "watching is a round of its own"


def test_an_epoch_waits_for_what_is_missing_of_a_decision() -> None:
    run = Run().join()
    run.epoch(n=3)
    assert run.its.need.tolist() == [1]
    run.epoch(n=1)
    assert run.its.need.tolist() == [LEARNING["draw_samples"]]


def test_a_key_that_is_never_measured_holds_nobody_up_and_is_shown() -> None:
    run = Run().join()
    run.us[OTHER] = dict.fromkeys(range(100_000), 50.0)
    run.until(Phase.EXPLOIT, only=(KEY,))
    assert run.its.need.tolist() == [0, 0]
    status = status_of(run.core)
    assert status.unmeasured == {f"{COMM:x}": [key_name(OTHER)]}
    assert status.keys["exploit"] == 1
    assert OTHER not in run.its.in_force


def test_a_key_that_ran_once_holds_nobody_up() -> None:
    run = Run().join()
    run.us[OTHER] = dict.fromkeys(range(100_000), 50.0)
    run.epoch(n=1)
    assert run.until(Phase.EXPLOIT, only=(KEY,)) < 20
    assert status_of(run.core).keys == {"baseline": 1, "learn": 0, "exploit": 1, "adapt": 0, "check": 0}


def test_drift_begins_anew_and_what_was_known_is_a_hint() -> None:
    run = Run().join()
    run.us[KEY][RING.flat] = 80.0
    run.until(Phase.EXPLOIT)
    for _ in range(10):
        run.epoch()
    assert status_of(run.core).alarms == ()
    changed = run.dseq
    run.us = {KEY: dict.fromkeys(range(100_000), 150.0) | {RING.flat: 120.0}}
    run.epoch(n=24)
    (alarm,) = status_of(run.core).alarms
    assert (alarm.comm, alarm.key) == (COMM, KEY)
    assert changed < alarm.dseq <= changed + 24
    assert run.core.phases.phase is Phase.BASELINE
    run.epoch()
    assert run.its.in_force == {}, "NCCL's own choice is measured anew"
    run.until(Phase.ADAPT)
    run.until(Phase.EXPLOIT)
    row = np.zeros(1, np.int64)
    assert run.core.loop.evidence.baseline[0] == pytest.approx(np.log(150), abs=0.02)
    assert run.core.loop.evidence.mean(row, row + RING.flat) == pytest.approx([np.log(120)], abs=0.02)


def test_iterations_are_measured_anew_after_drift() -> None:
    run = Run().join()

    def step(number: int, seconds: float) -> dict[str, Any]:
        run.epoch(news=run.news(steps={number: (seconds, 1.0)}))
        return run.epochs[-1].terms

    step(0, 2.0)
    assert step(1, 1.0)["iteration"] == pytest.approx([0.05]), "a tenth of half as long"
    run.core.comms[COMM].reward.shift()
    assert "iteration" not in step(2, 1.0)


def test_observing_decides_nothing_and_shadow_applies_nothing() -> None:
    observing = Run(mode="observe").join()
    for _ in range(5):
        observing.epoch()
    assert len(observing.its.due.row) == 0
    assert observing.context.watching
    assert status_of(observing.core).switches == 0
    shadow = Run(mode="shadow").join()
    shadow.epoch()
    assert (shadow.context.apply, shadow.context.greedy) == (False, True)


def test_what_nccl_does_not_offer_or_take_is_masked() -> None:
    cost = COST.copy()
    cost[Algorithm.NVLS] = -1
    run = Run().join()
    ran = collectives([1], key=KEY)
    run.hand_in(run.report(0, ran, costs={KEY: cost}), run.report(1, ran))
    rows = np.zeros(1, np.int64)
    assert not run.core.loop.allowed(rows)[0, pair_index(Algorithm.NVLS, Protocol.SIMPLE)].any()
    assert run.core.loop.allowed(rows)[0, RING.pair].any(-1).any()
    run.hand_in(run.report(0, ran[:0], refused={KEY: RING.flat}), run.report(1, ran[:0]))
    assert not run.core.loop.allowed(rows)[0, RING.pair].any(-1).any()


def test_what_nccl_offers_is_heard_whenever_it_is_told() -> None:
    """A report may be lost with its runner, and the key be known from another."""
    cost = COST.copy()
    cost[Algorithm.NVLS] = -1
    run = Run().join()
    ran = collectives([1], key=KEY)
    run.hand_in(run.report(0, ran, costs={}), run.report(1, ran, costs={}))
    assert run.its.offered.tolist() == [False]
    run.hand_in(run.report(0, ran[:0], costs={KEY: cost}), run.report(1, ran[:0], costs={}))
    assert run.its.offered.tolist() == [True]
    assert not run.core.loop.allowed(np.zeros(1, np.int64))[0, pair_index(Algorithm.NVLS, Protocol.SIMPLE)].any()
    successor = Coordinator(run.core.plan, run.store)
    run.core.save()
    assert Coordinator(run.core.plan, run.store).loop.offers.known.tolist() == [True]
    assert not len(successor.comms), "nothing had been saved before"


def test_channels_beyond_what_the_communicator_has_shown_are_not_asked_for() -> None:
    run = Run(fabric=REAL, actions={"channels": [0, 4, 8, 16]}).join()
    ran = collectives([1], key=KEY)
    run.hand_in(run.report(0, ran, max_channels=4), run.report(1, ran, max_channels=8))
    assert run.core.loop.allowed(np.zeros(1, np.int64))[0, RING.pair].any(-1).nonzero()[0].tolist() == [0, 3, 4]


# ---- what cannot be tuned ----


def test_a_job_whose_collectives_are_not_nccls_is_left_alone() -> None:
    run = Run(workload={"architecture": "parameter-server"}).join()
    assert "parameter-server" in status_of(run.core).off[f"{COMM:x}"]
    in_network = Coordinator(Plan(run="r", experiment=experiment_of(), topology={"ina_active": True}), MemoryStore())
    in_network.join("a", [member_of(0), member_of(1)])
    assert "network" in status_of(in_network).off[f"{COMM:x}"]


def test_ranks_that_called_different_collectives_are_not_tuned() -> None:
    run = Run().join()
    none = collectives([])
    for window, hashes, off in ((3, (5, 5), False), (4, (5, 6), True)):
        run.hand_in(*(run.report(r, none, news=run.news(fingerprints={window: hashes[r]})) for r in range(2)))
        assert run.its.off == off
    assert "different collectives" in status_of(run.core).off[f"{COMM:x}"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"tuner_abi": 5}, "tuner_abi"), ({"user_env": True}, "user_env"), ({"nodes": 3}, "nodes")],
)
def test_ranks_that_loaded_different_things_are_not_tuned(changes: dict[str, Any], why: str) -> None:
    core = Run().core
    core.join("a", [member_of(0)])
    core.join("b", [member_of(1, **changes)])
    assert why in status_of(core).off[f"{COMM:x}"]


def test_half_a_plugin_is_said_so() -> None:
    assert "not both loaded" in status_of(Run().join(profiler_abi=0).core).off[f"{COMM:x}"]


# ---- communicators and runners that come and go ----


def test_a_communicator_without_all_of_its_ranks_is_left_alone() -> None:
    run = Run()
    run.core.join("a", [member_of(0)])
    assert run.core.report("a", 0, [run.report(0, collectives([1], key=KEY))], None) is not None
    assert run.context.comms == ()
    run.join()
    run.hand_in(*(run.report(r, collectives([2], key=KEY)) for r in range(2)))
    assert len(run.context.comms) == 1
    run.core.leave("b")
    run.core.close_epoch()
    assert run.context.comms == ()


def test_a_communicator_that_is_gone_for_good_is_forgotten_and_others_keep_what_they_know() -> None:
    run = Run().join()
    run.us[KEY][RING.flat] = 80.0
    other = [member_of(rank, comm=99) for rank in range(2)]
    for rank, runner in enumerate("ab"):
        run.core.join(runner, [other[rank], member_of(rank)])
    run.core.intake.add_keys(run.core.comms[99], [OTHER])
    run.until(Phase.EXPLOIT)
    assert len(run.core.loop) == 2
    run.join()
    for _ in range(120):
        run.epoch()
    assert list(run.core.comms) == [COMM]
    assert len(run.core.loop) == 1
    assert run.its.in_force == {KEY: RING.flat}
    assert run.core.loop.evidence.baseline == pytest.approx([np.log(100)], abs=0.02)


def _dies(run: Run, comm: int, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Their runners have seen it, and serve what is left."""
    for rank, runner in enumerate("ab"):
        gone = frozenset({(comm, rank)} & {(comm, r) for r in ranks})
        run.core.join(runner, [member_of(rank)], gone)


def test_a_communicator_is_forgotten_once_all_of_its_ranks_are_gone_and_not_before() -> None:
    run = Run().join()
    run.us[KEY][RING.flat] = 80.0
    for rank, runner in enumerate("ab"):
        run.core.join(runner, [member_of(rank, comm=99), member_of(rank)])
    run.core.intake.add_keys(run.core.comms[99], [OTHER])
    run.core.comms[99].dropped[0] = 7
    run.until(Phase.EXPLOIT)
    _dies(run, 99, ranks=(1,))
    run.epoch()
    assert set(run.core.comms) == {COMM, 99}, "one rank may be served again"
    _dies(run, 99, ranks=(0,))
    run.epoch()
    assert set(run.core.comms) == {COMM}
    assert len(run.core.loop) == 1
    assert status_of(run.core).dropped == 7, "what it had is counted"
    for _ in range(3):
        run.epoch()
    assert run.its.in_force == {KEY: RING.flat}
    assert status_of(run.core).alarms == ()


def test_keys_that_are_due_when_a_communicator_is_forgotten_stay_who_they_are() -> None:
    """Rows of the control loop move together."""
    run = Run()
    other = [member_of(rank, comm=99) for rank in range(2)]
    for rank, runner in enumerate("ab"):
        run.core.join(runner, [other[rank], member_of(rank)])
    run.core.intake.add_keys(run.core.comms[99], [OTHER, KEY])
    run.core.close_epoch()
    _dies(run, 99)
    run.epoch()
    assert run.its.due.draw.tolist() == [True], "its baseline is measured"
    assert run.its.keys[run.its.due.row].tolist() == [KEY]
    assert set(run.core.comms) == {COMM}


def test_what_is_asked_of_a_communicator_that_is_no_more_is_answered() -> None:
    run = Run().join()
    version = run.context.version
    for rank, runner in enumerate("ab"):
        run.core.join(runner, [], frozenset({(COMM, rank)}))
    run.core.close_epoch()
    assert run.core.comms == {}
    answer = Answer(rank=0, digest=1, hold_at=5)
    assert run.core.promise("a", COMM, version, [answer], None, run.core.term) is None
    assert run.core.open_version(COMM) is None
    assert run.core.abort(COMM, version) is None


def test_a_runner_that_was_given_up_on_joins_again() -> None:
    run = Run().join()
    assert run.core.report("c", 0, [], None).round_end  # type: ignore[union-attr]


# ---- agreement and restarts ----


def test_a_successor_goes_on_where_its_predecessor_was() -> None:
    run = Run().join()
    run.us[KEY][RING.flat] = 80.0
    run.until(Phase.EXPLOIT)
    run.core._end_round()
    successor = Run(run.store)
    assert successor.core.phases.phase is Phase.EXPLOIT
    assert status_of(successor.core).keys["exploit"] == 1
    version = run.core.comms[COMM].version
    successor.join(standing=Standing(base=version, pending=run.context.version - 1), in_force=version)
    successor.us, successor.dseq = run.us, run.dseq
    assert successor.core.comms[COMM].in_force == {KEY: RING.flat}
    assert successor.context.version >= run.context.version
    assert successor.core.report("a", successor.core.phases.epoch, [], None) is None
    successor.core.report("b", successor.core.phases.epoch, [], None)
    for _ in range(3):
        successor.epoch()
    assert status_of(successor.core).alarms == ()
    assert successor.its.in_force == {KEY: RING.flat}


def test_nothing_is_saved_again_while_nothing_is_decided() -> None:
    run = Run().join()
    run.us[KEY][RING.flat] = 80.0
    run.until(Phase.EXPLOIT)
    run.epoch()
    saved = []
    put = run.store.put

    def counting(key: str, value: bytes) -> None:
        saved.append(run.core.phases.round)
        put(key, value)

    run.store.put = counting  # type: ignore[method-assign]
    first = run.core.phases.round
    for _ in range(40):
        run.epoch()
    assert run.core.phases.round == first + 40
    assert 1 <= len(saved) <= 2, "now and then, for what was measured"
    saved.clear()
    run.us = {KEY: dict.fromkeys(range(100_000), 150.0) | {RING.flat: 120.0}}
    while not status_of(run.core).alarms:
        run.epoch(n=8)
    assert saved[-1] == run.core.phases.round, "drift"
    assert status_of(Run(run.store).core).alarms == status_of(run.core).alarms


def test_a_successor_of_communicators_without_ranks_or_keys() -> None:
    run = Run().join()
    run.us[KEY][RING.flat] = 80.0
    for rank, runner in enumerate("ab"):
        run.core.join(runner, [member_of(rank, comm=comm) for comm in (1, 2, COMM)])
    run.until(Phase.EXPLOIT)
    for runner in "ab":
        run.core.leave(runner)
    run.core.save()
    successor = Run(run.store)
    assert [len(successor.core.comms[comm].keys) for comm in (1, 2, COMM)] == [0, 0, 1]
    assert successor.core.comms[COMM].in_force == {KEY: RING.flat}
    successor.us, successor.dseq = run.us, run.dseq
    version = run.core.comms[COMM].version
    successor.join(standing=Standing(base=version), in_force=version, table=((KEY, RING.flat),))
    for _ in range(3):
        successor.epoch()
    assert successor.its.in_force == {KEY: RING.flat}
    assert Run(MemoryStore()).core.comms == {}
    empty = Run()
    empty.core.save()
    assert Run(empty.store).core.comms == {}


def test_a_successor_hears_from_the_ranks_what_was_decided_after_the_last_save() -> None:
    run = Run().join()
    run.epoch()
    run.core._end_round()
    run.commit({KEY: TREE})
    version = run.core.comms[COMM].version
    successor = Run(run.store)
    told = Standing(pending=version, switch_at=run.dseq + 1)
    first = member_of(0, standing=told, in_force=version, table=((KEY, TREE.flat),))
    second = member_of(1, standing=Standing(pending=version))
    successor.core.join("a", [first])
    assert successor.core.settle(second) == Decision(version=version, switch_at=run.dseq + 1)
    successor.core.join("b", [second])
    successor.core.close_epoch()
    assert successor.its.in_force == {KEY: TREE.flat}
    assert successor.context.version > version


def test_a_rank_that_was_never_told_is_told_once_all_have_been_heard() -> None:
    core = Run().core
    waiting = [member_of(rank, standing=Standing(pending=7)) for rank in range(2)]
    assert core.settle(waiting[0]) is None
    assert core.settle(waiting[1]) == Decision(version=7, switch_at=None)
    assert core.settle(waiting[0]) == Decision(version=7, switch_at=None)


def test_a_coordinator_that_meets_a_newer_one_hears_every_rank_again() -> None:
    run = Run().join()
    assert run.core.comms[COMM].complete
    run.core.join("a", [member_of(0, term=TERM + 5)])
    assert run.core.term > TERM + 5
    assert not run.core.comms[COMM].complete
    assert run.context.comms == ()
    assert run.core.settle(member_of(1)) is None, "shown under the term before"
    for rank, runner in enumerate("ab"):
        run.core.join(runner, [member_of(rank, term=run.core.term)])
    run.core.close_epoch()
    assert len(run.context.comms) == 1


def test_the_promise_of_a_runner_that_has_yet_to_join_is_no_answer() -> None:
    run = Run().join()
    answer = Answer(rank=0, digest=1, hold_at=5)
    assert run.core.promise("from before a restart", COMM, run.context.version, [answer], None, run.core.term) is None
    assert not run.core.comms[COMM].agreement.answered


def test_a_successor_takes_the_settings_that_it_is_given() -> None:
    run = Run().join()
    run.us[KEY][RING.flat] = 80.0
    run.until(Phase.EXPLOIT)
    run.core._end_round()
    control = {"learning": LEARNING, "guardrail": {"margin": 0.5}, "trigger": {"arl0": 123.0}}
    core = Run(run.store, control=control, fabric=REAL, actions={"channels": [0, 4]}).core
    assert core.loop.control.guardrail.margin == 0.5
    assert core.loop.cusum.h < run.core.loop.cusum.h
    assert core.loop.allowed(np.zeros(1, np.int64))[0, RING.pair].any(-1).nonzero()[0].tolist() == [0, 3]


@pytest.mark.parametrize("raw", [b"", b"PK\x03\x04junk", b"\x80\x04K\x01."])
def test_a_state_that_is_damaged_or_made_by_others_is_refused_and_never_run(raw: bytes) -> None:
    store = MemoryStore()
    store.put("r/state", raw)
    with pytest.raises(RunError, match="damaged"):
        Run(store)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_at_the_end_only_what_is_exploited_may_stay(keep: bool, checked: bool) -> None:
    run = Run().join()
    run.us[KEY][RING.flat] = 80.0
    run.until(Phase.EXPLOIT)
    run.us[OTHER] = dict.fromkeys(range(100_000), 100.0)
    while status_of(run.core).keys.get("learn", 0) == 0:
        run.epoch(wants=TREE)
    run.epoch(wants=TREE)
    assert run.its.in_force == {KEY: RING.flat, OTHER: TREE.flat}, "one exploits, one is being tried"
    if checked:  # what it had exploited is what its check began with
        run.core.loop._check(np.flatnonzero(run.core.loop.phase == Phase.EXPLOIT))
    before = run.context.version
    run.core.release(keep=keep)
    assert run.context.release
    assert run.context.version > before
    assert len(run.its.due.row) == 0
    wanted = dict(zip(run.its.keys.tolist(), run.its.wanted.tolist(), strict=True))
    assert wanted == {KEY: RING.flat if keep else 0, OTHER: 0}


def test_different_tables_make_the_leaders_the_next_one() -> None:
    run = Run().join()
    run.epoch()
    version = run.context.version
    mine = DecisionTable.of(version, {KEY: RING}, max_channels=8)
    run.core.promise(
        "a", COMM, version, [Answer(rank=0, digest=mine.digest, hold_at=5)], mine.to_bytes(), run.core.term
    )
    decision = run.core.promise("b", COMM, version, [Answer(rank=1, digest=1, hold_at=5)], None, run.core.term)
    assert decision is not None
    assert (decision.switch_at, decision.adopt_leader) == (None, True)
    none = collectives([])
    context = run.hand_in(run.report(0, none), run.report(1, none))
    assert DecisionTable.from_bytes(context.adopt[COMM]).actions() == mine.actions()
    assert status_of(run.core).digest_mismatches == 1
