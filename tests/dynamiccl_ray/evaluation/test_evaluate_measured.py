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
    for wrong, says in (
        (["evaluate"], "name either"),
        ([*arguments, "default"], "name either"),
        ([*arguments, "--set", "seed=1"], "--set is for a curriculum, and --measured has none"),
        ([*arguments, "--scenarios", "10"], "--scenarios is for a curriculum"),
    ):
        assert says in str(CliRunner().invoke(app, wrong).exception)


def test_of_what_was_not_measured_nothing_is_said(tmp_path: Path) -> None:
    rows = [f"s,all_reduce,1,8,8,H100,NVLink,,{s},,1024,{us}" for s, us in (*SETTINGS.items(), ("Ring,Simple", 25.0))]
    (tmp_path / "mine.csv").write_text(HEADER + "\n".join(row for row in rows if "default" not in row) + "\n")
    arguments = ["evaluate", "--measured", str(tmp_path), "--runs", "1", "--learn", "20"]
    document = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    (row,) = document["tables"]
    assert (row["options"], row["default_known"], row["regret"]["nccl"]) == (4, False, None)
    assert document["median_regret"]["nccl"] is document["mean_regret"]["nccl"] is None
    _, _, medians = CliRunner().invoke(app, arguments).output.partition("median regret: ")
    assert "policy" in medians
    assert "nccl" not in medians


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    rows = [f"s,all_reduce,1,8,8,H100,NVLink,,{s},,1024,{us}" for s, us in SETTINGS.items()]
    text = HEADER + "\n".join(rows) + "\n"
    (tmp_path / "mine.csv").write_text(text + "s,alltoall,1,8,8,H100,NVLink,,Ring,LL,,1024,5\n")
    arguments = ["evaluate", "--measured", str(tmp_path), "--runs", "1", "--learn", "20"]
    assert "left out, 1: mine.csv: alltoall" in " ".join(CliRunner().invoke(app, arguments).output.split())
    (tmp_path / "mine.csv").write_text("\n".join(text.splitlines()[:3]) + "\n")
    assert "left out, 1: sizes with fewer than 4 options" in str(CliRunner().invoke(app, arguments).exception)
    (tmp_path / "mine.csv").write_text(text)
    in_the_way = tmp_path / "mine.csv"
    assert "cannot write there" in str(CliRunner().invoke(app, [*arguments, "--out", str(in_the_way)]).exception)
