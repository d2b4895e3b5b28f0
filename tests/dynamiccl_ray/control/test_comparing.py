"""Which action is the best by all that was measured of a key, and which is worth measuring more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dynamiccl_ray.actions import N_ACTIONS, OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.arrays import Float64, Int64
from dynamiccl_ray.control.comparing import _prior, compare, expected
from dynamiccl_ray.knobs import N_PAIRS

USED = 500
NO_MODEL = np.zeros((1, N_ACTIONS))


def _covariance(a: int, b: int) -> float:
    """Of two actions' log times, as the module says it: pairs differ by 0.2, channels by 0.12, chunks by 0.14.

    Two pairs have a tenth of what channels are worth in common, and 0.3 of what chunks are; of one algorithm 0.55 and
    0.45 more, of one protocol 0.3 and nothing.
    """
    of_a, of_b = (tuple(int(x) for x in action_parts(action)) for action in (a, b))
    same = of_a[0] == of_b[0]
    total = 0.2**2 * same + 0.04**2 * (a == b)
    algorithm, protocol = ((of_a[0] - 1) // 3 == (of_b[0] - 1) // 3, (of_a[0] - 1) % 3 == (of_b[0] - 1) % 3)
    pairs = of_a[0] > 0 and of_b[0] > 0
    of_channels = 1.0 if same else pairs * (0.1 + 0.55 * algorithm + 0.3 * protocol)
    of_chunks = 1.0 if same else pairs * (0.3 + 0.45 * algorithm)
    for x, y, deviation, reach, shared in (
        (of_a[1], of_b[1], 0.12, 1.5, of_channels),
        (of_a[2], of_b[2], 0.14, 4.0, of_chunks),
    ):
        if (x == 0) == (y == 0):
            total += shared * deviation**2 * float(np.exp(-abs(x - y) / reach))
    return total


def _reference(
    actions: Int64, samples: Float64, mean: Float64, noise: float, modelled: Float64, takes: float
) -> tuple[int, Float64]:
    """The best, and what each is worth: a normal distribution that is conditioned on what was measured, with a level of
    which next to nothing is known and half of what is modelled, more or less, and gains by numerical integration. How
    large its deviations are is known as well as from eight numbers, and from those that were measured."""
    prior = np.array([[_covariance(a, b) for b in actions] for a in actions]) + 0.5**2 * np.outer(modelled, modelled)
    measured, one = np.linalg.inv(prior + np.diag(noise**2 / samples)), np.ones(len(actions))
    off = mean - 0.5 * modelled
    off = off - one @ measured @ off / (one @ measured @ one)
    prior = prior * np.clip((8 + off @ measured @ off) / (8 + len(actions) - 1), 0.25, 9.0) + 1e4
    inverse = np.linalg.inv(prior + np.diag(noise**2 / samples))
    before = mean.mean() + 0.5 * modelled
    time = before + prior @ inverse @ (mean - before)
    left = prior - prior @ inverse @ prior
    best = int(time.argmin())
    worth = np.zeros(len(actions))
    for i in range(len(actions)):
        if i != best:
            moves = abs(left[i, i] - left[i, best]) / np.sqrt(left[i, i] + noise**2 / takes)
            behind = time[i] - time[best]
            gain = norm(behind, moves).expect(lambda x: max(-x, 0.0), epsabs=1e-10, limit=200)
            worth[i] = USED * gain - takes * behind
    return best, worth


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([0.01, 0.05]), st.sampled_from([1, 8]))
def test_it_is_what_conditioning_and_integration_say(seed: int, n: int, noise: float, takes: int) -> None:
    rng = np.random.default_rng(seed)
    # Of few pairs, so that actions have much in common.
    some = flat_action(*(part.ravel() for part in np.meshgrid((1, 2, 3, 4), (0, 1, 4, 7), (0, 2, 5))))
    actions = np.append(rng.choice(some, n - 1, replace=False), OWN_ACTION)
    samples, mean = rng.integers(1, 20, n).astype(float), 5 + 0.1 * rng.standard_normal(n)
    modelled = np.stack([np.zeros(N_ACTIONS), 0.3 * rng.standard_normal(N_ACTIONS) * rng.integers(2)])
    best, worth = _reference(actions, samples, mean, noise, modelled[1, actions], takes)
    # Other keys beside it, and what fills a row up, change nothing.
    other = rng.choice(N_ACTIONS, n + 3, replace=False)
    padded = [np.concatenate([x, np.zeros(3)]) for x in (actions, samples, mean)]
    of_rows = [np.stack([y, x]) for x, y in zip(padded, (other, np.ones(n + 3), np.full(n + 3, 4.0)), strict=True)]
    got, following = compare(of_rows[0].astype(int), *of_rows[1:], np.array([0.02, noise]), modelled, takes)
    assert got[1] == best
    assert worth[following[1]] == pytest.approx(worth.max(), abs=1e-3)


def test_one_lucky_time_is_not_taken_for_the_best_where_all_that_is_like_it_is_slow() -> None:
    slow = flat_action(3, np.arange(1, 9), 2)
    good = flat_action(5, 4, np.arange(1, 5))
    actions = np.concatenate([slow, good])[None]
    mean = np.concatenate([np.full(8, 3.3), np.full(4, 3.0)])[None]
    mean[0, 2] = 2.98  # by luck: its neighbours take a third more
    samples = np.ones((1, 12))
    best, _ = compare(actions, samples, mean, np.array([0.1]), NO_MODEL, 8)
    assert action_parts(actions[0, best[0]])[0] == 5
    # What nothing is like is believed.
    mean[0, :8] = [*([3.3] * 7), 2.7]
    alone = actions.copy()
    alone[0, 7] = flat_action(9, 2, 2)
    best, _ = compare(alone, samples, mean, np.array([0.1]), NO_MODEL, 8)
    assert best[0] == 7


def test_what_cannot_get_ahead_is_not_measured_and_what_may_is() -> None:
    actions = np.array([[int(flat_action(p, 0, 0)) for p in (1, 2, 3)]])
    mean = np.array([[3.0, 3.02, 3.5]])
    # Of the second next to nothing is known.
    assert compare(actions, np.array([[50.0, 1, 1]]), mean, np.array([0.05]), NO_MODEL, 8)[1].tolist() == [1]
    # It is known to be behind.
    assert compare(actions, np.array([[5000.0, 5000, 1]]), mean, np.array([0.05]), NO_MODEL, 8)[1].tolist() == [0]
    # The same for a noise that tells no one from another.
    assert compare(actions, np.array([[1.0, 1, 1]]), mean, np.array([0.05]), NO_MODEL, 8)[1].tolist() != [2]


def test_the_more_actions_differ_the_further_behind_one_may_be_that_is_worth_measuring() -> None:
    actions = np.array([[int(flat_action(p, 0, 0)) for p in range(1, 8)]])
    # Of the last one next to nothing is known.
    samples = np.array([[500.0] * 6 + [1.0]])
    for apart, worth in ((0.1, False), (3.0, True)):
        mean = np.array([[3.0, *(3.4 + apart * np.array([0.0, 0.9, 0.4, 0.6, 1.0])), 3.2]])
        _, following = compare(actions, samples, mean, np.array([0.2]), NO_MODEL, 1)
        assert (following[0] == 6) == worth, apart


def test_what_channels_are_worth_to_one_pair_they_are_worth_to_its_like() -> None:
    """A pair that was the best of all was never tried again where only slow channels had been drawn of it."""
    few, some, more = 3, 4, 5

    def said(other: int) -> float:
        """Of the other pair with some channels, over the best. It was measured with few, which are slow."""
        actions = np.array([[int(flat_action(p, n, 2)) for p, n in ((2, few), (2, some), (2, more), (other, few))]])
        mean, of = np.array([[3.6, 3.0, 3.02, 3.65]]), np.array([[int(flat_action(other, some, 2))]])
        return float(expected(actions, np.full((1, 4), 8.0), mean, np.array([0.02]), NO_MODEL, of)[0, 0])

    # Of one algorithm, of one protocol, of neither.
    assert said(3) < 0.35 < said(5) < 0.5 < said(4) < 0.6


def test_nccls_own_choice_is_like_no_pair() -> None:
    pairs = flat_action(np.arange(1, N_PAIRS), 0, 0)[None]
    assert not _prior(np.array([[OWN_ACTION]]), pairs).any()
    assert _prior(pairs, pairs).all()


def test_no_key_is_no_work() -> None:
    nothing = np.zeros((0, 24))
    best, following = compare(nothing.astype(int), nothing, nothing, np.zeros(0), NO_MODEL[:0], 8)
    assert (best.shape, following.shape) == ((0,), (0,))
