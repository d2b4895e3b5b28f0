"""What a runner takes, as ``benchmarks/runner.py`` measures it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runner
from dynamiccl_ray.config.experiment import Online


def test_cpu_time_and_memory_of_a_process_are_the_kernels() -> None:
    process, before = os.getpid(), time.process_time()
    at = runner.cpu_s(process)
    while time.process_time() < before + 0.3:
        pass
    assert runner.cpu_s(process) - at == pytest.approx(0.3, abs=0.05)
    held = runner.resident_mb(process)
    block = bytearray(os.urandom(64_000_000))
    assert runner.resident_mb(process) - held == pytest.approx(64, abs=16)
    del block


def test_none_or_several_runners_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"ray::Nobody{os.getpid()}"
    monkeypatch.setattr(runner, "_NAME", name.encode())
    with pytest.raises(RuntimeError, match="0 runners"):
        runner.runner()
    asleep = "import time; print(flush=True); time.sleep(60)"
    with (
        subprocess.Popen([name, "-c", asleep], executable=sys.executable, stdout=subprocess.PIPE) as one,
        subprocess.Popen([name, "-c", asleep], executable=sys.executable, stdout=subprocess.PIPE) as other,
    ):
        for process in (one, other):
            assert process.stdout is not None
            process.stdout.readline()
        try:
            with pytest.raises(RuntimeError, match="2 runners"):
                runner.runner()
            other.kill()
            other.wait()
            assert runner.runner() == one.pid
        finally:
            one.kill()
            other.kill()


def test_the_run_is_of_as_many_ranks_as_fast_and_as_long_as_asked() -> None:
    experiment = runner.experiment_of(3, 500.0, 7)
    assert experiment.fabric.kind == "measured"
    assert (experiment.fabric.processes.nodes, experiment.fabric.processes.ranks_per_node) == (1, 3)
    assert experiment.fabric.rate_hz == 500.0
    assert experiment.stop.exploit_rounds_after_last_event == 7


@pytest.mark.parametrize("phases", [[], [{"exploit": 2, "learn": 0}], [{"exploit": 1, "check": 1}] * 3])
def test_a_run_that_hardly_exploits_is_no_measurement(
    phases: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(experiment: Online, directory: Path, *, progress: Callable[[dict[str, Any]], None]) -> None:
        for epoch, keys in enumerate(phases):
            progress({"keys": keys, "epoch": epoch, "collectives": 100 * epoch})

    monkeypatch.setattr(runner, "run_online", run)
    monkeypatch.setattr(runner, "runner", os.getpid)
    with pytest.raises(RuntimeError, match="more --rounds"):
        runner.measured(4, 1000.0, 3)


def test_only_rounds_count_in_which_all_keys_exploit(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(experiment: Online, directory: Path, *, progress: Callable[[dict[str, Any]], None]) -> None:
        for epoch, keys in enumerate([{"exploit": 1, "learn": 1}, {"exploit": 2}, {"exploit": 2}, {"check": 2}]):
            progress({"keys": keys, "epoch": epoch, "collectives": 100 * epoch})
            clock[0] += 2.0

    clock = [0.0]
    monkeypatch.setattr(runner, "run_online", run)
    monkeypatch.setattr(runner, "runner", os.getpid)
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(runner, "cpu_s", lambda _: clock[0] / 4)
    result = runner.measured(4, 1000.0, 3)
    assert (result["seconds"], result["keys"], result["cores"]) == (2.0, 2, 0.25)
    assert (result["epochs_per_s"], result["collectives_per_s"]) == (0.5, 50.0)


def test_records_of_full_rings_are_all_matched() -> None:
    assert runner.records_per_s(2, drains=3) > 0
