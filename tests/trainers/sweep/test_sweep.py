"""A sweep on Ray Tune, from its YAML to its page; killed, and gone on with."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.config.experiment import load
from dynamiccl_ray.config.sweep import load_sweep
from dynamiccl_ray.config.sweep_target import default_values, find_target
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.plugin_bridge.segments import segments
from dynamiccl_ray.report.sweep import write_sweep_report
from dynamiccl_ray.trainers.sweep.results import write_files
from dynamiccl_ray.trainers.sweep.run import run_sweep

ROOT = Path(__file__).parents[3]
PLAYED: dict[str, Any] = {
    "name": "played",
    "of": "p5en-warm",
    "set": {
        "fabric.processes": {"nodes": 1, "ranks_per_node": 2},
        "stop.exploit_rounds_after_last_event": 1,
        "stop.rounds": 6,
    },
    # The last is more than there are rounds for.
    "space": {"control.learning.draws": [4, 20, 250], "control.learning.compares": [4]},
    "metric": "lost",
    "seeds": [0, 1],
    "concurrent": 1,
}
STAGE = {"places": [{"cluster": "rtx4090-pcie", "nodes": [1, 2]}], "least_rounds": 6, "most_rounds": 6, "promote": 1.0}
TAUGHT: dict[str, Any] = {
    "name": "taught",
    "of": "default",
    "set": {
        "stages": [{"name": "only", **STAGE}],
        "held_out": [{"cluster": "l40s-pcie", "nodes": [1]}],
        "streams": {"pool": 6, "scenarios": 4, "keys": 4},
        "control.learning.draws": 8,
        "control.learning.sequence": 4,
        "validation": {"scenarios": 2, "collectives": 8, "every_rounds": 1},
        **{f"ppo.{k}": v for k, v in {"hidden": 16, "experts": 2, "minibatches": 2, "epochs": 1, "rounds": 8}.items()},
    },
    "space": {"reward.sm": {"choice": [0.0, 0.5]}, "control.guardrail.margin": {"uniform": [0.01, 0.1]}},
    "metric": "held_out_regret",
    "samples": 3,
    "sampler": "random",
    "concurrent": 1,
}


def _run(directory: Path, document: dict[str, Any]) -> dict[str, Any]:
    path = directory / "x.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    sweep = load_sweep(path)
    target = find_target(sweep, path)
    out = directory / "out"
    out.mkdir(exist_ok=True)
    result = run_sweep(sweep, target, out, Console(stderr=True))
    write_files(sweep, target, result, out)
    write_sweep_report(result, "dynamiccl sweep x.yaml", out)
    return result


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("played")
    return directory / "out", _run(directory, PLAYED)


def test_every_trial_of_a_sweep_of_played_jobs_has_its_score(played: tuple[Path, dict[str, Any]]) -> None:
    out, result = played
    trials = result["trials"][:3]
    assert [trial["status"] for trial in trials] == ["done"] * 3
    assert [trial["params"]["control.learning.draws"] for trial in result["trials"]] == [64, 4, 20, 250]
    assert [len(list(out.glob("trials/*-seed-*/score.json")))] == [6]
    for trial in trials:
        # 35 sizes: what is lost of each is the mean over its collectives.
        assert trial["metric"] == pytest.approx(_collectives(trial) / 35 * trial["metrics"]["regret"], rel=0.1)
        assert 0 < trial["metrics"]["regret"] < 0.2
        assert trial["metrics"]["gain"] > 0.05
        assert len(trial["curve"]) > 10
    best = min(trials, key=lambda trial: trial["metric"])
    assert result["best"]["id"] == best["id"]
    assert result["compared"]["seeds"] == 2
    assert not [path for path in segments() if "sweep" in path.name], "a rank process outlived its trial"


def _collectives(trial: dict[str, Any]) -> float:
    """Of a run, as a mean over its seeds."""
    return float(trial["metrics"]["collectives"])


def test_a_trial_that_fails_says_why_and_ends_nothing_else(played: tuple[Path, dict[str, Any]]) -> None:
    failed = played[1]["trials"][3]
    assert failed["status"] == "failed"
    assert "the run ended while it still learned" in failed["failure"]


def test_the_results_are_written_as_a_table_a_page_and_an_experiment(played: tuple[Path, dict[str, Any]]) -> None:
    out, result = played
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    lost = [float(row["lost"]) if row["lost"] else None for row in rows]
    assert lost == [trial["metric"] for trial in result["trials"]]
    assert json.loads((out / "results.json").read_text()) == result
    best = load(out / "best.yaml")
    assert best.control.learning.draws == result["best"]["params"]["control.learning.draws"]
    assert best.job == "p5en-warm"
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page.replace("http-equiv", "")


def test_a_sweep_that_is_done_runs_nothing_again_and_its_directory_takes_no_other(
    played: tuple[Path, dict[str, Any]],
) -> None:
    out, _ = played
    with pytest.raises(ConfigError, match="it holds another sweep"):
        _run(out.parent, {**PLAYED, "seeds": [3]})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_sweep_goes_on_and_repeats_no_trial_that_was_done(tmp_path: Path) -> None:
    path, out = tmp_path / "x.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump({**PLAYED, "space": {**PLAYED["space"], "control.learning.draws": [4, 12, 20]}}))
    command = [sys.executable, "-m", "dynamiccl_ray", "sweep", str(path), "--json"]
    with (tmp_path / "first").open("w") as err:
        first = subprocess.Popen(
            [*command, "--out", str(out)], stderr=err, stdout=err, start_new_session=True, cwd=ROOT
        )
        try:
            while (tmp_path / "first").read_text().count("is over") < 2:
                assert first.poll() is None, (tmp_path / "first").read_text()
                time.sleep(0.1)
            # In the middle of the third.
            time.sleep(1)
        finally:
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
    done = {score: score.stat().st_mtime_ns for score in out.glob("trials/*/score.json")}
    assert 4 <= len(done) < 8
    again = subprocess.run([*command, "--resume", str(out)], capture_output=True, text=True, cwd=ROOT)
    assert again.returncode == 0, again.stderr
    result = json.loads(again.stdout)
    assert [trial["status"] for trial in result["trials"]] == ["done"] * 4
    # Tune puts first what it has to run again.
    assert [trial["params"]["control.learning.draws"] for trial in result["trials"]] == [64, 4, 12, 20]
    assert {score: score.stat().st_mtime_ns for score in done} == done
    assert {*re.findall(r"trial (\d) starts", again.stderr)} == {"2", "3"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "change",
    [
        # The default draws too long for so short a job, and then one about as long as is worth it.
        {
            "scheduler": {"kind": "asha", "grace": 1, "reduction": 2},
            "sampler": "grid",
            "samples": None,
            "set": {
                **{name: of for name, of in TAUGHT["set"].items() if name != "control.learning.draws"},
                "validation": {"scenarios": 2, "collectives": 100, "every_rounds": 1},
            },
            "space": {"control.learning.draws": [48, 4, 64]},
        },
        {"scheduler": {"kind": "pbt", "every": 1, "quantile": 0.5}, "space": {"ppo.lr": {"loguniform": [1e-4, 1e-1]}}},
        {"sampler": "optuna", "confirm": 2, "seeds": [0, 1]},
    ],
    ids=["asha", "pbt", "optuna"],
)
def test_sweeps_of_curricula_end_under_every_scheduler_and_sampler(tmp_path: Path, change: dict[str, Any]) -> None:
    result = _run(tmp_path, {k: v for k, v in {**TAUGHT, **change}.items() if v is not None})
    trials = result["trials"]
    assert len(trials) == 4
    assert {trial["status"] for trial in trials} <= {"done", "stopped"}
    assert all(trial["metric"] > 0 for trial in trials)
    done = [trial for trial in trials if trial["status"] == "done"]
    # The last of six validations; one that goes on from another may have left some out.
    assert all(trial["curve"][-1][0] == 6 for trial in done)
    kind = change.get("scheduler", {}).get("kind")
    if kind == "asha":
        assert any(trial["status"] == "stopped" for trial in trials)
    if kind == "pbt":
        assert len(done) == 4
        sweep = load_sweep(tmp_path / "x.yaml")
        began = sweep.planned(default_values(sweep, find_target(sweep, tmp_path / "x.yaml")))
        changed = {t["params"]["ppo.lr"] for t in trials} - {values["ppo.lr"] for values in began}
        assert changed, "some go on from another with a changed rate, although one has room at a time"
        assert 1e-4 <= min(t["params"]["ppo.lr"] for t in trials) <= max(t["params"]["ppo.lr"] for t in trials) <= 1e-1
    if change.get("sampler") == "optuna":
        assert result["best"]["id"] == 0 or result["confirmed"]["seeds"] == 2
    load_curriculum(tmp_path / "out" / "best.yaml")
