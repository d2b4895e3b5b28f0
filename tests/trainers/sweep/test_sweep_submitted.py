"""A sweep that is submitted to a Ray cluster, and fetched from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from ray_nodes import RayNodes

SWEEP = {
    "name": "submitted",
    "of": "p5en-warm",
    "set": {"fabric.processes": {"nodes": 1, "ranks_per_node": 2}, "stop.exploit_rounds_after_last_event": 1},
    "space": {"control.learning.draws": [8], "control.learning.compares": [4]},
    "metric": "lost",
    "seeds": [0],
    "concurrent": 2,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_submitted_sweep_ends_and_its_results_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where a submitted job writes
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.yaml").write_text(yaml.safe_dump(SWEEP))
    with RayNodes(tmp_path / "cluster", 1) as cluster:
        cluster.start_head()
        cluster.start(0)
        cluster.submit("my-sweep", sources, "sweep", "tiny.yaml")
        cluster.ray("job", "logs", "--follow", "my-sweep", timeout=400.0)
        logs = cluster.logs("my-sweep")
        assert "SUCCEEDED" in cluster.state("my-sweep"), logs
        assert "dynamiccl report --sweep submitted" in logs
        assert "/report.html\n" in logs, "a log has no width: a path is one word"
        out = tmp_path / "fetched"
        fetched = cluster.dynamiccl("report", "--sweep", "submitted", "--out", str(out))
        assert fetched.returncode == 0, fetched.stderr
        assert {"report.html", "results.csv", "best.yaml"} <= {path.name for path in out.iterdir()}
        trials = json.loads((out / "results.json").read_text())["trials"]
        assert [trial["status"] for trial in trials] == ["done", "done"]
        unknown = cluster.dynamiccl("report", "--sweep", "another")
        assert unknown.returncode == 2
        assert "no sweep 'another' has written to this Ray cluster" in unknown.stderr
