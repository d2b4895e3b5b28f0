"""Ranks of a node on one clock, though each GPU has its own."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import CALLS, Rig, play, wait_for

from dynamiccl_ray.plugin_bridge.clocks import WHILE_NS, Clock
from dynamiccl_ray.plugin_bridge.layout import GPU_TIMING, RECORD_DTYPE
from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING

HOST_TIMING = 2


def records(start: Any, took: Any, *, ahead: int, late: Any, timing: int = GPU_TIMING) -> np.ndarray[Any, Any]:
    """Of a GPU whose timer is ``ahead`` of the host's clock, heard of so ``late``; all ns, ``start`` by the host."""
    start, took, late = (np.atleast_1d(x).astype(np.int64) for x in (start, took, late))
    out = np.zeros(len(start), RECORD_DTYPE)
    out["start_ns"], out["exec_ns"], out["timing"] = start + ahead, took, timing
    if timing == GPU_TIMING:
        out["clock"] = (late - ahead) % 2**32
    return out


@given(
    ahead=st.integers(-(2**40), 2**40),
    late=st.lists(st.integers(0, 10**8), min_size=1, max_size=20),
    begin=st.integers(2**41, 2**62),
)
def test_the_least_that_was_late_tells_the_distance(ahead: int, late: list[int], begin: int) -> None:
    start = begin + 1000 * np.arange(len(late))
    found, end = Clock().on_host(records(start, 500, ahead=ahead, late=late))
    assert np.array_equal(found, (start + min(late)) % 2**32)
    assert np.array_equal(end - found, np.full(len(late), 500, np.uint32))


def test_what_is_long_ago_does_not_count_for_timers_drift_apart() -> None:
    clock = Clock()
    clock.on_host(records(0, 500, ahead=7, late=2_000))
    # 50 us have been lost since: nothing is late by less than that any more.
    assert clock.on_host(records(WHILE_NS // 2, 500, ahead=7, late=52_000))[0] == WHILE_NS // 2 + 2_000
    assert clock.on_host(records(2 * WHILE_NS, 500, ahead=7, late=52_000))[0] == 2 * WHILE_NS + 52_000


def test_one_record_of_another_time_does_not_spoil_what_comes_later() -> None:
    clock = Clock()
    clock.on_host(records(10**9, 500, ahead=7, late=2_000))
    # As if it had been heard of long before it ended: another kernel's end, an hour ahead.
    clock.on_host(records(3600 * 10**9, 500, ahead=7, late=-(10**6)))
    assert clock.on_host(records(10**9 + 10**6, 500, ahead=7, late=3_000))[0] == 10**9 + 10**6 + 3_000


def test_what_the_host_has_timed_is_on_its_clock_already() -> None:
    assert Clock().on_host(records(5000, 500, ahead=0, late=0, timing=HOST_TIMING))[0] == 5000
    assert len(Clock().on_host(records([], [], ahead=0, late=0)[:0])[0]) == 0


def test_ranks_can_be_compared() -> None:
    early, late = Clock(), Clock()
    rng = np.random.default_rng(0)
    start = 10**12 + 200_000 * np.arange(500)
    one, _ = early.on_host(records(start, 50_000, ahead=-(10**11), late=1_000 + rng.exponential(20_000, 500)))
    other, _ = late.on_host(records(start + 7_000, 43_000, ahead=10**13, late=1_000 + rng.exponential(20_000, 500)))
    assert (other - one).astype(np.int32) == pytest.approx(7_000, abs=500)


def test_the_plugin_says_when_it_has_heard(rig: Rig) -> None:
    """By the clock that everybody on the host can read."""
    before = time.monotonic_ns()
    job = rig.start(play(CALLS[:2], steps=20))
    ((channel,),) = rig.channels(job)
    job.set_credit(FREE_RUNNING)
    wait_for(lambda: channel.status.records == 40, what="the records")
    seen = channel.drain()
    after = time.monotonic_ns()
    assert len(seen) == 40
    assert np.all(seen["timing"] == GPU_TIMING)
    end = seen["start_ns"] + seen["exec_ns"]
    heard = (end.astype(np.uint32) + seen["clock"]).astype(np.int64)
    since = (heard - before % 2**32) % 2**32
    assert np.all(since <= after - before)
    assert np.all(np.diff(since[np.argsort(seen["ticket"])]) >= 0)
