"""Known values, limits and identities of the alpha-beta costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiccl_ray.fabric.closed_forms import (
    all_to_all,
    binary_tree,
    double_binary_tree,
    halving_doubling,
    hierarchical,
    parameter_server,
    point_to_point,
    recursive_doubling,
    ring,
    torus_2d,
)

A, B = 5.0, 1e-3
ALL_REDUCES = (ring, binary_tree, recursive_doubling, double_binary_tree, halving_doubling)


@pytest.mark.parametrize(
    ("cost", "expected_us"),
    [
        (ring, 14 * A + 1.75 * B * 1e6),
        (binary_tree, 6 * A + 6 * B * 1e6),
        (recursive_doubling, 3 * A + 3 * B * 1e6),
        (double_binary_tree, 6 * A + 2 * B * 1e6),
        (halving_doubling, 6 * A + 1.75 * B * 1e6),
    ],
)
def test_all_reduce_over_8_ranks(cost: Callable[..., float], expected_us: float) -> None:
    assert cost(8, 1e6, A, B) == pytest.approx(expected_us)


def test_the_others() -> None:
    assert point_to_point(1e6, A, B) == pytest.approx(A + 1000)
    assert all_to_all(4, 1e6, A, B) == pytest.approx(3 * A + 0.75 * 1000)
    # 8 workers on 2 servers: each server takes 4 times the message, both ways.
    assert parameter_server(8, 2, 1e6, A, B) == pytest.approx(2 * A + 8 * 1000)
    assert parameter_server(2, 8, 1e6, A, B) == pytest.approx(2 * A + 2 * 1000)
    split = hierarchical(4, 8, 1e6, inside_a_us=1, inside_b_us=1e-5, across_a_us=10, across_b_us=1e-4)
    assert split == pytest.approx(14 + 17.5 + 60 + 1.5 * 12.5)


@pytest.mark.parametrize("cost", ALL_REDUCES)
def test_one_rank_has_nothing_to_do(cost: Callable[..., float]) -> None:
    assert cost(1, 1e9, A, B) == 0


@pytest.mark.parametrize("cost", ALL_REDUCES)
def test_sizes_are_vectorised(cost: Callable[..., np.ndarray]) -> None:
    nbytes = np.array([0.0, 1e3, 1e6])
    assert cost(6, nbytes, A, B) == pytest.approx([cost(6, n, A, B) for n in nbytes])


def test_ranks_are_checked() -> None:
    with pytest.raises(ValueError, match="count = 0"):
        ring(0, 1.0, A, B)


@given(st.integers(1, 12), st.floats(1, 1e9))
def test_nothing_beats_the_ring_on_bandwidth_or_doubling_on_latency(log_ranks: int, nbytes: float) -> None:
    n = 1 << log_ranks
    for cost in ALL_REDUCES:
        assert cost(n, nbytes, 0.0, B) >= ring(n, nbytes, 0.0, B) * (1 - 1e-12) or cost is recursive_doubling
        assert cost(n, nbytes, A, 0.0) >= recursive_doubling(n, nbytes, A, 0.0)
    # With more than 3 rounds, whole messages move more than the ring's 2(n-1)/n.
    assert log_ranks < 2 or recursive_doubling(n, nbytes, 0.0, B) >= ring(n, nbytes, 0.0, B)


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0, 1e9))
def test_a_torus_moves_as_much_as_a_ring_in_fewer_steps(rows: int, columns: int, nbytes: float) -> None:
    n = rows * columns
    assert torus_2d(rows, columns, nbytes, 0.0, B) == pytest.approx(ring(n, nbytes, 0.0, B))
    assert torus_2d(rows, columns, nbytes, A, 0.0) <= ring(n, nbytes, A, 0.0)
    assert torus_2d(n, 1, nbytes, A, B) == pytest.approx(ring(n, nbytes, A, B))


@given(st.integers(1, 64), st.floats(0, 1e9))
def test_a_hierarchy_of_one_level_is_a_ring(n: int, nbytes: float) -> None:
    links = {"inside_a_us": 1.0, "inside_b_us": 1e-5, "across_a_us": A, "across_b_us": B}
    assert hierarchical(n, 1, nbytes, **links) == pytest.approx(ring(n, nbytes, A, B))
    assert hierarchical(1, n, nbytes, **links) == pytest.approx(ring(n, nbytes, 1.0, 1e-5))
