"""What a key takes depends on what the other keys do: by several per cent, on a real GPU (docs/gpu.md). As long as any
of them is learning that changes with every decision, and says nothing of the network."""

from __future__ import annotations

import numpy as np
import pytest
from looped import decided, exploiting, loop_of, observed, pair, some_keys

from dynamiccl_ray.control.loop import Drift, Loop, Phase
from dynamiccl_ray.control.trigger import BATCH

KEYS, WITHIN, DRAWS, COMPARES = 6, 0.05, 12, 6
LEARNED = 1 + DRAWS + COMPARES
"""Rounds until all exploit, if nothing comes between."""


def _job(between: float, seed: int, rounds: int, *, ran: int, shift_at: int = -1) -> tuple[Loop, list[Drift], int]:
    """A job so fast that of every decision many times as many collectives run as it takes. Returns the round in which
    all exploited for the first time, too."""
    learning = {"draws": DRAWS, "draw_samples": 8, "compares": COMPARES, "compare_samples": 32, "baseline_samples": 24}
    loop, rng = loop_of(some_keys(KEYS), **learning), np.random.default_rng(seed)
    effect = 0.3 * rng.standard_normal((KEYS, 5000))
    effect[:, 0] = 0.0
    row, context = np.repeat(np.arange(KEYS), ran), np.zeros(KEYS)
    before, drifts, exploited = loop.wanted.copy(), [], 0
    for number in range(rounds):
        if not np.array_equal(before, loop.wanted):
            context, before = between * rng.standard_normal(KEYS), loop.wanted.copy()
        mean = 3 + effect[np.arange(KEYS), loop.wanted] + context + 0.3 * (0 <= shift_at <= number)
        drifts += observed(loop, row, mean[row] + WITHIN * rng.standard_normal(len(row)))
        due = loop.due()
        drawn = [pair(int(p)) for p in rng.integers(1, 7, int(due.draw.sum()))]
        loop.decide(due.row, due.actions(np.array(drawn, np.int64)))
        if not exploited and (loop.phase == Phase.EXPLOIT).all():
            exploited = number + 1
    return loop, drifts, exploited


@pytest.mark.parametrize("ran", [32, 60, 400])
def test_learning_ends_and_nothing_is_learned_anew(ran: int) -> None:
    for seed in range(6):
        loop, drifts, exploited = _job(0.03, seed, 6 * LEARNED, ran=ran)
        assert 0 < exploited <= (3 if ran < 400 else 6) * LEARNED
        assert not any(drift.anew for drift in drifts)
        assert loop.shifts.tolist() == [0] * KEYS


def test_a_shift_is_found_all_the_same() -> None:
    _, drifts, exploited = _job(0.03, 0, 90, ran=60, shift_at=50)
    assert 0 < exploited < 50
    assert drifts


def test_what_one_communicator_does_says_nothing_of_another() -> None:
    """Of one that only exploits, every collective is heard, however much another learns beside it."""
    loop = exploiting(some_keys(2), some_keys(2, group=1), rows=[0, 1])
    known = loop.evidence.samples[0, pair(1)]
    for action in (1, 2):
        observed(loop, [2] * 4, 3.0)
        decided(loop, pair(action))
    observed(loop, [0] * 90, 2.9 + 0.01 * np.tile([-1, 1], 45))
    assert loop.evidence.samples[0, pair(1)] == known + 90


def test_a_key_that_begins_anew_is_felt_by_the_others() -> None:
    loop = exploiting(some_keys(2))
    known = loop.evidence.samples[0, pair(1)]
    loop.shift(np.array([1]))
    observed(loop, [0] * 90, 2.9 + 0.01 * np.tile([-1, 1], 45))
    assert loop.evidence.samples[0, pair(1)] == known + BATCH


def test_an_alarm_says_which_of_all_that_ran_raised_it() -> None:
    loop = exploiting(some_keys(8))
    observed(loop, [2] * 4, 2.9)
    decided(loop)
    loop.cusum.reset(np.array([2]))
    observed(loop, [2] * 24, 2.9 + 0.01 * np.random.default_rng(1).standard_normal(24))
    decided(loop)
    loop.shift(np.array([7]))
    (alarm,) = observed(loop, [2] * 40, 2.9 + np.repeat([0.0, 0.5], [10, 30]))
    assert (alarm.row, alarm.sample) == (2, 39)


def test_all_that_ran_is_paid_for() -> None:
    """However few of them say something."""
    loop = loop_of(some_keys(1), explore={"max_regret": 0.5})
    observed(loop, [0] * 4, 3.0)
    decided(loop, pair(1))
    observed(loop, [0] * 100, 3.5)
    assert loop.evidence.samples[0, pair(1)] == BATCH
    assert loop.budget.cost_us == pytest.approx(100 * (np.exp(3.5) - np.exp(3.0)))
