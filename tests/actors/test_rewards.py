"""The reward beside a job: what every term is reduced from, and that no rank's own view gets into it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from test_reduction import collectives

from dynamiccl_ray.actors.messages import Collectives, RankNews
from dynamiccl_ray.actors.rewards import JobReward
from dynamiccl_ray.agent.reward import Reward
from dynamiccl_ray.control.loop import Outcome
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Algorithm, Protocol, pair_index

A, B = (key_of(4, 1 << k, False) for k in (16, 20))
RING = pair_index(Algorithm.RING, Protocol.SIMPLE)
TREE = pair_index(Algorithm.TREE, Protocol.LL)
WEIGHTS = Reward(iteration=1, switch=1, congestion=1, probe=1, convergence=1, sm=1, tier=1, fault=1)


def _heard(steps: dict[int, tuple[float, float]] | None = None, faults: int = 0) -> RankNews:
    return RankNews(fingerprints={}, dropped=0, unused=0, steps=steps or {}, faults=faults)


def _ran(*keys: int, channels: list[int] | int = 8, pair: int = RING) -> Collectives:
    return collectives(list(range(len(keys))), key=list(keys), channels=channels, pair=pair)


def _outcome(known: tuple[bool, ...] = (True, True), **columns: Any) -> Outcome:
    n = len(known)
    fields = {"log_speedup": [0.0] * n, "switched": [False] * n, "probed": [False] * n, "congestion": [0.0] * n}
    return Outcome(known=np.array(known), **{k: np.array(v) for k, v in (fields | columns).items()})


class _Run:
    """Keys B and A of one communicator of 9 nodes that reaches tier 4, on GPUs of 64 SMs."""

    def __init__(self, weights: Reward = WEIGHTS) -> None:
        self.rewards = JobReward(weights, sms=64, tier=4, nodes=9)

    def judged(self, outcome: Outcome, ran: Collectives) -> dict[str, list[float]]:
        parts = self.rewards.terms(outcome, np.array([B, A]), ran, max_channels=16)
        return {name: part.tolist() for name, part in parts.items()}

    def said(self, *ranks: RankNews, baseline: bool = False) -> dict[str, list[float]]:
        self.rewards.hear(dict(enumerate(ranks)), baseline=baseline)
        return self.judged(_outcome(), _ran(A, B))


def test_terms_of_the_decisions_that_are_over() -> None:
    outcome = _outcome(
        log_speedup=[np.log(4 / 3), np.log(2)], switched=[True, False], probed=[False, True], congestion=[0.25, 0.5]
    )
    parts = _Run().judged(outcome, _ran(A, B, B, channels=[16, 8, 24], pair=TREE))
    assert parts["primary"] == pytest.approx([np.log(4 / 3), np.log(2)])
    assert (parts["switch"], parts["probe"]) == ([-1, 0], [0, -1])
    assert parts["congestion"] == [-0.25, -0.5]
    assert parts["sm"] == [-16 / 64, -16 / 64], "the mean of each key's own collectives"
    assert parts["tier"] == pytest.approx([-4 / 8] * 2), "log2 of 9 nodes, rounded up, of 8 hops"


def test_a_decision_that_cannot_be_judged_has_no_reward() -> None:
    parts = _Run().judged(_outcome(known=(True, False)), _ran(A, B))
    assert np.isnan(parts["primary"]).tolist() == [False, True]


def test_what_nccl_does_not_say_is_the_communicators_maximum_and_no_tier() -> None:
    parts = _Run().judged(_outcome(), _ran(A, B, channels=0, pair=0))
    assert parts["sm"] == [-16 / 64] * 2
    assert parts["tier"] == [0, 0]
    unknown = JobReward(WEIGHTS, sms=None, tier=2, nodes=9)
    assert unknown.terms(_outcome(), np.array([B, A]), _ran(A), max_channels=16).keys() == {
        "primary", "switch", "congestion", "probe", "tier",
    }  # fmt: skip


def test_a_step_counts_once_every_reporting_rank_has_reported_it() -> None:
    run = _Run()
    for step in range(4):
        parts = run.said(*(_heard({step: (1.0 + 0.1 * r, 2.0)}) for r in range(3)), baseline=True)
        assert parts["iteration"] == pytest.approx([0, 0])
    # The slowest of three ranks took 1.2 s with NCCL's own choice. Rank 2 is late.
    early = [_heard({4: (1.0, 3.0)}), _heard({4: (1.1, 5.0)}), _heard()]
    assert not run.said(*early).keys() & {"iteration", "convergence"}
    parts = run.said(_heard({5: (1.0, 3.0)}), _heard(), _heard({4: (1.5, 4.0)}))
    assert parts["iteration"] == pytest.approx([-(1.5 / 1.2 - 1)] * 2)
    # The mean loss of step 4 is 4, that before it was 2.
    assert parts["convergence"] == pytest.approx([-0.01 / 2] * 2)
    # Two whole steps in one epoch: the mean of their times, the last one's loss; a rank that reports none has no say.
    two = {5: (1.2, 4.0), 6: (1.2, 4.0)}
    nan = float("nan")
    parts = run.said(_heard({6: (1.4, nan)}), _heard(two), _heard(two), _heard())
    assert parts["iteration"] == pytest.approx([-((1.2 + 1.4) / 2 / 1.2 - 1)] * 2)
    assert parts["convergence"] == pytest.approx([-1, -1]), "it stands still"
    assert "iteration" not in run.said(*(_heard() for _ in range(4)))


def test_the_baseline_of_an_iteration_is_measured_anew_after_a_drift() -> None:
    run = _Run()
    # The median: a slow first step does not matter.
    for step, seconds in enumerate([30.0, 2.0, 2.0]):
        run.said(_heard({step: (seconds, 1.0)}), baseline=True)
    assert run.said(_heard({3: (1.0, 1.0)}))["iteration"] == pytest.approx([0.5, 0.5])
    run.rewards.shift()
    assert "iteration" not in run.said(_heard({4: (1.0, 1.0)})), "nothing to compare with yet"
    run.said(_heard({5: (4.0, 1.0)}), baseline=True)
    assert run.said(_heard({6: (4.0, 1.0)}))["iteration"] == pytest.approx([0, 0])


def test_steps_with_nccls_own_choice_and_tuned_ones_are_told_apart() -> None:
    run = _Run()
    assert run.rewards.steps_s() == (None, None)
    for step in range(40):
        run.said(_heard({step: (0.2, 1.0)}), baseline=step < 20)
    assert run.rewards.steps_s() == (pytest.approx(0.2), pytest.approx(0.2))
    run.rewards.shift()
    assert run.rewards.steps_s() == (None, None)


def test_only_the_latest_steps_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamiccl_ray.actors.rewards._BASELINE_STEPS", 3)
    monkeypatch.setattr("dynamiccl_ray.actors.rewards._PENDING", 2)
    run = _Run()
    for step, seconds in enumerate([9.0, 9.0, 9.0, 2.0, 2.0, 2.0]):
        run.said(_heard({step: (seconds, 1.0)}), baseline=True)
    assert run.said(_heard({6: (1.0, 1.0)}))["iteration"] == pytest.approx([0.5, 0.5])
    # Rank 1 reports once and then falls silent: what rank 0 says is not kept for ever.
    run.rewards.hear({1: _heard({100: (1.0, 1.0)})}, baseline=False)
    for step in range(100, 110):
        run.said(_heard({step: (1.0, 1.0)}))
    assert sorted(run.rewards._pending) == [108, 109]


def test_a_fault_on_any_rank_is_everyones_and_counts_once() -> None:
    run = _Run()
    assert "fault" not in run.said(_heard(), _heard()), "a job that says nothing is no source"
    assert run.said(_heard(faults=0), _heard(faults=1))["fault"] == [-1, -1]
    assert run.said(_heard(faults=0), _heard(faults=1))["fault"] == [0, 0]
    late = _Run()
    assert late.said(_heard(faults=7))["fault"] == [0, 0], "before anybody listened"


def test_the_order_in_which_ranks_are_heard_does_not_matter() -> None:
    results = []
    for order in itertools.permutations(range(3)):
        run, seen = _Run(), []
        for step in range(5):
            told = [_heard({step: (1 + r * 0.1 + step, float(r * step))}, faults=int(r == step)) for r in range(3)]
            run.rewards.hear({r: told[r] for r in order}, baseline=step < 2)
            seen.append(run.judged(_outcome(), _ran(A, B)))
        results.append(seen)
    assert all(result == results[0] for result in results)
    assert results[0][4].keys() >= {"iteration", "convergence", "fault"}


def _succeeded(rewards: JobReward) -> JobReward:
    successor = JobReward(WEIGHTS, sms=64, tier=4, nodes=9)
    successor.restore(json.loads(json.dumps(rewards.state())))
    return successor


def test_a_successor_goes_on_as_if_nothing_had_happened() -> None:
    one, other = _Run(), _Run()
    for run in (one, other):
        run.said(_heard({1: (1.0, 3.0)}), baseline=True)
    other.rewards = _succeeded(other.rewards)
    results = [run.said(_heard({2: (1.5, 3.5)})) for run in (one, other)]
    assert results[0] == results[1]
    assert results[0]["iteration"] == pytest.approx([-0.5, -0.5])


def test_a_successor_knows_whose_reports_are_missing() -> None:
    first = _Run()
    first.said(_heard({0: (1.0, 1.0)}), _heard({0: (1.0, 1.0)}), baseline=True)
    first.rewards = _succeeded(first.rewards)
    assert "iteration" not in first.said(_heard({2: (1.0, 1.0)}), _heard()), "rank 1 has not said what step 2 took"
    assert first.said(_heard(), _heard({2: (2.0, 1.0)}))["iteration"] == pytest.approx([-1, -1])
