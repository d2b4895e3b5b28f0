"""The reward beside a job: what every term is reduced from, and that no rank's own view gets into it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from actors.messages import RankEpoch
from actors.rewards import Rewards
from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, Action
from dynamiccl_ray.book import KeyBook, Samples
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import N_PAIRS, Algorithm, Protocol, pair_index
from dynamiccl_ray.reward import Reward

A, B = (key_of(4, 1 << k, False) for k in (16, 20))
RING = pair_index(Algorithm.RING, Protocol.SIMPLE)
WEIGHTS = Reward(iteration=1, switch=1, congestion=1, probe=1, convergence=1, sm=1, tier=1, fault=1)
NONE = np.zeros(0, np.int64)


def _book() -> KeyBook:
    book = KeyBook(
        arl0=1e6, guardrail_margin=0.02, guardrail_samples=8, valid=np.ones((N_PAIRS, N_CHANNELS), np.bool_),
        valid_chunks=np.ones((N_PAIRS, N_CHUNKS), np.bool_),
    )  # fmt: skip
    # Not in the order of the keys' numbers.
    for key in (B, A):
        book.row(key)
    return book


def _samples(us: dict[int, list[float]], *, channels: int = 8, pair: int = RING) -> Samples:
    key = np.array([k for k, times in us.items() for _ in times])
    n = len(key)
    return Samples(
        key=key, nbytes=np.full(n, 1 << 20), dseq=np.arange(n), time_us=np.array([t for x in us.values() for t in x]),
        skew=np.zeros(n), pair=np.full(n, pair), channels=np.full(n, channels),
    )  # fmt: skip


def _heard(rank: int, steps: dict[int, tuple[float, float]] | None = None, faults: int = 0) -> RankEpoch:
    return RankEpoch(
        comm=1, rank=rank, version=0, dseq=NONE, key=NONE, nbytes=NONE, exec_ns=NONE, pair=NONE, channels=NONE,
        refused=frozenset(), costs={}, fingerprints={}, max_channels=8, unused=0, dropped=0,
        steps=steps or {}, faults=faults,
    )  # fmt: skip


class _Run:
    """Epochs of one communicator of 9 nodes that reaches tier 4, on GPUs of 64 SMs."""

    def __init__(self, weights: Reward = WEIGHTS) -> None:
        self.book, self.rewards = _book(), Rewards(weights, sms=64, tier=4, nodes=9)

    def epoch(
        self, us: dict[int, list[float]], actions: dict[int, Action] | None = None, **samples: Any
    ) -> dict[str, list[float]]:
        reduced = _samples(us, **samples)
        self.book.add(reduced, actions or {}, watch=False)
        parts = self.rewards.terms(reduced, self.book, actions or {}, max_channels=16)
        return {name: part.tolist() for name, part in parts.items()}

    def said(self, *reports: RankEpoch, baseline: bool = False) -> dict[str, list[float]]:
        self.rewards.hear(list(reports), baseline=baseline)
        return self.epoch({A: [100.0], B: [100.0]})


def test_terms_of_the_actions_in_force() -> None:
    run = _Run()
    parts = run.epoch({A: [100, 100], B: [400]})
    assert parts["primary"] == pytest.approx([0, 0])
    assert (parts["switch"], parts["probe"], parts["congestion"]) == ([0, 0], [0, 0], [0, 0])
    assert parts["sm"] == [-8 / 64] * 2
    assert parts["tier"] == [-1, -1], "the ring that NCCL chose"
    ring, tree = Action(pair=RING, channels=2), Action(pair=pair_index(Algorithm.TREE, Protocol.LL))
    parts = run.epoch({A: [50], B: [300]}, {A: ring, B: tree}, channels=16, pair=tree.pair)
    # Rows are the book's: B first.
    assert parts["primary"] == pytest.approx([np.log(4 / 3), np.log(2)])
    assert (parts["switch"], parts["probe"]) == ([-1, -1], [-1, -1])
    assert parts["sm"] == [-16 / 64] * 2
    assert parts["tier"] == pytest.approx([-4 / 8] * 2), "log2 of 9 nodes, rounded up, of 8 hops"
    parts = run.epoch({A: [60], B: [300]}, {A: ring, B: Action(pair=tree.pair, chunk=1)})
    assert parts["switch"] == [-1, 0], "another chunk is another action"
    assert parts["probe"] == [-1, 0]
    assert parts["congestion"] == pytest.approx([0, -np.log(60 / 50)])
    parts = run.epoch({A: [50]}, {A: ring, B: tree})
    assert np.isnan(parts["primary"]).tolist() == [True, False], "B did not run"
    parts = run.epoch({A: [50], B: [300]})
    assert (parts["switch"], parts["probe"]) == ([-1, -1], [0, 0]), "back to NCCL's own, which is never new"


def test_a_key_that_did_not_run_has_tried_nothing_and_means_are_of_each_keys_own_collectives() -> None:
    run, actions = _Run(), {A: Action(pair=RING), B: Action(pair=RING)}
    run.epoch({A: [100], B: [100]})
    parts = run.epoch({A: [100, 100]}, actions, channels=[8, 16])
    assert parts["sm"] == [0, -12 / 64]
    parts = run.epoch({A: [100, 100], B: [100, 100]}, actions, channels=[8, 16, 32, 32])
    assert parts["probe"] == [-1, 0]
    assert parts["sm"] == [-32 / 64, -12 / 64]
    # The caller's table changes in place.
    actions[A] = Action(pair=RING, channels=2)
    assert run.epoch({A: [100], B: [100]}, actions)["switch"] == [0, -1]


def test_what_nccl_does_not_say_is_the_communicators_maximum_and_no_tier() -> None:
    parts = _Run().epoch({A: [100], B: [100]}, channels=0, pair=0)
    assert parts["sm"] == [-16 / 64] * 2
    assert parts["tier"] == [0, 0]
    unknown = Rewards(WEIGHTS, sms=None, tier=2, nodes=9)
    book, samples = _book(), _samples({A: [100]})
    book.add(samples, {}, watch=False)
    assert unknown.terms(samples, book, {}, max_channels=16).keys() == {
        "primary", "switch", "congestion", "probe", "tier",
    }  # fmt: skip


def test_a_step_counts_once_every_reporting_rank_has_reported_it() -> None:
    run = _Run()
    for step in range(4):
        parts = run.said(*(_heard(r, {step: (1.0 + 0.1 * r, 2.0)}) for r in range(3)), baseline=True)
        assert parts["iteration"] == pytest.approx([0, 0])
    # The slowest of three ranks took 1.2 s with NCCL's own choice. Rank 2 is late.
    early = [_heard(0, {4: (1.0, 3.0)}), _heard(1, {4: (1.1, 5.0)}), _heard(2)]
    assert not run.said(*early).keys() & {"iteration", "convergence"}
    parts = run.said(_heard(0, {5: (1.0, 3.0)}), _heard(1), _heard(2, {4: (1.5, 4.0)}))
    assert parts["iteration"] == pytest.approx([-(1.5 / 1.2 - 1)] * 2)
    # The mean loss of step 4 is 4, that before it was 2.
    assert parts["convergence"] == pytest.approx([-0.01 / 2] * 2)
    # Two whole steps in one epoch: the mean of their times, the last one's loss; a rank that reports none has no say.
    two = {5: (1.2, 4.0), 6: (1.2, 4.0)}
    nan = float("nan")
    parts = run.said(_heard(0, {6: (1.4, nan)}), _heard(1, two), _heard(2, two), _heard(3))
    assert parts["iteration"] == pytest.approx([-((1.2 + 1.4) / 2 / 1.2 - 1)] * 2)
    assert parts["convergence"] == pytest.approx([-1, -1]), "it stands still"
    assert "iteration" not in run.said(*(_heard(r) for r in range(4)))


def test_the_baseline_of_an_iteration_is_measured_anew_after_a_drift() -> None:
    run = _Run()
    # The median: a slow first step does not matter.
    for step, seconds in enumerate([30.0, 2.0, 2.0]):
        run.said(_heard(0, {step: (seconds, 1.0)}), baseline=True)
    assert run.said(_heard(0, {3: (1.0, 1.0)}))["iteration"] == pytest.approx([0.5, 0.5])
    run.rewards.shift()
    assert "iteration" not in run.said(_heard(0, {4: (1.0, 1.0)})), "nothing to compare with yet"
    run.said(_heard(0, {5: (4.0, 1.0)}), baseline=True)
    assert run.said(_heard(0, {6: (4.0, 1.0)}))["iteration"] == pytest.approx([0, 0])


def test_only_the_latest_steps_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.rewards._BASELINE_STEPS", 3)
    monkeypatch.setattr("actors.rewards._PENDING", 2)
    run = _Run()
    for step, seconds in enumerate([9.0, 9.0, 9.0, 2.0, 2.0, 2.0]):
        run.said(_heard(0, {step: (seconds, 1.0)}), baseline=True)
    assert run.said(_heard(0, {6: (1.0, 1.0)}))["iteration"] == pytest.approx([0.5, 0.5])
    # Rank 1 reports once and then falls silent: what rank 0 says is not kept for ever.
    run.said(_heard(1, {100: (1.0, 1.0)}))
    for step in range(100, 110):
        run.said(_heard(0, {step: (1.0, 1.0)}))
    assert sorted(run.rewards.state()["_pending"]) == [108, 109]


def test_a_fault_on_any_rank_is_everyones_and_counts_once() -> None:
    run = _Run()
    assert "fault" not in run.said(_heard(0), _heard(1)), "a job that says nothing is no source"
    assert run.said(_heard(0, faults=0), _heard(1, faults=1))["fault"] == [-1, -1]
    assert run.said(_heard(0, faults=0), _heard(1, faults=1))["fault"] == [0, 0]
    late = _Run()
    assert late.said(_heard(0, faults=7))["fault"] == [0, 0], "before anybody listened"


def test_the_order_in_which_ranks_are_heard_does_not_matter() -> None:
    results = []
    for order in itertools.permutations(range(3)):
        run, seen = _Run(), []
        for step in range(5):
            told = [_heard(r, {step: (1 + r * 0.1 + step, float(r * step))}, faults=int(r == step)) for r in range(3)]
            seen.append(run.said(*(told[r] for r in order), baseline=step < 2))
        results.append(seen)
    assert all(result == results[0] for result in results)
    assert results[0][4].keys() >= {"iteration", "convergence", "fault"}


def test_a_successor_goes_on_as_if_nothing_had_happened() -> None:
    one, other = _Run(), _Run()
    ring = {A: Action(pair=RING), B: Action(pair=RING)}
    for run in (one, other):
        run.said(_heard(0, {1: (1.0, 3.0)}), baseline=True)
        run.epoch({A: [100], B: [100]}, ring)
    successor = Rewards(WEIGHTS, sms=64, tier=4, nodes=9)
    successor.restore(other.rewards.state())
    other.rewards = successor
    results = []
    for run in (one, other):
        run.rewards.hear([_heard(0, {2: (1.5, 3.5)}, faults=1)], baseline=False)
        results.append(run.epoch({A: [100], B: [100]}, ring))
    assert results[0] == results[1]
    assert results[0]["switch"] == results[0]["probe"] == [0, 0]
    assert results[0]["iteration"] == pytest.approx([-0.5, -0.5])


def test_a_successor_knows_whose_reports_are_missing() -> None:
    first = Rewards(WEIGHTS, sms=64, tier=4, nodes=9)
    both = [_heard(0, {0: (1.0, 1.0)}), _heard(1, {0: (1.0, 1.0)})]
    first.hear(both, baseline=True)
    first.hear([_heard(0, {1: (1.0, 1.0)}), _heard(1)], baseline=False)
    run = _Run()
    run.rewards.restore(first.state())
    assert "iteration" not in run.said(_heard(0, {2: (1.0, 1.0)})), "rank 1 has not said what steps 1 and 2 took"
    assert run.said(_heard(1, {1: (2.0, 1.0)}))["iteration"] == pytest.approx([-1, -1])
