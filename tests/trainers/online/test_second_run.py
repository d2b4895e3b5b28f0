"""A second run beside a job, warmed by the first: the smallest of what ``benchmarks/second_run.py`` measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.second_run import EXPERIMENT, compared, played
from dynamiccl_ray.config.experiment import Stop, load


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_run_loses_half_as_much_and_a_wrong_record_costs_little(tmp_path: Path, job: str) -> None:
    changes = {"job": job, "stop": Stop(exploit_rounds_after_last_event=1)}
    experiment = load(EXPERIMENT).model_copy(update=changes)
    for nodes in (8, 16):
        played(experiment, nodes, 1, tmp_path / f"{nodes}-1")
    cold = played(experiment, 8, 0, tmp_path / "cold")
    row = compared(experiment, 8, 16, 0, 1, tmp_path)
    assert row["warm"]["first"] <= cold["first"] / 2
    for name in ("other nodes", "shuffled"):
        assert row[name]["first"] <= cold["first"] + 0.03
        assert row[name]["end"] <= cold["end"] + 0.01
