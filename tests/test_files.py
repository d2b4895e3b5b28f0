"""What ``init`` writes runs, what is listed loads, and the published schemas are those of the models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dynamiccl_ray.cli.app import main
from dynamiccl_ray.cli.files import Kind, schema_of
from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.config.experiment import load
from dynamiccl_ray.config.sweep import load_sweep
from dynamiccl_ray.fabric.cluster_config import load_cluster
from dynamiccl_ray.shipped import find, folder, names
from dynamiccl_ray.workloads.workload import load_workload

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "dynamiccl_ray" / "data" / "schema"
LOADERS = {
    Kind.EXPERIMENT: load,
    Kind.CURRICULUM: load_curriculum,
    Kind.SWEEP: load_sweep,
    Kind.CLUSTER: load_cluster,
    Kind.WORKLOAD: load_workload,
}
SHIPPED = [(kind, path) for kind in Kind for path in sorted(folder(kind.value).glob("*.yaml"))]


def _run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What a command prints."""
    monkeypatch.setattr(sys, "argv", ["dynamiccl", *arguments])
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    return out


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
def test_a_published_schema_is_that_of_the_model(kind: Kind) -> None:
    published = json.loads((PUBLISHED / f"{kind.value}.json").read_text())
    assert published == schema_of(kind), "run `make schema`"


@pytest.mark.parametrize(("kind", "path"), SHIPPED, ids=lambda given: getattr(given, "stem", ""))
def test_what_is_shipped_names_its_schema_and_fits_it(kind: Kind, path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    named = (path.parent / first.partition("=")[2]).resolve()
    assert named == (PUBLISHED / f"{kind.value}.json").resolve()
    jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(named.read_text()))


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({}, True),
        ({"mode": "fast"}, False),
        ({"epochs": {"most": 3}}, False),
        ({"seed": -1}, False),
        ({"fabric": {"kind": "measurd"}}, False),
        ({"actions": {"chunk_bytes": [0, "64KiB"]}}, True),
        ({"actions": {"chunk_bytes": [0, "64Kib"]}}, False),
    ],
)
def test_the_schema_tells_right_from_wrong(change: dict[str, Any], valid: bool) -> None:
    document = {"name": "x", "fabric": {"kind": "measured"}, **change}
    check = jsonschema.Draft202012Validator(schema_of(Kind.EXPERIMENT))
    assert check.is_valid(document) is valid
    described = schema_of(Kind.EXPERIMENT)["$defs"]["Epochs"]["properties"]["most_s"]["description"]
    assert described.startswith("An epoch ends after this long")


def test_the_list_has_every_file_with_its_first_comment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = json.loads(_run(capsys, monkeypatch, "list", "--json"))
    assert {kind: list(found) for kind, found in listed.items()} == {kind.value: names(kind.value) for kind in Kind}
    assert listed["experiment"]["p5en-warm"].startswith("A warm start: 64 GPUs, measured on AWS p5en")
    for found in listed.values():
        assert all(words and "yaml-language-server" not in words for words in found.values())
    assert "dgx-h100-ndr-sharp" in _run(capsys, monkeypatch, "list")


def test_what_init_writes_is_valid_and_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = _run(capsys, monkeypatch, "init", str(tmp_path / "new")).split()
    assert sorted(Path(path).name for path in written) == ["cluster.yaml", "curriculum.yaml", "experiment.yaml"]
    for kind in (Kind.EXPERIMENT, Kind.CURRICULUM, Kind.CLUSTER):
        path = tmp_path / "new" / f"{kind.value}.yaml"
        LOADERS[kind](path)
        modeline = path.read_text().splitlines()[0]
        named = path.parent / modeline.removeprefix("# yaml-language-server: $schema=")
        jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(named.read_text()))
    changed = tmp_path / "new" / "cluster.yaml"
    changed.write_text("mine")
    monkeypatch.setattr(sys, "argv", ["dynamiccl", "init", str(tmp_path / "new")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--force overwrites" in capsys.readouterr().err
    assert changed.read_text() == "mine"
    _run(capsys, monkeypatch, "init", str(tmp_path / "new"), "--force")
    assert load_cluster(changed).name == "my-cluster"


def test_what_init_writes_runs_and_keeps_the_settings_as_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(capsys, monkeypatch, "init", str(tmp_path))
    settings = ("--set", "stop.rounds=1", "--set", "ppo.lr=3e-4", "--set", "job=init_test")
    run = tmp_path / "run"
    _run(capsys, monkeypatch, "online", str(tmp_path / "experiment.yaml"), "--serial", "--out", str(run), *settings)
    kept = load(run / "experiment.json")
    assert (kept.ppo.lr, kept.stop.rounds, kept.name) == (3e-4, 1, "my-experiment")
    assert kept == load(tmp_path / "experiment.yaml", settings[1::2])


def test_a_shipped_file_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(find("experiment", "p5en-warm")).name == "p5en-warm"
    (tmp_path / "mine").write_text("x")
    assert find("experiment", "mine") == Path("mine")
    assert find("cluster", "mine.yaml", tmp_path) == tmp_path / "mine.yaml"


def test_settings_from_the_command_line_reach_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = _run(capsys, monkeypatch, "workload", "show", "phi2-tp", "--json", "--set", "name=other")
    assert json.loads(shown)["name"] == "other"
    shown = _run(capsys, monkeypatch, "fabric", "show", "dgx-v100", "--nodes", "1", "--json", "--set", "name=mine")
    assert json.loads(shown)["cluster"] == "mine"


@pytest.mark.parametrize("arguments", ["-h", "online -h", "fabric -h", "fabric show -h", "bench train -h"])
def test_help_has_a_short_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    assert "Usage" in _run(capsys, monkeypatch, *arguments.split())


def test_the_version_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(capsys, monkeypatch, "--version").startswith("dynamiccl 0.")
    assert "--install-completion" in _run(capsys, monkeypatch, "-h")
