"""`dynamiccl evaluate --measured DIR`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamiccl_ray.baselines.registry import BASELINES
from dynamiccl_ray.cli.app import app

HEADER = "source_id,collective,nodes,ranks,gpus_per_node,gpu,intra,inter,algo,proto,nchannels,bytes,time_us\n"
SETTINGS = {"default,default": 30.0, "Ring,LL": 20.0, "Tree,LL": 27.0, "Tree,Simple": 60.0}


def test_a_policy_is_judged_on_what_somebody_measured(tmp_path: Path) -> None:
    rows = [
        f"s,all_reduce,1,8,8,H100,NVLink,,{s},,{n},{us * n / 1024}" for s, us in SETTINGS.items() for n in (1024, 4096)
    ]
    (tmp_path / "mine.csv").write_text(HEADER + "\n".join(rows) + "\n")
    arguments = ["evaluate", "--measured", str(tmp_path), "--runs", "1", "--learn", "150"]
    result = CliRunner().invoke(app, [*arguments, "--json", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (row,) = document["tables"]
    assert (row["sizes"], row["options"], row["default_known"]) == (2, 4, True)
    assert row["default_vs_oracle"] == pytest.approx(1.5)
    assert row["geomean_vs_oracle"] < 1.02
    assert row["regret"].keys() == {*BASELINES, "policy"}
    assert document["worst_key_vs_default"] < 0.7
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == document
    page = CliRunner().invoke(app, arguments)
    assert "median regret: " in page.output
    for wrong, says in ((["evaluate"], "name either"), ([*arguments, "default"], "name either")):
        assert says in str(CliRunner().invoke(app, wrong).exception)
