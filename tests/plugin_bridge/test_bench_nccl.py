"""The arithmetic of `dynamiccl bench plugin --nccl`."""

from __future__ import annotations

import numpy as np
import pytest

from dynamiccl_ray.plugin_bridge.bench_nccl import (
    BOTH,
    IDLE,
    INSPECTOR,
    NONE,
    Timings,
    read_clock,
    spread,
    summary,
    targets,
)


def test_what_a_process_printed_is_read_per_call() -> None:
    text = (
        "[rank 0] clock: thread 1000 wall 2000 process 50000\n"
        "rank 0 says something else\n"
        "[rank 0] clock: thread 1500 wall 1700 process 56000\n"
    )
    thread, wall, process = read_clock(text, 10)
    assert thread.tolist() == [100, 150]
    assert wall.tolist() == [200, 170]
    assert process.tolist() == [600]
    assert [len(numbers) for numbers in read_clock("", 10)] == [0, 0, 0]


def test_a_spread_is_of_all_rounds_and_relative_to_no_plugin() -> None:
    without = [np.arange(101.0), np.arange(101.0)]
    found = spread([numbers + 25 for numbers in without], without)
    assert found == pytest.approx(
        {
            "p10": 35,
            "p50": 75,
            "p90": 115,
            "added": 25,
            "added_percent": 50,
            "added_p10": 25,
            "added_p10_percent": 250,
        }
    )


def test_the_targets_name_what_was_measured() -> None:
    def samples(ns: float) -> Timings:
        numbers = [np.full(3, ns)]
        return Timings(thread=numbers, wall=numbers, process=numbers)

    by_setup = summary({NONE: samples(100), BOTH: samples(208), IDLE: samples(200), INSPECTOR: samples(199)})
    assert by_setup[BOTH]["process_ns"]["added"] == 108
    found = targets(by_setup)
    assert set(found) == {"ours to a profiler that does nothing", "ours to NVIDIA's Inspector"}
    assert found["ours to a profiler that does nothing"]["met"]
    assert found["ours to a profiler that does nothing"]["p50"] == pytest.approx(1.04)
    assert not found["ours to NVIDIA's Inspector"]["met"]
