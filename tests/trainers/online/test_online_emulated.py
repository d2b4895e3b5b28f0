"""The whole loop on the modelled fabric: channels are learned, and really applied by every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.config.experiment import load
from dynamiccl_ray.plugin_bridge.nccl_job import read_log
from dynamiccl_ray.report.page import write_report
from dynamiccl_ray.trainers.online.run import run_online

EXPERIMENT = Path(__file__).parents[3] / "experiments" / "online" / "emulated-dgx-h100.yaml"


def _short(job: str, **changes: Any) -> Any:
    """Four ranks, five keys, nothing happens to the network."""
    experiment = load(EXPERIMENT)
    raw = experiment.model_dump()
    raw["job"] = job
    raw["fabric"] |= {
        "processes": {"nodes": 2, "ranks_per_node": 2},
        "rate_hz": 0,
        "collectives": [
            {"collective": "all_reduce", "sizes_bytes": [4096, 1 << 23]},
            {"collective": "all_gather", "sizes_bytes": [1 << 17, 1 << 20, 1 << 22]},
        ],
        "events": [],
    }
    raw |= {"stop": {"exploit_rounds_after_last_event": 4}, **changes}
    return type(experiment).model_validate(raw)


def test_channels_are_learned_and_applied(tmp_path: Path, job: str) -> None:
    summary = run_online(_short(job), tmp_path, serial=True)
    assert summary["agreement_violations"] == 0
    assert summary["dropped_records"] == 0
    ratio = summary["geomean_vs_oracle"]
    assert ratio["default"] > 1.1
    assert ratio["learned"] - 1 < 0.5 * (ratio["default"] - 1)
    assert "vendor" not in ratio
    assert all(row["vendor_us"] is None for row in summary["keys"])

    for rank in range(4):
        used = read_log(tmp_path / "job" / f"log.{rank}")
        assert (used["asked"] > 0).mean() > 0.3
        assert set(np.unique(used["asked"])) <= {0, 4, 8, 16, 24, 32}
    assert any(row["action"].endswith("ch") for row in summary["keys"])

    page = write_report(tmp_path).read_text()
    assert "as a physical model prices them on dgx-h100-ndr" in page
    assert "not calibrated" in page
    assert "no oracle" not in page
