"""What `make demo` promises, on the command line that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_learns_adapts_agrees_and_reports(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dynamiccl_ray.cli", "demo", "--json", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["seconds"] < 180
    assert summary["geomean_vs_oracle"]["default"] > 1.10
    assert summary["geomean_vs_oracle"]["learned"] <= 1.02
    assert summary["gap_closed"] > 0.7
    assert summary["agreement_violations"] == 0
    assert summary["dropped_records"] == 0
    assert summary["switches"] > 50
    assert summary["detection_delay"] is not None
    after = summary["after"][0]["geomean_vs_oracle"]
    assert after["default"] > 1.2
    assert after["learned"] <= 1.03
    for row in summary["keys"]:
        assert {"key", "default_us", "learned_us", "oracle_us"} <= row.keys()
    assert {"epochs", "collectives"} <= summary.keys()
    report = Path(summary["report"])
    assert report.stat().st_size > 100_000
    assert (tmp_path / "summary.png").exists()
    assert sum(part.stat().st_size for part in (tmp_path / "samples.parquet").iterdir()) > 100_000
