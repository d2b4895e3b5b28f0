"""The commands print a table, or one JSON document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamiccl_ray.cli_workload import workload_app
from dynamiccl_ray.errors import ConfigError

ROOT = Path(__file__).parents[3]
PRESET = str(ROOT / "experiments" / "workloads" / "llama3-8b-fsdp.yaml")


def _json(*arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(workload_app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_show() -> None:
    found = _json("show", PRESET)
    assert found["parallelism"] == "fsdp"
    assert isinstance(found["calls"], list)
    assert {row["operation"] for row in found["calls"]} == {"all_gather", "reduce_scatter"}
    shown = CliRunner().invoke(workload_app, ["show", PRESET]).stdout
    assert "436 MB" in shown


def test_reference() -> None:
    points = _json("reference")["points"]
    assert isinstance(points, list)
    assert len(points) >= 20
    assert "best schedule" in CliRunner().invoke(workload_app, ["reference"]).stdout


def test_reproduce() -> None:
    found = _json("reproduce", "--facts", str(ROOT / "dynamiccl_ray" / "data" / "training" / "shi2020.csv"))
    assert found["median_error"] == pytest.approx(0.023, abs=0.005)
    assert "order right in" in CliRunner().invoke(workload_app, ["reproduce"]).stdout


def test_a_rank_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="ranks 0 to 63"):
        CliRunner().invoke(workload_app, ["show", PRESET, "--rank", "64"], catch_exceptions=False)
