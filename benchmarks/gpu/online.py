"""The loop of this project beside a job of ours: `dynamiccl online` on an experiment that is written for it."""

from __future__ import annotations

import fcntl
import json
import math
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.gpu.context import checkout_environment, dynamiccl
from benchmarks.gpu.machine import ROOT
from dynamiccl_ray.config.control import Learning
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.knobs import CHANNEL_VALUES
from dynamiccl_ray.plugin_bridge.segments import segments

DRAWN_SHARE: Final = 0.4
"""Of a key's collectives, those of drawn decisions; as many compare what contends, and the rest exploits the best."""
EXPLOIT_ROUNDS: Final = 3
"""Of exploitation before the loop ends: what is in force then is what it chose."""
START_S: Final = 180.0
END_S: Final = 120.0


def learning(per_key: int) -> dict[str, int]:
    """The loop's own settings, or fewer decisions where they do not fit into ``per_key`` collectives."""
    usual = Learning()
    left = per_key - usual.baseline_samples
    share = int(left * DRAWN_SHARE)
    compares = max(1, min(usual.compares, share // usual.compare_samples))
    draws = max(1, min(usual.draws, min(share, left - compares * usual.compare_samples) // usual.draw_samples))
    return {"draws": draws, "compares": compares}


def experiment(
    *,
    job: str,
    per_key: int,
    seed: int,
    fabric: dict[str, Any],
    most_channels: int,
    ranks: int,
) -> dict[str, Any]:
    """The experiment, from the shipped policy. ``most_channels`` is what the communicator was seen to use."""
    return {
        "name": "gpu-benchmark",
        "seed": seed,
        "mode": "active",
        "job": job,
        "fabric": {"kind": "nccl", **fabric},
        "policy": "default",
        "actions": {"channels": [count for count in CHANNEL_VALUES if count <= most_channels]},
        "control": {"learning": learning(per_key)},
        "stop": {"exploit_rounds_after_last_event": EXPLOIT_ROUNDS},
    }


class Loop:
    """`dynamiccl online` while it runs."""

    def __init__(self, described: dict[str, Any], directory: Path, *, serial: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._said = directory / "online.json"
        self._complained = directory / "online.log"
        path = directory / "experiment.yaml"
        path.write_text(yaml.safe_dump(described, sort_keys=False))
        # The GPU belongs to the job; and the Ray that is started here is nobody else's.
        env = {**checkout_environment(), "CUDA_VISIBLE_DEVICES": "", "RAY_AUTH_MODE": "disabled"}
        arguments = ["online", str(path), "--out", str(directory / "run"), "--json"]
        with self._said.open("wb") as said, self._complained.open("wb") as complained:
            self._popen = subprocess.Popen(
                dynamiccl(*arguments, *(["--serial"] if serial else [])),
                env=env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=complained,
            )

    def feed(self, more: Callable[[], int], *, job: str, most_s: float) -> int:
        """Runs ``more`` collectives until the loop is over; after ``most_s`` it is told to end. Returns how many ran.

        The job stands still until the loop has taken its ranks.
        """
        ran, told_at = 0, math.inf
        try:
            self._await_claim(job)
            began = time.monotonic()
            while self._popen.poll() is None:
                ran += more()
                if time.monotonic() > began + most_s and told_at == math.inf:
                    self._popen.send_signal(signal.SIGINT)
                    told_at = time.monotonic()
                if time.monotonic() > told_at + END_S:
                    raise RunError(f"the loop did not end within {END_S:g} s of being told to, after {ran} collectives")
        except BaseException:
            self.kill()
            raise
        return ran

    def _await_claim(self, job: str) -> None:
        deadline = time.monotonic() + START_S
        while self._popen.poll() is None:
            if all(_claimed(path) for path in segments(job)):
                return
            if time.monotonic() > deadline:
                raise RunError(f"the loop has not taken all ranks of job {job} within {START_S:g} s")
            time.sleep(0.1)

    def kill(self) -> None:
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(END_S)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()

    def summary(self) -> dict[str, Any]:
        """What the command printed. Raises RunError with what it complained about if it failed."""
        code = self._popen.wait(END_S)
        text = self._said.read_text()
        if code == 0 and "{" in text:
            found: dict[str, Any] = json.loads(text[text.index("{") :])
            return found
        raise RunError(
            f"dynamiccl online ended with {code}: {self._complained.read_text(errors='replace')[-2000:].strip()}"
        )


def _claimed(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def essence(summary: dict[str, Any]) -> dict[str, Any]:
    """Of the summary what the report keeps."""
    names = ("epochs", "collectives", "switches", "dropped_records", "unused_records", "digest_mismatches", "off")
    history = summary.get("history") or [{}]
    return {
        **{name: summary[name] for name in names if name in summary},
        "phase_at_the_end": history[-1].get("phase"),
        "rounds": summary.get("rounds"),
        "seconds": summary.get("seconds"),
    }
