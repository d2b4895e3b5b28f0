"""The examples, unchanged, on CPUs beside emulated ranks: tables come into force between their steps, on all ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamiccl_ray.actions import Action
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import ChannelError
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Algorithm, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.nccl_job import agreement_violations, read_log
from dynamiccl_ray.plugin_bridge.played import plugin_env
from dynamiccl_ray.plugin_bridge.segments import remove_stale, segments

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SIZES = (64 << 10, 1 << 20, 16 << 20)
PAIRS = [pair_index(algorithm, Protocol.SIMPLE) for algorithm in (Algorithm.TREE, Algorithm.RING)]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@contextlib.contextmanager
def running(job: str, directory: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    env = os.environ | plugin_env(job)
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "EMULATED_DIRECTORY": str(directory)}
    with subprocess.Popen(words, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as of:
        try:
            yield of
        finally:
            of.terminate()


def log_of(directory: Path, ranks: int) -> np.ndarray[Any, Any]:
    log = np.concatenate([read_log(directory / f"log.{rank}") for rank in range(ranks)])
    assert len(log)
    return log


def switches_between_steps(log: np.ndarray[Any, Any]) -> int:
    """How often a size changed its configuration. Every step calls each size twice: asserts that a step has one
    configuration for it, the same on all ranks."""
    assert agreement_violations(log) == 0
    switches = 0
    used = ["algo", "proto", "channels", "own"]
    for comm, nbytes in np.unique(log[["comm", "bytes"]]):
        of = log[(log["comm"] == comm) & (log["bytes"] == nbytes)]
        of = of[np.argsort(of["step"], kind="stable")]
        same_step, changed = of["step"][1:] == of["step"][:-1], of[used][1:] != of[used][:-1]
        assert not (same_step & changed).any(), "a table changed inside a step"
        switches += int(changed.sum())
    return switches


def stage_while(process: subprocess.Popen[str], job: str) -> None:
    """A control plane that is nothing but staging, one table after another on all ranks, until the example ends."""
    channels: dict[Path, Channel] = {}
    version = 0
    while True:
        for path in segments(job):
            if path not in channels:
                with contextlib.suppress(ChannelError):
                    channels[path] = Channel(path)
        version += 1
        pair = PAIRS[version % 2]
        table = DecisionTable.of(
            version, {key_of(4, nbytes, False): Action(pair=pair, channels=0) for nbytes in SIZES}, max_channels=16
        )
        for channel in channels.values():
            if channel.alive:
                channel.stage(table)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            break
    for channel in channels.values():
        channel.close()


@pytest.mark.timeout(180)
def test_a_run_beside_ddp_puts_tables_in_force_between_its_steps(tmp_path: Path, job: str) -> None:
    """The commands of examples/README.md, with less to learn."""
    quick = {"baseline_samples": 2, "draws": 4, "draw_samples": 1, "compares": 2, "compare_samples": 2}
    # Until it has learned: on a busy machine the script may not have taken a step for many rounds.
    settings = {"job": job, "stop.exploit_rounds_after_last_event": 1, "control.learning": json.dumps(quick)}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    with running(job, tmp_path / "job", *TORCHRUN, "2", "examples/emulated.py", "examples/ddp.py", "--steps=1000000"):
        done = subprocess.run(
            [sys.executable, "-m", "dynamiccl_ray", "online", "in-band", "--serial", "--json",
             "--out", str(tmp_path / "run"), *words],
            cwd=ROOT, capture_output=True, text=True, timeout=150,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["switches"] >= 4
    assert len(summary["keys"]) == len(SIZES)
    log = log_of(tmp_path / "job", 2)
    assert switches_between_steps(log) > 0
    assert (log["own"] == 0).any(), "never tuned"
    remove_stale(job)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "communicators", "words"),
    [
        pytest.param(2, 1, ("examples/fsdp.py",), id="fsdp"),
        pytest.param(4, 5, ("examples/tensor_data_groups.py", "--tensor=2"), id="tensor_data_groups"),
        pytest.param(2, 1, ("examples/lightning_callback.py",), id="lightning"),
        pytest.param(2, 1, ("examples/ray_train.py",), id="ray_train"),
    ],
)
def test_tables_come_into_force_between_steps(
    tmp_path: Path, job: str, ranks: int, communicators: int, words: tuple[str, ...]
) -> None:
    if "lightning" in words[0] and importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    start = (sys.executable,) if "ray" in words[0] else (*TORCHRUN, str(ranks))
    directory = tmp_path / "job"
    with running(job, directory, *start, "examples/emulated.py", *words, "--steps=120") as process:
        stage_while(process, job)
        assert process.stdout is not None
        said = process.stdout.read()
    assert process.returncode == 0, said
    log = log_of(directory, ranks)
    assert len(np.unique(log["comm"])) == communicators
    assert len(np.unique(log["step"])) == 120
    assert switches_between_steps(log) > 2 * len(SIZES) * communicators
    remove_stale(job)  # Ray kills its workers


def test_without_lightning_its_example_says_what_is_missing() -> None:
    code = "import sys, runpy; sys.modules['lightning'] = None; runpy.run_path('examples/lightning_callback.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == "this example needs Lightning: pip install lightning"


def test_the_launcher_says_what_is_missing() -> None:
    env = {name: value for name, value in os.environ.items() if name != "DYNAMICCL_JOB_ID"}
    done = subprocess.run(
        [sys.executable, "examples/emulated.py", "examples/ddp.py"], cwd=ROOT, capture_output=True, text=True,
        env=env | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("DYNAMICCL_JOB_ID is not set; run: eval")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_begins_with_its_commands(path: Path) -> None:
    text = path.read_text()
    if path.stem != "emulated":
        assert text.count("\n") < 80
        assert 'eval "$(dynamiccl plugin env --job' in text
    assert f"examples/{path.name}" in text
