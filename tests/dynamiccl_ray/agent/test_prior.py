"""How far a model is believed: by what it said of what was measured."""

from __future__ import annotations

import numpy as np
import pytest

from dynamiccl_ray.agent.prior import ERROR, error_of
from dynamiccl_ray.knobs import N_PAIRS

SHAPE = (4, N_PAIRS, 3)


def _error(
    off: np.ndarray,
    tried: np.ndarray,
    *,
    group: list[int] | None = None,
    noise: float = 0.02,
    start: float = ERROR,
    own: float | None = None,
) -> list[float]:
    """Of a prior that says 0 of everything, where what was ``tried`` is off by so much."""
    prior, samples = np.zeros(SHAPE, np.float32), np.where(tried, 8.0, 0.0).astype(np.float32)
    ratio = np.where(tried, off, 0.0).astype(np.float32)
    groups = np.array(group or [0] * SHAPE[0])
    often = None if own is None else np.full(SHAPE[0], own, np.float32)
    return error_of(prior, ratio, samples, np.full(SHAPE[0], noise, np.float32), groups, start, often).tolist()


def _tried(*pairs: int) -> np.ndarray:
    tried = np.zeros(SHAPE, np.bool_)
    tried[:, list(pairs)] = True
    return tried


def test_before_anything_is_tried_it_is_that_of_a_described_cluster() -> None:
    assert _error(np.zeros(SHAPE), _tried()) == [pytest.approx(ERROR)] * 4


def test_it_falls_where_the_model_was_right_and_grows_where_it_was_wrong() -> None:
    right = [_error(np.zeros(SHAPE), _tried(*range(1, 1 + n)))[0] for n in (0, 2, 8)]
    wrong = [_error(np.full(SHAPE, 0.5), _tried(*range(1, 1 + n)))[0] for n in (0, 2, 8)]
    assert right == sorted(right, reverse=True)
    assert wrong == sorted(wrong)
    assert right[-1] < 0.6 * ERROR
    assert wrong[-1] > 0.35


def test_noise_is_not_taken_for_the_models_error() -> None:
    noisy = np.random.default_rng(0).normal(0, 0.2 / np.sqrt(8), SHAPE)
    assert _error(noisy, _tried(*range(1, 9)), noise=0.2)[0] < ERROR


def test_noise_of_nccls_own_time_is_not_taken_for_the_priors_error() -> None:
    """All ratios of a key are to the same time."""
    off, tried = np.broadcast_to(np.array([0.2, -0.2, 0.1, -0.1])[:, None, None], SHAPE), _tried(*range(1, 9))
    once = _error(off, tried, noise=0.2, start=0.03, own=1)[0]
    assert once < 0.06 < _error(off, tried, noise=0.2, start=0.03)[0]
    assert once < _error(off, tried, noise=0.2, start=0.03, own=100)[0]


def test_a_pair_counts_once_however_much_of_it_was_measured() -> None:
    one = np.zeros(SHAPE, np.bool_)
    one[0, 3, 0] = True
    every = _tried(3)
    assert _error(np.full(SHAPE, 0.5), every)[0] == pytest.approx(_error(np.full(SHAPE, 0.5), one)[0], rel=0.02)


def test_communicators_are_judged_apart_and_nccls_own_choice_is_no_judge() -> None:
    tried = _tried(0, *range(1, 9))
    tried[2:, 1:] = False
    off = np.full(SHAPE, 0.5)
    first, _, second, _ = _error(off, tried, group=[0, 0, 1, 1])
    assert first > 2 * ERROR
    assert second == pytest.approx(ERROR)


def test_what_the_model_does_not_say_does_not_count() -> None:
    prior = np.full(SHAPE, np.nan, np.float32)
    measured = np.ones(SHAPE, np.float32)
    found = error_of(prior, measured, measured, np.full(4, 0.02, np.float32), np.zeros(4, np.int64))
    assert found.tolist() == [pytest.approx(ERROR)] * 4
