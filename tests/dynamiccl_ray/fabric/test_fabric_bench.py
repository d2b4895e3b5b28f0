"""``bench fabric`` prices what exists, fast, in memory that does not grow with the batch."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dynamiccl_ray.cli.app import app


def test_bench_fabric_is_vectorised_and_its_memory_is_flat() -> None:
    done = CliRunner().invoke(app, ["bench", "fabric", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["configurations_per_s"] > 100 * result["loop_per_s"]
    extra = [row["peak_extra_bytes"] for row in result["memory"]]
    assert max(extra) < 1.1 * min(extra)
    assert [row["answer_bytes"] for row in result["memory"]] == [8 * row["batch"] for row in result["memory"]]


@pytest.mark.parametrize("as_json", [True, False])
def test_fabric_worth_prints_its_tables(as_json: bool) -> None:
    done = CliRunner().invoke(app, ["fabric", "worth", *(["--json"] if as_json else [])])
    assert done.exit_code == 0, done.output
    if as_json:
        assert json.loads(done.stdout).keys() == {"clusters", "collectives", "tiers", "changes"}
    else:
        assert "dgx-h100-ndr" in done.stdout
