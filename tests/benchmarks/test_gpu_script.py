"""The script where it cannot run: on a machine without a GPU it says so in one line, and plans all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_context import FACTS

from benchmarks.gpu import machine
from benchmarks.gpu.machine import gpu_links, gpu_settings, version_of, why_not
from benchmarks.gpu.options import parse, ranks_for
from dynamiccl_ray.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "run.py"


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # Whatever this machine has: no GPU is visible.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_without_a_gpu_it_skips_in_one_line(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "out"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("skipped: ")
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_the_json_says_why(tmp_path: Path) -> None:
    done = run("--json", "--only", "check", "--ranks", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert list(said) == ["skipped"]
    assert any(word in said["skipped"] for word in ("GPU", "NCCL"))
    assert "\n" not in said["skipped"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"torch": None}, "PyTorch cannot be imported here: install a CUDA build"),
        ({"torch": None, "error": "No module named 'torch'"}, r"here \(No module named 'torch'\)"),
        ({"nccl_backend": False}, r"PyTorch 2.13.0\+cu130 was built without NCCL"),
        ({"gpus": []}, r"no CUDA GPU: PyTorch 2.13.0\+cu130 sees none$"),
        ({"gpus": [], "error": "driver too old"}, r"sees none \(driver too old\)"),
        ({"nccl": [2, 26, 5]}, "NCCL 2.26.5 has no GPU timers: 2.27 or later"),
        ({"nccl": None}, "of an unknown version"),
        ({"compute_mode": "Exclusive_Process"}, "compute mode is Exclusive_Process"),
    ],
)
def test_why_nothing_can_be_measured(changed: dict[str, Any], why: str) -> None:
    said = why_not({**FACTS, **changed})
    assert said is not None
    assert "\n" not in said
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(said)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"nccl": [2, 27, 3]},
        {"compute_mode": "Exclusive_Process", "mps": True},
        {"compute_mode": "Exclusive_Process", "gpus": FACTS["gpus"] * 2},
        {"compute_mode": None, "driver": None},
    ],
)
def test_what_is_enough(changed: dict[str, Any]) -> None:
    assert why_not({**FACTS, **changed}) is None


def test_a_probe_that_dies_is_a_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    died = subprocess.CompletedProcess([], -11, stdout="", stderr="ImportError: libcudart.so.13: no such file")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: died)
    why = why_not(machine.ask())
    assert why is not None
    assert "libcudart" in why


def test_versions() -> None:
    assert [version_of(code) for code in (2708, 21005, 22907, 23007)] == [(2, 7, 8), (2, 10, 5), (2, 29, 7), (2, 30, 7)]
    assert machine.loaded_nccl("7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libcuda.so.1\n") is None


def test_what_nvidia_smi_says() -> None:
    assert gpu_settings("580.95.05, Default\n580.95.05, Default\n") == ("580.95.05", "Default")
    assert gpu_settings("") == (None, None)
    assert gpu_settings("NVIDIA-SMI has failed") == (None, None)
    head = "\x1b[4m\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    assert gpu_links(head + "GPU0\t X \tNV18\t0-47\t0\nGPU1\tNV18\t X \t0-47\t0\n\nLegend:\n") == "nvlink"
    assert gpu_links(head + "GPU0\t X \tSYS\t0-47\t0\nGPU1\tSYS\t X \t0-47\t0\n") == "pcie"
    assert gpu_links("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == "none"
    assert gpu_links("") == "none"


@pytest.mark.parametrize("arguments", [[], ["--quick"], ["--ranks", "8", "--only", "check,graphs"]])
def test_the_plan_needs_no_gpu(arguments: list[str]) -> None:
    done = run("--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    assert "tables" in done.stdout
    assert ("measure" in done.stdout) == ("--only" not in arguments)
    assert json.loads(run("--dry-run", "--json", *arguments).stdout)["plan"] == done.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "check,speed"], "--only: speed unknown; valid are check, measure"),
        (["--runs", "0"], "--runs is 0; at least 1"),
        (["--timeout-s", "0"], "--timeout-s is 0"),
        (["--dry-run", "--ranks", "9"], "--ranks is 9; 2 to 8 are valid"),
        (["--dry-run", "--ranks", "1"], "--ranks is 1; 2 to 8"),
    ],
)
def test_what_cannot_be_run_as_asked(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_follow_from_the_gpus() -> None:
    assert [ranks_for(None, gpus) for gpus in (1, 2, 4, 8, 16)] == [3, 2, 4, 8, 8]
    assert ranks_for(8, 1) == 8
    assert ranks_for(2, 8) == 2
    with pytest.raises(ConfigError, match=r"6 and there are 4 GPUs.*CUDA_VISIBLE_DEVICES"):
        ranks_for(6, 4)


def test_quick_runs_are_few() -> None:
    assert parse(["--quick"]).runs == 2
    assert parse(["--only", "graphs,check"]).sections == ("check", "graphs"), "in the order in which they run"
