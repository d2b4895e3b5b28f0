"""A budget for the plugin, with real ranks: what is not profiled is no loss, and learning goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from small import small_experiment

from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING
from dynamiccl_ray.trainers.online.backends import SerialBackend
from dynamiccl_ray.trainers.online.recorder import read_samples
from dynamiccl_ray.trainers.online.run import _job, _played, plan_of, run_online

WINDOW = 256


@pytest.mark.parametrize("overhead", [{}, {"max_percent": 100.0}, {"profile_one_in": 1}])
def test_without_need_nothing_changes(tmp_path: Path, job: str, overhead: dict[str, float]) -> None:
    summary = run_online(small_experiment(job, overhead=overhead, stop={"rounds": 2}), tmp_path, serial=True)
    coverage = summary["coverage"]
    assert summary["dropped_records"] == 0
    assert coverage["not_profiled"] == coverage["lost"] == coverage["unheard"] == 0
    assert coverage["measured"] == coverage["calls"] == 4 * summary["collectives"]
    assert coverage["tuned"] + sum(coverage["bypassed"].values()) == coverage["calls"]
    assert list(summary["overhead"]["profiled_one_in"].values()) == [1]


def test_learning_converges_where_an_eighth_is_profiled(tmp_path: Path, job: str) -> None:
    experiment = small_experiment(
        job, overhead={"profile_one_in": 8}, stop={"rounds": None, "exploit_rounds_after_last_event": 4}
    )
    summary = run_online(experiment, tmp_path, serial=True)
    ratio = summary["geomean_vs_oracle"]
    assert ratio["default"] > 1.10
    assert ratio["learned"] <= 1.04
    assert summary["gap_closed"] > 0.5
    assert summary["agreement_violations"] == 0
    assert summary["dropped_records"] == 0
    assert summary["unmeasured"] == {}
    coverage = summary["coverage"]
    assert coverage["measured"] + coverage["not_profiled"] + coverage["lost"] + coverage["unheard"] == coverage["calls"]
    assert coverage["measured"] / coverage["calls"] == pytest.approx(1 / 8, rel=0.5)
    assert coverage["unheard"] == 0
    # All ranks profile the same: what one has measured, all have.
    assert coverage["measured"] == 4 * len(read_samples(tmp_path)["dseq"]) + summary["unused_records"]
    assert summary["unused_records"] < 0.01 * coverage["measured"]


def test_a_tiny_budget_makes_profiling_rare(tmp_path: Path, job: str) -> None:
    experiment = small_experiment(
        job,
        overhead={"max_percent": 1e-6},
        fabric={"rate_hz": 4000.0},
        epochs={"most_s": 0.2, "watch_s": 0.2, "per_round": 2},
        stop={"rounds": 10_000},
    )
    fabric = _played(experiment, lambda _: None)
    assert fabric is not None
    with _job(experiment, fabric, tmp_path) as played:
        backend = SerialBackend(plan_of(experiment, "r", fabric))
        played.set_credit(FREE_RUNNING)
        try:
            deadline = time.monotonic() + 150
            status = backend.round()
            while set(status.overhead["profiled_one_in"].values()) != {256}:
                assert time.monotonic() < deadline, status.overhead
                status = backend.round()
            assert status.overhead["percent"] > 1e-6
            before = backend.round().coverage
            after = before
            while after.calls < before.calls + 4 * 16 * WINDOW:
                assert time.monotonic() < deadline
                after = backend.round().coverage
            calls, measured = after.calls - before.calls, after.measured - before.measured
            assert measured < calls / 4
            assert after.not_profiled - before.not_profiled > calls / 2
            assert after.lost == 0
        finally:
            backend.close()
