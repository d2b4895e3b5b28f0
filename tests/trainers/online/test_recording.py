"""A trace is played, recorded again, and is the same; what a run cannot say of itself is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from dynamiccl_ray.cli.app import app
from dynamiccl_ray.config.experiment import load
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.trainers.online.recording import record_run
from dynamiccl_ray.trainers.online.run import run_online
from dynamiccl_ray.workloads.recorded import load_trace

REDUCED = {"collective": "all_reduce", "bytes": 1 << 20}
TRACE: dict[str, Any] = {
    "kind": "trace",
    "name": "replayed",
    "communicators": [
        {
            "name": "data",
            "count": 8,
            "ranks": 2,
            "nodes": 2,
            "step": [REDUCED, {**REDUCED, "bytes": 4097}, {**REDUCED, "bytes": 40960, "grouped": True}],
        },
        {"name": "tensor", "count": 2, "ranks": 8, "nodes": 1, "step": [REDUCED], "repeat": 4},
        {
            "name": "world",
            "ranks": 16,
            "nodes": 2,
            "once": [{**REDUCED, "bytes": 4096}],
            "step": [
                {"collective": "all_gather", "bytes": 2 << 20, "times": 2},
                {"collective": "reduce_scatter", "bytes": 2 << 20},
                {"collective": "all_gather", "bytes": 2 << 20},
            ],
        },
    ],
}  # fmt: skip
EXPERIMENT: dict[str, Any] = {
    "name": "replayed",
    "job": "replayed",
    "mode": "observe",
    "fabric": {
        "kind": "emulated",
        "cluster": "dgx-h100-ndr",
        "nodes": 2,
        "processes": {"nodes": 2, "ranks_per_node": 2},
        "rate_hz": 0,
        "trace": "trace.yaml",
    },
    "stop": {"rounds": 2},
}


def _experiment(directory: Path) -> Path:
    (directory / "trace.yaml").write_text(yaml.safe_dump(TRACE))
    (directory / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    return directory / "experiment.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recorded")
    summary = run_online(load(_experiment(directory)), directory / "run", serial=True)
    assert summary["agreement_violations"] == 0
    assert "8 x data of 2 ranks" in summary["stands_for"]
    assert "data: a group of 40KiB is played by two all_reduce" in summary["stands_for"]
    return directory / "run"


def test_what_was_played_is_recorded_as_it_was(run: Path) -> None:
    """Of 16 ranks four have a process: two of the node's and of the data groups' are seen."""
    out = run.parent / "again.yaml"
    done = CliRunner().invoke(app, ["workload", "record", str(run), "--out", str(out)])
    assert done.exit_code == 0, done.output
    first, again = load_trace(run.parent / "trace.yaml"), load_trace(out)
    data, *others = first.communicators
    assert again == first.model_copy(update={"communicators": (data.model_copy(update={"count": 2}), *others)})
    shown = CliRunner().invoke(app, ["workload", "show", str(out), "--json"])
    rows = json.loads(shown.output)["calls"]
    assert [(r["communicator"], r["operation"], r["count"]) for r in rows] == [
        ("data x2", "all_reduce", 3),
        ("tensor x2", "all_reduce", 4),
        ("world", "all_gather", 3),
        ("world", "reduce_scatter", 1),
    ]


def test_a_run_without_samples_has_no_trace(run: Path, tmp_path: Path) -> None:
    for name in ("experiment.json", "checkpoint.pt"):
        (tmp_path / name).symlink_to(run / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        record_run(tmp_path)
    (tmp_path / "samples.parquet").mkdir()
    table = pq.read_table(run / "samples.parquet")
    pq.write_table(table.drop_columns("aggregate"), tmp_path / "samples.parquet" / "part.parquet")
    with pytest.raises(ConfigError, match="no column 'aggregate': written by an older version"):
        record_run(tmp_path)
    pq.write_table(table.slice(0, 0), tmp_path / "samples.parquet" / "part.parquet")
    with pytest.raises(ConfigError, match=r"nothing to record: .*none of its calls was measured"):
        record_run(tmp_path)
    with pytest.raises(ConfigError, match=r"experiment\.json"):
        record_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "value"), [("comm", None), ("key", 9999), ("epoch", None), ("bytes", -5), ("dseq", None)]
)
def test_samples_that_no_run_has_measured_are_no_trace(run: Path, tmp_path: Path, name: str, value: int | None) -> None:
    for each in ("experiment.json", "checkpoint.pt"):
        (tmp_path / each).symlink_to(run / each)
    table = pq.read_table(run / "samples.parquet")
    at, of = table.column_names.index(name), table.schema.field(name)
    (tmp_path / "samples.parquet").mkdir()
    wrong = table.set_column(at, of, pa.array([value] * len(table), of.type))
    pq.write_table(wrong, tmp_path / "samples.parquet" / "part.parquet")
    with pytest.raises(ConfigError, match=r"samples\.parquet: damaged: .+; record another run") as e:
        record_run(tmp_path)
    assert "\n" not in str(e.value)


def test_what_was_not_measured_is_said(run: Path, tmp_path: Path) -> None:
    for name in ("experiment.json", "checkpoint.pt"):
        (tmp_path / name).symlink_to(run / name)
    (tmp_path / "samples.parquet").mkdir()
    table = pq.read_table(run / "samples.parquet")
    kept = [number not in (10, 15) for number in table["dseq"].to_pylist()]
    pq.write_table(table.filter(kept), tmp_path / "samples.parquet" / "part.parquet")
    found = record_run(tmp_path)
    assert found.trace.communicators[2].step == load_trace(run.parent / "trace.yaml").communicators[2].step
    assert any("calls were not measured by all ranks" in note for note in found.notes)
