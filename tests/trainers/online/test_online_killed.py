"""A driver that is killed: nothing that it started lives on, and what it has written can be read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small import small_experiment

from dynamiccl_ray.plugin_bridge.segments import segments
from dynamiccl_ray.trainers.online.recorder import read_samples

ENDED_S = 60.0


def _started_by(mark: str) -> list[str]:
    """Commands of all processes that inherited a word in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"KILLED_TEST={mark}\0".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "how", [pytest.param(("--serial",), id="serial"), pytest.param((), id="ray", marks=pytest.mark.slow)]
)
def test_a_killed_driver_leaves_no_process_and_readable_files(tmp_path: Path, job: str, how: tuple[str, ...]) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(small_experiment(job, fabric={"rate_hz": 200}, stop={"rounds": 100_000}).model_dump_json())
    out, mark = tmp_path / "run", f"{job}-"
    command = [sys.executable, "-m", "dynamiccl_ray.cli", "online", str(experiment), "--out", str(out), *how]
    env = os.environ | {"KILLED_TEST": mark}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        deadline = time.monotonic() + 120
        while not list((out / "samples.parquet").glob("part-*.parquet")):
            assert driver.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(_started_by(mark)) > 4
        (stopped, *_) = (int(path.name.split("-")[-2]) for path in segments(job))
        os.kill(stopped, signal.SIGSTOP)
        driver.kill()
    deadline = time.monotonic() + ENDED_S
    while left := _started_by(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert len(read_samples(out)["time_us"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("runners", [0, 1], ids=["before its runners are there", "while they come up"])
def test_a_run_that_is_told_to_end_while_ray_starts_ends_with_130(tmp_path: Path, job: str, runners: int) -> None:
    """Ray has handlers of its own, one of which aborts."""
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(small_experiment(job, stop={"rounds": 100_000}).model_dump_json())
    mark = f"{job}-"
    command = [sys.executable, "-m", "dynamiccl_ray.cli", "online", str(experiment), "--out", str(tmp_path / "run")]
    env = os.environ | {"KILLED_TEST": mark}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        deadline, wanted = time.monotonic() + 120, "RankRunner" if runners else "raylet"
        while not any(wanted in command for command in _started_by(mark)):
            assert driver.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(60) == 130
