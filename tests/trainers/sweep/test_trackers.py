"""Trackers hear of every trial; one that is not installed is said at once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from dynamiccl_ray.config.sweep import load_sweep
from dynamiccl_ray.config.sweep_target import find_target
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.trainers.sweep.run import run_sweep

SHORT: dict[str, Any] = {
    "name": "tracked",
    "of": "p5en-warm",
    "set": {"fabric.processes": {"nodes": 1, "ranks_per_node": 2}, "stop.exploit_rounds_after_last_event": 1},
    "space": {"control.learning.draws": [4]},
    "metric": "lost",
    "concurrent": 1,
}


def _run(directory: Path, **more: Any) -> dict[str, Any]:
    path = directory / "x.yaml"
    path.write_text(yaml.safe_dump({**SHORT, **more}))
    sweep = load_sweep(path)
    (directory / "out").mkdir()
    return run_sweep(sweep, find_target(sweep, path), directory / "out", Console(stderr=True))


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_one_that_is_not_installed_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda of, *more: None if of == name else found(of, *more))
    with pytest.raises(ConfigError, match=rf"{name}: it is not installed; pip install 'dynamiccl-ray\[track\]'"):
        _run(tmp_path, **{name: {}})
    assert not list((tmp_path / "out").iterdir())


def test_that_nobody_is_logged_in_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(api=SimpleNamespace(api_key=None)))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ConfigError, match="wandb: nobody is logged in; run `wandb login`"):
        _run(tmp_path, wandb={})
    assert not list((tmp_path / "out").iterdir())


def test_mlflow_has_settings_and_results_of_every_trial(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install 'dynamiccl-ray[track]'")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    result = _run(tmp_path, mlflow={"uri": uri})
    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("tracked").experiment_id])
    said = {run.data.params["values/control.learning.draws"]: run.data.metrics["lost"] for run in runs}
    expected = {str(trial["params"]["control.learning.draws"]): trial["metric"] for trial in result["trials"]}
    assert said == pytest.approx(expected)
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_wandb_has_a_run_of_every_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install 'dynamiccl-ray[track]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    _run(tmp_path, wandb={"project": "p"})
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 2
