"""Timers read too late: what is believed was right, and what was right is believed."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl_ray.plugin_bridge.layout import DECIDED, GPU_TIMING, RECORD_DTYPE, SURE
from dynamiccl_ray.plugin_bridge.timers import HELD_S, LEAST_HELD, MOST_HELD, TimerCheck

TIMESTAMPS = 64  # NCCL's MAX_PROFILER_EVENTS_PER_CHANNEL


def run(exec_ns: np.ndarray[Any, Any], stalls: dict[int, int], ahead: int) -> tuple[np.ndarray[Any, Any], list[bool]]:
    """Kernels one after the other on one channel, read by a thread that sleeps ``stalls[k]`` ns before it reads kernel
    k, called by a host that is ``ahead`` kernels ahead. Returns the records and which of them have their own times."""
    n = len(exec_ns)
    start = np.cumsum(np.append(0, exec_ns + 2000))[:-1] + 1000
    stop = start + exec_ns
    records, right = np.zeros(n, RECORD_DTYPE), []
    now = 0
    for k in range(n):
        # The thread polls: it reads a kernel's times once it has stopped, in order.
        now = max(now + 200, int(stop[k])) + stalls.get(k, 0)
        begun, over = np.searchsorted(start, now, "right"), np.searchsorted(stop, now, "right")
        read_start = k + (begun - 1 - k) // TIMESTAMPS * TIMESTAMPS
        read_stop = k + (over - 1 - k) // TIMESTAMPS * TIMESTAMPS
        called = min(begun + ahead, n)
        right.append(read_start == read_stop == k)
        records[k]["start_ns"] = start[read_start]
        records[k]["exec_ns"] = max(int(stop[read_stop]) - int(start[read_start]), 0)
        records[k]["plan"] = (k + 2**32 - 50) % 2**32
        records[k]["dseq"] = k + 1
        records[k]["timing"] = GPU_TIMING
        records[k]["flags"] = DECIDED | (SURE if called - k < TIMESTAMPS else 0)
    return records, right


def take_all(records: np.ndarray[Any, Any], batch: int) -> np.ndarray[Any, Any]:
    now = [0.0]
    check = TimerCheck(clock=lambda: now[0])
    taken = [check.take(records[at : at + batch]) for at in range(0, len(records), batch)]
    now[0] = 2 * HELD_S
    taken.append(check.take(records[:0]))
    assert check.held == 0
    assert sum(map(len, taken)) + check.rejected == len(records)
    return np.concatenate(taken)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    stalls=st.dictionaries(st.integers(0, 899), st.integers(0, 3_000_000), max_size=12),
    ahead=st.sampled_from([0, 3, 40, 100]),
    batch=st.sampled_from([1, 17, 200, 2000]),
)
def test_what_is_believed_was_read_in_time(seed: int, stalls: dict[int, int], ahead: int, batch: int) -> None:
    """Most of all while the host runs so far ahead that nothing is sure."""
    exec_ns = np.random.default_rng(seed).integers(3000, 40000, 1000)
    records, right = run(exec_ns, stalls, ahead)
    believed = take_all(records, batch)
    assert all(right[record["dseq"] - 1] for record in believed)
    assert np.array_equal(believed["exec_ns"], exec_ns[believed["dseq"] - 1])


def test_nothing_late_and_nothing_is_rejected() -> None:
    exec_ns = np.random.default_rng(1).integers(3000, 40000, 5000)
    for ahead in (0, 30, 200):
        records, right = run(exec_ns, {}, ahead)
        assert all(right)
        assert len(take_all(records, 100)) == 5000, ahead


def test_a_stall_costs_what_was_behind_it_and_no_more() -> None:
    exec_ns = np.random.default_rng(2).integers(3000, 40000, 2000)
    records, right = run(exec_ns, {500: 5_000_000, 1200: 3_000_000}, 5)
    wrong = len(right) - sum(right)
    assert wrong > 100
    assert len(records) - len(take_all(records, 50)) < 1.5 * wrong


def test_what_is_never_sure_waits_for_no_more_than_a_few_behind_it() -> None:
    records, _ = run(np.random.default_rng(3).integers(3000, 40000, 3000), {}, 200)
    check = TimerCheck(clock=lambda: 0.0)
    for at in range(0, 2500, 100):
        check.take(records[at : at + 100])
        assert check.held <= MOST_HELD
    assert check.held >= LEAST_HELD


def test_the_hosts_own_times_are_believed_at_once() -> None:
    records, _ = run(np.random.default_rng(4).integers(3000, 40000, 100), {}, 200)
    records["timing"], records["start_ns"] = GPU_TIMING + 1, records["start_ns"][::-1].copy()
    assert len(take_all(records, 10)) == 100
