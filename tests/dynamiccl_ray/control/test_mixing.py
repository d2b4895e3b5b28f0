"""Mixed bits are the published ones, and draws that follow from numbers are as good as random ones."""

from __future__ import annotations

import numpy as np
import pytest

from dynamiccl_ray.control.mixing import gumbel, mix

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def _before(mixed: int) -> int:
    """What ``mix`` makes this of: its three steps, undone."""

    def unshift(x: int, by: int) -> int:
        found = x
        for _ in range(64 // by):
            found = x ^ found >> by
        return found

    x = unshift(mixed, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
    x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
    return unshift(x, 30)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]),
    ],
)
def test_it_is_the_published_generator(seed: int, expected: list[int]) -> None:
    states = np.array([(seed + k * GOLDEN) & MASK for k in range(1, 4)], np.uint64)
    assert mix(states).tolist() == expected


def test_noise_follows_a_gumbel_distribution() -> None:
    noise = gumbel(np.arange(500, dtype=np.uint64), 200).astype(np.float64)
    uniform = np.sort(np.exp(-np.exp(-noise)).ravel())
    ideal = (np.arange(uniform.size) + 0.5) / uniform.size
    # The Kolmogorov-Smirnov bound of one in a million.
    assert np.abs(uniform - ideal).max() < 2.7 / np.sqrt(uniform.size)


def test_neither_neighbouring_numbers_nor_places_have_noise_in_common() -> None:
    noise = gumbel(np.arange(200, dtype=np.uint64), 41)
    assert len(np.unique(noise)) > 0.999 * noise.size
    limit = 5 / np.sqrt(199 * 41)
    for one, other in ((noise[1:], noise[:-1]), (noise[:, 1:].T, noise[:, :-1].T)):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < limit


def test_noise_depends_on_the_number_alone() -> None:
    of = np.array([7, 1 << 63, 0], np.uint64)
    noise = gumbel(of, 5)
    np.testing.assert_array_equal(gumbel(of[[2, 0]], 5), noise[[2, 0]])
    np.testing.assert_array_equal(gumbel(of, 3), noise[:, :3])


@pytest.mark.parametrize("bits", [0, MASK])
def test_the_rarest_bits_have_finite_noise(bits: int) -> None:
    of = _before((_before(bits) - GOLDEN) & MASK)
    (noise,) = gumbel(np.array([of], np.uint64), 1)[0]
    assert np.isfinite(noise)
    assert abs(noise) > 3, "as far out as noise can be"
