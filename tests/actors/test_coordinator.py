"""The coordinator without Ray: reduction over ranks, fingerprints, phases, guardrail, restarts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from small import small_experiment

from actors.coordinator import Coordinator, Plan
from actors.messages import Member, Phase, RankEpoch
from dynamiccl_ray.actions import Action
from dynamiccl_ray.agreement import Answer, MemoryStore
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Algorithm, Protocol, pair_index
from dynamiccl_ray.table import DecisionTable

COMM = 0xABC
KEY = key_of(4, 1 << 20, False)
RING = pair_index(Algorithm.RING, Protocol.LL)
COST = np.full((7, 3), 10.0, np.float32)


def _member(rank: int, **changes: Any) -> Member:
    fields: dict[str, Any] = {
        "comm": COMM, "rank": rank, "ranks": 2, "nodes": 2, "tuner_abi": 6, "profiler_abi": 6, "user_env": False,
        "dseq": 0, "version": 0,
    }  # fmt: skip
    return Member(**(fields | changes))


def _coordinator(store: MemoryStore | None = None, **changes: Any) -> Coordinator:
    experiment = small_experiment("unit", **{"epochs": {"per_round": 2, "baseline_samples": 4}, **changes})
    return Coordinator(Plan(run="r", experiment=experiment, topology={}), store or MemoryStore())


def _epoch(rank: int, times: list[float], *, version: int = 0, first: int = 1, **changes: Any) -> RankEpoch:
    n = len(times)
    fields: dict[str, Any] = {
        "comm": COMM, "rank": rank, "version": version, "dseq": np.arange(first, first + n, dtype=np.uint64),
        "key": np.full(n, KEY, np.uint16), "nbytes": np.full(n, 1 << 20, np.uint64),
        "exec_ns": np.array([t * 1e3 for t in times], np.uint64), "refused": frozenset(), "costs": {KEY: COST},
        "pair": np.full(n, RING), "channels": np.full(n, 8, np.uint8),
        "fingerprints": {}, "max_channels": 8, "unused": 0, "dropped": 0,
    }  # fmt: skip
    return RankEpoch(**(fields | changes))


def _joined(coordinator: Coordinator) -> Coordinator:
    coordinator.join("a", [_member(0)])
    coordinator.join("b", [_member(1)])
    return coordinator


def _report(coordinator: Coordinator, zero: RankEpoch, one: RankEpoch) -> Any:
    assert coordinator.report("a", coordinator.epoch, [zero], 1.0) is None
    return coordinator.report("b", coordinator.epoch, [one], 1.0)


def test_a_collective_takes_as_long_as_its_slowest_rank_and_counts_only_if_all_report_it() -> None:
    seen: list[Any] = []
    coordinator = _joined(_coordinator())
    coordinator._observer = seen.append
    _report(coordinator, _epoch(0, [100, 120, 140]), _epoch(1, [110, 90, 200, 999], first=1))
    samples = seen[0]["samples"]
    assert samples.time_us.tolist() == [110, 120, 200]
    assert samples.dseq.tolist() == [1, 2, 3]
    assert coordinator.status()["unmatched"] == 1


def test_records_of_another_version_are_not_rewarded() -> None:
    coordinator = _joined(_coordinator())
    _report(coordinator, _epoch(0, [100], version=7), _epoch(1, [100], version=7))
    assert coordinator.status()["collectives"] == 0


def test_a_job_whose_collectives_are_not_nccls_is_left_alone() -> None:
    coordinator = _joined(_coordinator(workload={"architecture": "parameter-server"}))
    assert "parameter-server" in coordinator.status()["off"][f"{COMM:x}"]
    in_network = Plan(run="r", experiment=small_experiment("unit"), topology={"ina_active": True})
    assert "network" in _joined(Coordinator(in_network, MemoryStore())).status()["off"][f"{COMM:x}"]


def test_ranks_that_called_different_collectives_are_not_tuned() -> None:
    coordinator = _joined(_coordinator())
    _report(coordinator, _epoch(0, [100], fingerprints={3: 5}), _epoch(1, [100], fingerprints={3: 5}))
    assert not coordinator.context.comms[0].off
    _report(coordinator, _epoch(0, [100], fingerprints={4: 5}), _epoch(1, [100], fingerprints={4: 6}))
    assert coordinator.context.comms[0].off
    assert "different collectives" in next(iter(coordinator.status()["off"].values()))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tuner_abi": 5}, "tuner_abi"),
        ({"user_env": True}, "user_env"),
        ({"nodes": 3}, "nodes"),
    ],
)
def test_ranks_that_loaded_different_things_are_not_tuned(changes: dict[str, Any], why: str) -> None:
    coordinator = _coordinator()
    coordinator.join("a", [_member(0)])
    coordinator.join("b", [_member(1, **changes)])
    assert why in next(iter(coordinator.status()["off"].values()))


def test_half_a_plugin_is_said_so() -> None:
    coordinator = _coordinator()
    coordinator.join("a", [_member(0, profiler_abi=0)])
    coordinator.join("b", [_member(1, profiler_abi=0)])
    assert "not both loaded" in next(iter(coordinator.status()["off"].values()))


def test_a_communicator_without_all_of_its_ranks_is_left_alone() -> None:
    coordinator = _coordinator()
    coordinator.join("a", [_member(0)])
    assert coordinator.report("a", 0, [_epoch(0, [100])], None) is not None
    assert coordinator.context.comms == ()
    _joined(coordinator)
    _report(coordinator, _epoch(0, [100]), _epoch(1, [100]))
    assert len(coordinator.context.comms) == 1
    coordinator.leave("b")
    coordinator.close_epoch()
    assert coordinator.context.comms == ()


def _commit(coordinator: Coordinator, action: Action) -> int:
    version = coordinator.context.comms[0].version
    table = DecisionTable.of(version, {KEY: action}, max_channels=8)
    for runner, rank in (("a", 0), ("b", 1)):
        answer = Answer(rank=rank, digest=table.digest, hold_at=10)
        decision = coordinator.promise(runner, COMM, version, [answer], table.to_bytes() if rank == 0 else None)
    assert decision is not None
    assert decision.switch_at == 10
    return version


def _baseline(coordinator: Coordinator) -> None:
    rng = np.random.default_rng(0)
    for _ in range(2):
        times = rng.normal(100, 1, 6).tolist()
        _report(coordinator, _epoch(0, times), _epoch(1, times))


def test_phases_follow_what_was_measured() -> None:
    coordinator = _joined(_coordinator(learning={"min_rounds": 1, "max_rounds": 2}))
    assert coordinator.context.phase is Phase.BASELINE
    _baseline(coordinator)
    assert coordinator.context.phase is Phase.LEARN
    rng = np.random.default_rng(1)
    version = _commit(coordinator, Action(pair=RING))
    while coordinator.context.phase is Phase.LEARN:
        times = rng.normal(80, 1, 6).tolist()
        _report(coordinator, _epoch(0, times, version=version), _epoch(1, times, version=version))
        assert coordinator.context.comms[0].reward == pytest.approx([np.log(100 / 80)], abs=0.03)
    assert coordinator.context.phase is Phase.EXPLOIT
    assert coordinator.context.greedy
    for _ in range(10):
        times = rng.normal(80, 1, 6).tolist()
        _report(coordinator, _epoch(0, times, version=version), _epoch(1, times, version=version))
    assert coordinator.context.phase is Phase.EXPLOIT
    times = rng.normal(120, 1, 8).tolist()
    _report(coordinator, _epoch(0, times, version=version, first=500), _epoch(1, times, version=version, first=500))
    assert coordinator.context.phase is Phase.BASELINE
    assert coordinator.status()["alarms"][0]["dseq"] <= 505
    version = coordinator.context.comms[0].version
    empty = DecisionTable.of(version, {}, max_channels=8)
    for runner, rank in (("a", 0), ("b", 1)):
        answer = Answer(rank=rank, digest=empty.digest, hold_at=600)
        coordinator.promise(runner, COMM, version, [answer], empty.to_bytes() if rank == 0 else None)
    while coordinator.context.phase is Phase.BASELINE:
        times = rng.normal(150, 1, 6).tolist()
        _report(coordinator, _epoch(0, times, version=version), _epoch(1, times, version=version))
    assert coordinator.context.phase is Phase.ADAPT
    assert coordinator.context.comms[0].view.heat > 0
    # The old action's time is remembered relative to NCCL's own, which got half as fast.
    assert coordinator.book(COMM).log_ratio()[0, RING, 0] == pytest.approx(np.log(80 / 100), abs=0.05)


def test_the_reward_is_the_sum_of_its_terms_and_iterations_are_measured_anew_after_an_alarm() -> None:
    seen: list[Any] = []
    coordinator = _joined(_coordinator(learning={"min_rounds": 1, "max_rounds": 1}, reward={"switch": 0.25}))
    coordinator._observer = seen.append
    step = itertools.count()

    def epoch(us: float, seconds: tuple[float, float], version: int = 0) -> dict[str, float]:
        times, said = np.random.default_rng(len(seen)).normal(us, us / 100, 6).tolist(), next(step)
        ranks = [_epoch(r, times, version=version, steps={said: (seconds[r], 1.0 + said)}) for r in range(2)]
        _report(coordinator, *ranks)
        parts = {name: float(part[0]) for name, part in seen[-1]["terms"].items()}
        assert coordinator.context.comms[0].reward == pytest.approx([sum(parts.values())])
        return parts

    while coordinator.context.phase is Phase.BASELINE:
        assert epoch(100, (1.0, 2.0))["iteration"] == 0
    version = _commit(coordinator, Action(pair=RING))
    parts = epoch(80, (1.5, 1.0), version)
    assert parts["iteration"] == pytest.approx(-0.1 * (1.5 / 2 - 1)), "the slowest rank's, over that of the baseline"
    assert (parts["switch"], parts["probe"], parts["convergence"]) == (-0.25, -0.005, -0.001 * 0.01)
    assert parts["primary"] == pytest.approx(np.log(100 / 80), abs=0.03)
    assert epoch(80, (1.5, 1.0), version)["switch"] == 0
    assert "sm" not in parts, "nobody has said which GPU it is"
    assert coordinator.context.phase is Phase.EXPLOIT
    while coordinator.context.phase is Phase.EXPLOIT:
        times = 80 if len(seen) < 14 else 130
        epoch(times, (1.5, 1.0), version)
    assert coordinator.context.phase is Phase.BASELINE
    # Its successor knows that the old baseline is of no use, and which actions are in force and not new.
    successor = _joined(_coordinator(coordinator._store, reward={"switch": 0.25}))
    successor._observer, coordinator = seen.append, successor
    parts = epoch(130, (3.0, 3.0), version)
    assert (parts["iteration"], parts["switch"], parts["probe"]) == (0, 0, 0)
    assert epoch(130, (4.5, 3.0), version)["iteration"] == pytest.approx(-0.1 * (4.5 / 3.75 - 1))


def test_the_guardrail_masks_what_is_worse_with_confidence() -> None:
    coordinator = _joined(_coordinator(learning={"min_rounds": 100}, guardrail={"margin": 0.02, "samples": 8}))
    _baseline(coordinator)
    rng = np.random.default_rng(2)
    version = _commit(coordinator, Action(pair=RING))
    times = rng.normal(104, 0.5, 4).tolist()
    _report(coordinator, _epoch(0, times, version=version), _epoch(1, times, version=version))
    assert coordinator.context.comms[0].view.valid_channels[0, RING, 0], "four samples are no confidence"
    times = rng.normal(104, 0.5, 12).tolist()
    _report(coordinator, _epoch(0, times, version=version), _epoch(1, times, version=version))
    view = coordinator.context.comms[0].view
    assert not view.valid_channels[0, RING].any()
    assert view.valid_channels[0, 0, 0], "NCCL's own choice is never ruled out"


def test_what_nccl_does_not_offer_or_take_is_masked() -> None:
    cost = COST.copy()
    cost[Algorithm.NVLS] = -1
    coordinator = _joined(_coordinator())
    costs = {KEY: cost}
    _report(coordinator, _epoch(0, [100], costs=costs), _epoch(1, [100]))
    view = coordinator.context.comms[0].view
    assert not view.valid_channels[0, pair_index(Algorithm.NVLS, Protocol.SIMPLE)].any()
    assert view.valid_channels[0, RING].any()
    version = _commit(coordinator, Action(pair=RING))
    refused = frozenset({KEY})
    _report(coordinator, _epoch(0, [100], version=version, refused=refused), _epoch(1, [100], version=version))
    assert not coordinator.context.comms[0].view.valid_channels[0, RING].any()


def test_a_successor_knows_what_was_decided_after_the_last_save() -> None:
    store = MemoryStore()
    coordinator = _joined(_coordinator(store))
    _baseline(coordinator)
    version = _commit(coordinator, Action(pair=RING))
    successor = _coordinator(store)
    assert successor.comms[COMM].version == version
    assert successor.comms[COMM].actions == {KEY: Action(pair=RING)}
    assert successor.phase is Phase.LEARN
    assert successor.context.comms[0].version > version + 1
    # Runners that still talk to it as if nothing had happened are told to join again.
    assert successor.report("a", successor.epoch, [_epoch(0, [1])], None).round_end


def test_different_tables_make_the_leaders_the_next_one() -> None:
    coordinator = _joined(_coordinator())
    _baseline(coordinator)
    version = coordinator.context.comms[0].version
    mine = DecisionTable.of(version, {KEY: Action(pair=RING)}, max_channels=8)
    coordinator.promise("a", COMM, version, [Answer(rank=0, digest=mine.digest, hold_at=5)], mine.to_bytes())
    decision = coordinator.promise("b", COMM, version, [Answer(rank=1, digest=1, hold_at=5)], None)
    assert decision is not None
    assert decision.switch_at is None
    assert decision.adopt_leader
    _report(coordinator, _epoch(0, [100]), _epoch(1, [100]))
    assert DecisionTable.from_bytes(coordinator.context.adopt[COMM]).actions() == mine.actions()
    assert coordinator.status()["digest_mismatches"] == 1
