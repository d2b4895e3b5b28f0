"""Played pipelines against their closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.workloads.pipeline import PipelineSchedule, order, play

small = st.integers(1, 6)


@given(workers=small, micro_batches=st.integers(1, 12))
def test_gpipe_and_1f1b_idle_alike(workers: int, micro_batches: int) -> None:
    p, m = workers, micro_batches
    for schedule in ("gpipe", "1f1b"):
        played = play(order(schedule, p, m), p, forward_us=1.0, backward_us=2.0)  # type: ignore[arg-type]
        assert played.makespan_us == pytest.approx(3 * (m + p - 1))
        assert played.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
        assert sum(played.sends) == 2 * m * (p - 1)


@given(workers=small, micro_batches=st.integers(1, 12))
def test_1f1b_holds_fewer_activations(workers: int, micro_batches: int) -> None:
    p, m = workers, micro_batches
    gpipe = play(order("gpipe", p, m), p, forward_us=1.0, backward_us=2.0)
    alternating = play(order("1f1b", p, m), p, forward_us=1.0, backward_us=2.0)
    assert gpipe.peak_in_flight == (m,) * p
    assert alternating.peak_in_flight == tuple(min(p - s, m) for s in range(p))


@given(workers=st.integers(2, 6), groups=st.integers(1, 3), chunks=st.integers(2, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(workers: int, groups: int, chunks: int) -> None:
    p, m, v = workers, workers * groups, chunks
    played = play(order("interleaved", p, m, chunks=v), p * v, forward_us=1.0 / v, backward_us=2.0 / v)
    assert played.makespan_us == pytest.approx(3 * m + 3 * (p - 1) / v)
    assert played.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1))
    assert sum(played.sends) == 2 * m * (p * v - 1)


@given(half=st.integers(1, 4), groups=st.integers(1, 3))
def test_chimera_has_the_bubble_of_its_paper(half: int, groups: int) -> None:
    p, m = 2 * half, 2 * half * groups
    played = play(order("chimera", p, m), p, forward_us=1.0, backward_us=1.0)
    assert played.makespan_us == 2 * m + p - 2
    assert played.bubble_fraction == pytest.approx((p - 2) / (2 * m + p - 2))
    assert max(played.peak_in_flight) <= p


def test_chimera_with_a_backward_of_twice_the_forward() -> None:
    # p forwards and 2p - 2 backwards lie on the critical path.
    assert play(order("chimera", 8, 8), 8, forward_us=1.0, backward_us=2.0).makespan_us == 8 + 2 * 14


def test_sends_lie_on_the_critical_path() -> None:
    played = play(order("gpipe", 4, 1), 4, forward_us=1.0, backward_us=2.0, send_us=0.5)
    assert played.makespan_us == 4 * 3 + 6 * 0.5


@pytest.mark.parametrize(
    ("schedule", "workers", "micro_batches", "chunks"),
    [("interleaved", 4, 6, 2), ("interleaved", 4, 8, 1), ("gpipe", 4, 8, 2), ("chimera", 3, 3, 1), ("1f1b", 0, 1, 1)],
)
def test_impossible_schedules(schedule: PipelineSchedule, workers: int, micro_batches: int, chunks: int) -> None:
    with pytest.raises(ConfigError, match=r"= \d"):
        order(schedule, workers, micro_batches, chunks=chunks)
