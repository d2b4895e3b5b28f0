"""Bad input ends with one clear line; everything scripts rely on is JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.table import Table
from typer.testing import CliRunner

from dynamiccl_ray.cli.app import app
from dynamiccl_ray.cli.online import _verdict
from dynamiccl_ray.cli.output import directory_for, stdout
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.keys import key_name
from dynamiccl_ray.static.blocks import entry_text, read_blocks

ROOT = Path(__file__).parents[1]


def _run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dynamiccl_ray.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **env},
    )


def _here(*arguments: str) -> str:
    """What a command prints, without a process of its own."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def _yaml(path: Path, **changes: Any) -> Path:
    raw: dict[str, Any] = {
        "name": "x",
        "job": "cli_test",
        "fabric": {"kind": "measured", "processes": {"nodes": 1, "ranks_per_node": 2}},
        "stop": {"rounds": 2},
    }
    path.write_text(json.dumps(raw | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"epochs": {"colectives": 3}}, "unknown key 'epochs.colectives'"),
        ({"seed": -1}, "seed = -1"),
        ({"fabric": {"kind": "measured", "files": ["/nowhere/a.csv"]}}, "/nowhere/a.csv"),
        ({"fabric": {"kind": "measured", "nodes": 3}}, "nodes"),
        ({"fabric": {"kind": "measured", "processes": {"nodes": 9}}}, "9 nodes x 4 ranks do not fit"),
        ({"fabric": {"kind": "real"}}, "'measured', 'emulated', 'real_nccl', 'nccl'"),
        ({"stop": {}}, "a played job runs for ever"),
        ({"actions": {"channels": [0, 3]}}, "[3] not among"),
        ({"actions": {"channels": [8]}}, "0 (NCCL's own) must stay possible"),
        ({"mode": "fast"}, "mode = 'fast'"),
    ],
)
def test_a_bad_experiment_says_what_is_wrong(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    words = ["online", str(_yaml(tmp_path / "x.yaml", **changes)), "--serial", "--out", str(tmp_path / "run")]
    with pytest.raises(ConfigError) as said:
        _here(*words)
    assert says in str(said.value)
    assert "\n" not in str(said.value)


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    done = _run("online", str(_yaml(tmp_path / "x.yaml", seed=-1)), "--serial", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if "Warning" not in line and line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert "seed = -1" in lines[0]


@pytest.mark.parametrize("text", ["- a\n- b\n", "name: [", ""])
def test_what_is_no_experiment_is_said_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        _here("online", str(path))
    with pytest.raises(ConfigError, match="cannot read the experiment"):
        _here("online", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("command", [("online", "online/p5en-16nodes.yaml"), ("train", "curricula/default.yaml")])
def test_a_term_that_is_not_there_cannot_be_left_out(tmp_path: Path, command: tuple[str, str]) -> None:
    path = str(ROOT / "experiments" / command[1])
    says = "--without speed: the reward has no such term; give one of iteration, switch,"
    with pytest.raises(ConfigError, match=says):
        _here(command[0], path, "--without", "sm", "--without", "speed", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_serial_run_reports_explains_and_speaks_json(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = _run("online", str(_yaml(tmp_path / "x.yaml", stop={"rounds": 6})), "--serial", "--json", "--out", str(run),
                "--without", "probe", "--without", "sm")  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["reward"]["off"] == ["switch", "probe", "sm"], "switch is off by default"
    assert summary["reward"]["terms"]["learn"].keys() == {"primary", "congestion", "tier"}
    assert {"keys", "geomean_vs_oracle", "gap_closed", "epochs", "collectives", "detection_delay", "switches",
            "agreement_violations", "dropped_records"} <= summary.keys()  # fmt: skip
    assert Path(summary["report"]).exists()
    explained = json.loads(_here("explain", str(run), "--json"))
    keys = explained["communicators"][0]["keys"]
    assert len(keys) == 35
    assert all(k["measured"] for k in keys)
    assert "in force" in _here("explain", str(run), "--key", "16KiB")
    with pytest.raises(ConfigError):
        _here("explain", str(tmp_path))
    _exports(run, tmp_path, {k["key"]: k["in_force"] for k in keys})


def _exports(run: Path, tmp_path: Path, in_force: dict[str, str]) -> None:
    table = tmp_path / "table"
    (about,) = json.loads(_here("export", str(run), "--all", "--out", str(table), "--json"))["communicators"]
    (block,) = read_blocks(table)
    assert (block.ranks, block.nodes, block.name, block.digest) == (64, 8, "world", about["digest"])
    said = {key_name(key): entry_text(block.entries[key]) for key in np.flatnonzero(block.entries["set"]).tolist()}
    assert said == {key: action for key, action in in_force.items() if action != "nccl"}
    assert said


def test_ctrl_c_while_the_report_is_written_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(directory: Path) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return directory / "report.html"

    monkeypatch.setattr("dynamiccl_ray.trainers.online.run.run_online", lambda *_, **__: {"rounds": 2})
    monkeypatch.setattr("dynamiccl_ray.report.page.write_report", written)
    out = tmp_path / "run"
    said = json.loads(_here("online", str(_yaml(tmp_path / "x.yaml")), "--serial", "--json", "--out", str(out)))
    assert said == {"rounds": 2, "report": str(out / "report.html")}


def test_plugin_path_and_env_name_what_is_there() -> None:
    path = json.loads(_here("plugin", "path", "--json"))["path"]
    assert Path(path).exists()
    lines = _here("plugin", "env", "--job", "j1").splitlines()
    assert lines == [
        f"export NCCL_TUNER_PLUGIN={path}",
        f"export NCCL_PROFILER_PLUGIN={path}",
        "export DYNAMICCL_JOB_ID=j1",
    ]


def _checks(**env: str) -> dict[str, dict[str, Any]]:
    """What the doctor finds, by name."""
    return {of["name"]: of for of in json.loads(_run("doctor", "--json", **env).stdout)["checks"]}


def test_doctor_finds_what_is_wrong_and_names_the_fix(tmp_path: Path) -> None:
    (tmp_path / "dynamiccl-old-1-0").write_bytes(b"\0" * 10)
    half = {"NCCL_TUNER_PLUGIN": "dynamiccl", "NCCL_PROFILER_PLUGIN": ""}
    found = _checks(NCCL_ALGO="Ring", DYNAMICCL_SHM_DIR=str(tmp_path), **half)
    assert found["plugin"]["status"] == "ok"
    assert found["NCCL_ALGO"]["status"] == "warn"
    assert "unset NCCL_ALGO" in found["NCCL_ALGO"]["fix"]
    assert found["variables"]["status"] == "fail"
    assert "plugin env" in found["variables"]["fix"]
    assert "not a channel" in found["segments"]["found"]
    gone = _checks(DYNAMICCL_SHM_DIR=str(tmp_path / "none"))["shared memory"]
    assert gone["status"] == "fail"
    nothing = _run("doctor", DYNAMICCL_NATIVE_DIR=str(tmp_path))
    assert nothing.returncode == 1
    assert "make native" in nothing.stdout


def test_fabric_belief_writes_what_nccl_would_say(tmp_path: Path) -> None:
    data = ROOT / "tests" / "data" / "nccl_cost_model"
    _here("fabric", "belief", "--cases", str(data / "cases.csv"), "--out", str(tmp_path), "--json")
    for name in ("latbw.csv", "choice.csv"):
        assert (tmp_path / name).read_text() == (data / name).read_text()
    with pytest.raises((ConfigError, OSError), match=r"/nowhere\.csv"):
        _here("fabric", "belief", "--cases", "/nowhere.csv", "--out", str(tmp_path))


def test_bench_channel_loses_nothing() -> None:
    result = json.loads(_run("bench", "channel", "--json").stdout)
    assert result["lost"] == 0
    assert {"write_per_s", "drain_per_s", "hardware"} <= result.keys()


@pytest.mark.parametrize("mode", [[], ["--in-band"]])
def test_bench_plugin_measures_the_real_plugin(mode: list[str]) -> None:
    result = json.loads(_run("bench", "plugin", "--json", *mode).stdout)
    assert result["mode"] == ("in band" if mode else "coordinator")
    assert {"get_coll_info_ns", "empty_call_ns", "profiler_path_ns"} <= result.keys()
    assert result["get_coll_info_ns"]["block"] > result["empty_call_ns"]["block"] > 0


@pytest.mark.parametrize(
    "waits", ["threading.Thread(target=time.sleep, args=(60,)).start()", "atexit.register(time.sleep, 60)"]
)
def test_a_command_ends_even_if_a_library_does_not(waits: str) -> None:
    code = f"""
import atexit, sys, threading, time
from dynamiccl_ray.cli.app import leave_in_time
{waits}
leave_in_time(7, limit_s=0.2)
sys.exit(7)
"""
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
    assert time.monotonic() - began < 30


def test_what_looks_like_markup_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    name = "tp[/red] [bold]0 :x:"
    table = Table("name", title=name)
    table.add_row(name)
    summary = {"geomean_vs_oracle": None, "after": [], "false_alarms": None, "agreement_violations": None}
    for each in (name, table, *_verdict({**summary, "off": {"7": name}})):
        stdout().print(each)
    assert capsys.readouterr().out.count(name) == 4


def test_runs_of_one_name_that_begin_together_have_a_directory_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: directory_for(None, "run"), range(24)))
    assert len(set(made)) == 24
    assert all(of.is_dir() and of.name.startswith("run-") for of in made)
    assert directory_for(made[0], "run") == made[0], "one that is named may be there"
