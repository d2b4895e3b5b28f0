"""The step that calls repeat is found, whatever was not seen of it and whatever came before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl_ray.workloads.period import MOST_CALLS, Step, find_step, weighted_order

steps = st.lists(st.integers(0, 3), min_size=1, max_size=7)


def _root(step: list[int]) -> list[int]:
    """The shortest that makes up the step by repetition."""
    n = next(n for n in range(1, len(step) + 1) if len(step) % n == 0 and step[:n] * (len(step) // n) == step)
    return step[:n]


def _find(calls: list[int], first: int = 1) -> Step | None:
    return find_step(np.arange(len(calls)) + first, np.array(calls))


@settings(deadline=None)
@given(steps, st.integers(4, 9), st.integers(0, 6))
def test_the_shortest_step_is_found_from_its_first_call(step: list[int], times: int, extra: int) -> None:
    root = _root(step)
    found = _find(root * times + (root * 7)[:extra], first=5)
    assert found == Step(first=5, symbols=tuple(root))


@settings(deadline=None)
@given(steps, st.integers(0, 4))
def test_calls_before_the_first_step_are_not_in_it(step: list[int], before: int) -> None:
    root = _root(step)
    found = _find([*range(10, 10 + before)] + root * 40)
    assert found == Step(first=1 + before, symbols=tuple(root))


@settings(deadline=None)
@given(steps, st.integers(0, 999))
def test_calls_that_were_not_seen_are_filled_in(step: list[int], seed: int) -> None:
    root = _root(step)
    calls = np.array(root * 60)
    seen = np.random.default_rng(seed).random(len(calls)) > 0.2
    seen[0] = True
    found = find_step(1 + np.flatnonzero(seen), calls[seen])
    assert found == Step(first=1, symbols=tuple(root))


def test_what_comes_now_and_then_does_not_hide_the_step() -> None:
    step = [0] * 99 + [1]
    assert _find(step * 10 + [7, 8] + step * 30 + [7, 8] + step * 17) == Step(first=1, symbols=tuple(step))
    mixed = [0, 1, 0, 2, 0, 3]
    assert _find(mixed * 50 + [9] + mixed * 70) == Step(first=1, symbols=tuple(mixed))


def test_a_rare_part_is_one_of_the_step() -> None:
    w = list(range(100))
    step = [*w, *w[:-1], 100]
    assert _find(step * 5) == Step(first=1, symbols=tuple(step))


def test_only_the_end_of_a_long_run_is_looked_at() -> None:
    found = _find([5] * 1000 + [0, 1] * MOST_CALLS)
    assert found is not None
    assert (sorted(found.symbols), found.first) == ([0, 1], 1001 + MOST_CALLS)


@pytest.mark.parametrize("calls", [[], [0], [0, 1], [0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]])
def test_without_three_steps_there_is_none(calls: list[int]) -> None:
    assert _find(calls) is None


def test_calls_at_random_have_no_step() -> None:
    rng = np.random.default_rng(0)
    assert _find(rng.integers(0, 5, 3000).tolist()) is None
    assert _find((rng.random(3000) < 0.3).astype(int).tolist()) is None


def test_a_call_that_is_never_seen_leaves_no_step() -> None:
    calls = np.array([0, 1, 2, 3] * 50)
    seen = np.arange(len(calls)) % 4 != 3
    assert find_step(1 + np.flatnonzero(seen), calls[seen]) is None


def test_calls_without_a_step_are_spread_by_their_weight() -> None:
    assert weighted_order(np.array([20, 5, 10]), 1000).tolist() == [0, 2, 0, 1, 0, 2, 0]
    assert len(weighted_order(np.array([10**9, 1]), 100)) == 101
