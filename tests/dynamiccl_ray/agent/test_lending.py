"""Evidence: own measurements, what keys lend each other, and how sure it makes."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from dynamiccl_ray.agent.lending import SURE_SCALE, WIDE, Lending, combine, noise_of, stale, worse_than_own

MIB = 1 << 20


def _combined(
    samples: list[float], means: list[float], lending: Lending, noise: float = 0.02, expected: float = np.nan
) -> tuple[list[float], list[float]]:
    n = np.array(samples, np.float32)[:, None]
    total, rows = n * np.array(means, np.float32)[:, None], np.arange(len(n))
    prior, error = np.full(n.shape, expected, np.float32), np.full(len(n), 0.1, np.float32)
    time, sure = combine(total, n, np.full(len(n), noise, np.float32), lending, rows, [(prior, error)])
    return time[:, 0].tolist(), sure[:, 0].tolist()


def _alone(keys: int) -> Lending:
    return Lending(np.arange(keys), np.full(keys, 4), np.full(keys, MIB))


def test_own_measurements_are_their_mean_and_surer_the_more_there_are() -> None:
    time, sure = _combined([0, 1, 4, 64], [0.0, 0.3, 0.3, -0.2], _alone(4))
    assert time == pytest.approx([0, 0.3, 0.3, -0.2], abs=1e-6)
    assert sure[0] == 0
    assert sure == sorted(sure)
    # One time: its standard deviation is the noise, and a little for what channels alone do not say.
    assert WIDE * np.exp(-SURE_SCALE * sure[1]) == pytest.approx(np.hypot(0.02, 0.003), rel=0.01)


def test_what_is_expected_is_all_there_is_until_something_is_measured() -> None:
    time, sure = _combined([0, 1, 64], [0.0, 0.3, 0.3], _alone(3), expected=-0.2)
    assert time[0] == pytest.approx(-0.2)
    assert WIDE * np.exp(-SURE_SCALE * sure[0]) == pytest.approx(0.1, rel=0.03)
    # The mean of two estimates, each by its precision: 0.3 of noise 0.02, -0.2 of error 0.1.
    own, model = 1 / (0.02**2 + 0.003**2), 1 / 0.1**2
    assert time[1] == pytest.approx((0.3 * own - 0.2 * model) / (own + model), abs=1e-5)
    assert time[2] == pytest.approx(0.3, abs=1e-3)
    assert sure == sorted(sure)


def test_before_the_first_collective_there_are_no_keys() -> None:
    nothing = np.zeros((0, 22, 19), np.float32)
    of = np.zeros(0, np.float32)
    time, sure = combine(nothing, nothing, of, Lending([], [], []), np.zeros(0, np.int64), [(nothing, of)])
    assert time.shape == sure.shape == nothing.shape


def test_asked_about_some_keys_it_says_what_it_says_about_all() -> None:
    rng = np.random.default_rng(0)
    lending = Lending([0, 0, 1, 0], [4, 4, 4, 4], [MIB, 2 * MIB, MIB, 64 * MIB])
    samples = rng.integers(0, 9, (4, 3, 2)).astype(np.float32)
    given = (samples * rng.normal(0, 0.2, samples.shape).astype(np.float32), samples, np.full(4, 0.02, np.float32))
    prior, error = rng.normal(0, 0.2, samples.shape).astype(np.float32), np.full(4, 0.1, np.float32)
    prior[0, 1] = np.nan
    every, some = (
        combine(*given, lending, np.array(rows), [(prior[rows], error[rows])]) for rows in ([0, 1, 2, 3], [3, 0])
    )
    for of_every, of_some in zip(every, some, strict=True):
        np.testing.assert_array_equal(of_some, of_every[[3, 0]])


def test_a_key_lends_to_keys_of_its_kind_in_its_group_and_less_the_further_they_are() -> None:
    lending = Lending([0, 0, 0, 0, 1], [4, 4, 4, 2, 4], [MIB, 2 * MIB, 64 * MIB, MIB, MIB])
    time, sure = _combined([50, 0, 0, 0, 0], [-0.5, 0, 0, 0, 0], lending)
    assert time[1] == pytest.approx(-0.5)
    assert sure[0] > sure[1] > sure[2] > 0
    assert (time[3:], sure[3:]) == ([0, 0], [0, 0])


def test_what_is_lent_never_weighs_more_than_a_few_own_measurements() -> None:
    lending = Lending([0, 0], [4, 4], [MIB, MIB])
    time, _ = _combined([8, 10**6], [0.0, -0.5], lending)
    assert -0.1 < time[0] < 0


def test_however_often_a_far_key_has_measured_it_hardly_counts() -> None:
    """Twelve octaves away: what it says is off by a factor, which no number of samples makes less."""
    far = Lending([0, 0], [4, 4], [16 << 10, 64 * MIB])
    (_, time), _ = _combined([1000, 0], [-0.5, 0.0], far, expected=1.0)
    assert time > 0.95
    # Nor do many of them say more than one that is near.
    many = Lending([0] * 9, [4] * 9, [MIB] + [2 * MIB] * 8)
    deviation = WIDE * np.exp(-SURE_SCALE * np.array(_combined([0] + [1000] * 8, [0] + [-0.5] * 8, many)[1]))
    assert deviation[0] == pytest.approx(0.04, rel=0.02)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1 << 34)), min_size=1, max_size=12), st.integers(0, 99))
def test_lending_is_what_a_loop_over_pairs_of_keys_says(keys: list[tuple[int, int]], seed: int) -> None:
    groups = sorted(group for group, _ in keys)
    _, group = np.unique(groups, return_inverse=True)
    nbytes = np.array([size for _, size in keys])
    kind = np.random.default_rng(seed).integers(0, 5, len(keys))
    mirror = [1, 0, 3, 2, 4]  # broadcast and reduce, all-gather and reduce-scatter
    x = np.random.default_rng(seed).normal(size=(len(keys), 3)).astype(np.float32)
    expected = np.zeros_like(x)
    for i in range(len(keys)):
        for j in range(len(keys)):
            if i != j and group[i] == group[j] and kind[j] in (kind[i], mirror[kind[i]]):
                expected[i] += 0.5 * np.exp(-abs(np.log2(nbytes[i]) - np.log2(nbytes[j])) / 2) * x[j]
    rows = np.random.default_rng(seed).permutation(len(keys))[: 1 + seed % len(keys)]
    np.testing.assert_allclose(Lending(group, kind, nbytes)(x, rows), expected[rows], atol=1e-5)


def test_a_baseline_that_stands_out_between_its_neighbours_is_in_excess() -> None:
    # 1, 4, 16 MiB of one kind, in an order of their own; a fourth of another kind.
    lending = Lending([0, 0, 0, 0], [4, 4, 4, 2], [16 * MIB, MIB, 4 * MIB, 4 * MIB])
    log_time = np.array([4.0, 2.0, 3.7, 9.0], np.float32)
    assert lending.excess(log_time).tolist() == pytest.approx([0, 0, 0.7, 0], abs=1e-6)
    # Sizes that are not halfway, the third of four octaves; a smaller key of another kind is no neighbour.
    uneven = Lending([0, 0, 0, 0], [2, 4, 4, 4], [MIB // 2, MIB, 8 * MIB, 16 * MIB])
    assert uneven.excess(np.array([0, 4, 7, 8], np.float32)).tolist() == pytest.approx([0, 0, 0, 0], abs=1e-6)
    assert uneven.excess(np.array([0, 4, 9, 8], np.float32)).tolist() == pytest.approx([0, 0, 2, 0], abs=1e-6)
    # Too far apart to say anything.
    far = Lending([0, 0, 0], [4, 4, 4], [MIB, 32 * MIB, 1024 * MIB])
    assert far.excess(np.array([1, 9, 2], np.float32)).tolist() == [0, 0, 0]


def test_a_key_without_a_time_does_not_come_between_two_that_have_one() -> None:
    # 1, 4, 16 MiB and two keys between them that were never measured.
    lending = Lending([0] * 5, [4] * 5, [MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB])
    log_time = np.array([2.0, np.nan, 3.7, np.nan, 4.0], np.float32)
    assert lending.excess(log_time).tolist() == pytest.approx([0, 0, 0.7, 0, 0], abs=1e-6)
    assert lending.excess(np.full(5, np.nan, np.float32)).tolist() == [0] * 5
    assert Lending([], [], []).excess(np.zeros(0, np.float32)).tolist() == []


def test_the_noise_is_the_usual_one_until_it_has_been_seen() -> None:
    nothing, little, much = noise_of([0, 0.25 * 4, 0.25 * 4000], [0, 4, 4000])
    assert nothing == pytest.approx(0.02)
    assert nothing < little < much == pytest.approx(0.5, rel=0.01)
    assert noise_of(0.0, 10**6) == pytest.approx(0.005)


def test_after_a_shift_a_thousand_times_say_no_more_than_ten() -> None:
    kept = stale(np.array([[1000.0, 10.0, 0.0]]), np.array([0.05]))
    assert kept.tolist() == [pytest.approx([1 / 9, 1 / 9, 0])]


def test_however_noisy_a_key_is_a_hint_says_less_than_one_collective() -> None:
    kept = stale(np.array([[1000.0, 0.25], [1000.0, 0.25]]), np.array([0.6, 0.15]))
    assert kept.tolist() == [[0.5, 0.25], [0.5, 0.25]]


def test_the_guardrail_by_hand() -> None:
    """Eight collectives, and more than 2% worse by two standard errors."""
    # At noise 0.02 two standard errors of 8 collectives are 0.014.
    ratio, samples = np.array([0.05, 0.05, 0.03, 0.05, -0.5]), np.array([8, 7, 8, 100, 100])
    forbidden = worse_than_own(ratio, samples, np.full(5, 0.02), margin=0.02, least=8)
    assert forbidden.tolist() == [True, False, False, True, False]


def test_keys_that_are_near_are_of_one_collective_of_one_group_and_at_most_two_octaves_apart() -> None:
    group, collective = np.array([1, 0, 0, 0, 1, 0]), np.array([4, 4, 4, 4, 4, 2])
    lending = Lending(group, collective, np.array([MIB, MIB, 2 * MIB, 4 * MIB + 1, 2 * MIB, MIB]))
    at, other, apart = lending.near(np.array([4, 1, 3, 5]))
    assert sorted(zip(at.tolist(), other.tolist(), strict=True)) == [(0, 0), (1, 2), (2, 2)]
    assert apart == pytest.approx([1, 1, 1], abs=1e-5)
    assert [of.size for of in lending.near(np.array([5]))] == [0, 0, 0]
    two = Lending([0, 0], [4, 4], [MIB, 4 * MIB])
    assert [of.tolist() for of in two.near(np.array([0]))] == [[0], [1], pytest.approx([2], abs=1e-5)]


def test_a_reduce_scatter_is_near_an_all_gather_of_its_size_but_stands_on_no_line_with_it() -> None:
    lending = Lending([0, 0, 0, 0, 0], [2, 3, 2, 0, 1], [MIB, 2 * MIB, 4 * MIB, 2 * MIB, 2 * MIB])
    at, other, _ = lending.near(np.array([1, 3]))
    assert sorted(zip(at.tolist(), other.tolist(), strict=True)) == [(0, 0), (0, 2), (1, 4)]
    assert lending.excess(np.array([1.0, 9.0, 1.0, 5.0, 5.0], np.float32)).tolist() == [0, 0, 0, 0, 0]
