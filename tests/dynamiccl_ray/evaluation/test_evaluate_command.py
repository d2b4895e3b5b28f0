"""`dynamiccl evaluate` from end to end, small; and what its report says in words."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from dynamiccl_ray.agent import policy
from dynamiccl_ray.baselines.registry import BASELINES
from dynamiccl_ray.cli.app import app as commands
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.evaluation import suite as evaluation_suite
from dynamiccl_ray.evaluation.suite import SCALE_GPUS, SUBJECT, TIER_BYTES, TIER_PLACES
from dynamiccl_ray.report.evaluation import findings, terminal_table
from dynamiccl_ray.simulation import splits as evaluation_jobs
from dynamiccl_ray.simulation.splits import NOISE, RANDOM

YAML = """
name: tiny
stages:
  - name: near
    places: [{cluster: dgx-v100, nodes: [1]}]
    most_phases: 3
held_out: [{cluster: cloud-tcp, nodes: [2]}]
streams: {keys: 4}
control: {learning: {heat: 0.4}}
"""


MEASURED = (4, 8)
"""Nodes of the measured tables."""


@pytest.fixture
def app() -> typer.Typer:
    """The command line."""
    return commands


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    """A curriculum and an untrained policy, as arguments."""
    (tmp_path / "tiny.yaml").write_text(YAML)
    torch.manual_seed(0)
    net = policy.PolicyNetwork(8)
    with torch.no_grad():
        # Certain of what NCCL believes: a network that has learned nothing would try everything.
        net.cost_weight.fill_(50.0)
        net.own.fill_(50.0)
    policy.save(net, tmp_path / "policy.pt")
    return [str(tmp_path / "tiny.yaml"), "--checkpoint", str(tmp_path / "policy.pt")]


def test_a_tiny_evaluation(
    app: typer.Typer, inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What repeats itself once or twice: noises, random clusters, measured tables, sizes.
    noise = next(iter(NOISE))
    monkeypatch.setattr(evaluation_jobs, "NOISE", {noise: NOISE[noise]})
    monkeypatch.setattr(evaluation_jobs, "RANDOM_SHARE", 1)
    monkeypatch.setattr(evaluation_suite, "assess", partial(evaluation_suite.assess, measured_nodes=MEASURED))
    monkeypatch.setattr(evaluation_suite, "TIER_BYTES", TIER_BYTES[::5])
    controls: list[Control] = []
    for name in ("learned", "beside"):
        of = getattr(evaluation_suite, name)
        monkeypatch.setattr(evaluation_suite, name, lambda *given, of=of: controls.append(given[-1]) or of(*given))
    monkeypatch.setattr(evaluation_suite, "SCALE_BYTES", evaluation_suite.SCALE_BYTES[::10])
    out = tmp_path / "out"
    # The same policy as a further seed: noise and jobs are the same, and so is what is said of it.
    small = [*inputs[1:], "--scenarios", "2", "--runs", "1", "--learn", "20", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, ["evaluate", *inputs, *small], catch_exceptions=False)
    assert result.exit_code == 0
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["seeds"] == [0]
    assert [split["name"] for split in document["splits"]] == [
        "training: near",
        "held out: cloud-tcp",
        RANDOM,
        f"noise: {noise}",
        *(f"measured p5en, {n} nodes" for n in MEASURED),
        "held out",
    ]
    rivals = {method: regret for method, regret in document["splits"][-1]["regret"].items() if method != "oracle"}
    assert document["least_regret"] == {"cloud-tcp": min(rivals, key=lambda method: rivals[method])}
    for split in document["splits"]:
        keys = {"name", "gap_closed", "geomean_vs_oracle", "worst_key_vs_default", "p99_key_vs_default", "regret"}
        assert keys <= set(split)
        assert {SUBJECT, "nccl", "oracle", "bandit"} <= set(split["regret"])
        assert split["regret"]["oracle"] == 0
        for method, (low, high) in split["regret_interval"].items():
            assert low <= split["regret"][method] <= high
            assert split["regret"][method] == pytest.approx(np.mean(split["regret_of_jobs"][method]))
        for method, (mean, low, high) in split["regret_behind"].items():
            assert low <= mean <= high
            assert mean == pytest.approx(split["regret"][SUBJECT] - split["regret"][method])
        assert set(split["regret_behind"]) == set(split["regret"]) - {SUBJECT}
        assert split is document["splits"][-1] or split["collectives_to_best"]["oracle"]["reached"] == 1
        assert split["geomean_vs_oracle"] >= 1
        first, second = split["policies"]
        assert first == second
        assert first["regret"] == split["regret"][SUBJECT]
    vendors = {split["name"]: split["vendor_vs_oracle"] for split in document["splits"][-3:-1]}
    assert vendors["measured p5en, 8 nodes"] > 1
    assert vendors["measured p5en, 4 nodes"] is None
    assert {row["tier"] for row in document["tiers"]} == set(TIER_PLACES)
    assert [row["gpus"] for row in document["scale"]] == list(SCALE_GPUS)

    page = Path(document["report"]).read_text(encoding="utf-8")
    assert page.count("(100.0%)") > 0, "in how many phases the best was reached"
    assert page.count("data:image/png;base64,") == len(document["splits"]) - 1 + 2
    assert "<script" not in page
    assert "http" not in re.sub('base64,[^"]*', "", page), "letters of a picture may spell anything"
    assert json.loads((out / "evaluation.json").read_text()) == document
    samples = pq.read_table(out / "samples.parquet")
    # Measured collectives times keys times jobs, for each method; tables have keys of their own.
    near = samples.filter(samples["split"].cast("string").to_numpy(zero_copy_only=False) == "training: near")
    assert {control.learning.heat for control in controls} == {0.4}, "the loop is as the curriculum has it"
    assert near.num_rows == 100 * 4 * 2 * (len(BASELINES) + 1)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal_table(document))
    assert "…" not in console.export_text()


def test_what_is_wrong_with_the_arguments_is_said(app: typer.Typer, inputs: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.pt does not exist"):
        CliRunner().invoke(app, ["evaluate", *inputs[:2], str(tmp_path / "missing.pt")], catch_exceptions=False)
    with pytest.raises(ConfigError, match="--out"):
        CliRunner().invoke(app, ["evaluate", *inputs, "--out", inputs[0]], catch_exceptions=False)


def _row(**changes: Any) -> dict[str, Any]:
    regret = {"nccl": 0.1, "bandit": 0.02, "oracle": 0.0, SUBJECT: 0.05}
    return {
        "name": "held out",
        "gap_closed": 0.8,
        "geomean_vs_oracle": 1.05,
        "default_vs_oracle": 1.2,
        "worst_key_vs_default": 1.0,
        "p99_key_vs_default": 1.0,
        "adapted": 0.5,
        "steps_to_adapt": 40.0,
        "regret": regret,
        **changes,
    }


def test_the_report_says_where_the_policy_loses() -> None:
    good = " ".join(findings(_row()))
    assert "80.0% of the gap is closed" in good
    assert "Less is lost by bandit (2.0%)" in good
    assert "More is lost by nccl (10.0%)" in good
    assert "After 50.0% of the shifts" in good
    bad = " ".join(findings(_row(gap_closed=-0.3, worst_key_vs_default=1.7, vendor_vs_oracle=1.01)))
    assert "worse than leaving NCCL alone" in bad
    assert "worst key takes 1.700 times" in bad
    assert "the policy is behind it" in bad
    assert "no gap to close" in " ".join(findings(_row(gap_closed=None)))
