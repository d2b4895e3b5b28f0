"""The control planes, one after the other: what a person or a scheduler would start, and what they are made of."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

MARK = "DYNAMICCL_SOAK"
_TITLES = {
    "ray::RankRunner": "runner",
    "ray::CoordinatorActor": "coordinator",
    "raylet/raylet": "raylet",
    "gcs_server": "gcs",
    "actors/watchdog.py": "watchdog",
}


def experiment(job: str, seed: int) -> dict[str, object]:
    """Every epoch takes a decision for every key, and hardly any is twice the same."""
    return {
        "name": "soak",
        "job": job,
        "seed": seed,
        "fabric": {"kind": "nccl", "intra": "pcie", "inter": "tcp"},
        "actions": {"channels": [0, 1, 2, 4]},
        "control": {
            "learning": {"baseline_samples": 2, "draws": 100_000, "draw_samples": 1},
            "explore": {"max_regret": 1},
        },
        "epochs": {"per_round": 16, "most_s": 5.0},
        "ppo": {"epochs": 1},
        "ray": {"runners_per_node": 2},
    }


def started_with(mark: str) -> dict[int, str]:
    """Commands of all living processes that inherited a word in their environment, by process id."""
    found = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(process.name)
            if f"{MARK}={mark}\0".encode() not in (process / "environ").read_bytes():
                continue
            if (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found[pid] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


class Planes:
    """At most one driver at a time; ``parts`` also finds what earlier ones left."""

    def __init__(
        self,
        directory: Path,
        job: str,
        seed: int,
        *,
        serial: bool,
        settings: Callable[[str, int], dict[str, object]] = experiment,
    ) -> None:
        self._directory, self._job, self._seed, self._serial = directory, job, seed, serial
        self._settings = settings
        self._driver: subprocess.Popen[bytes] | None = None
        self.runs: list[Path] = []
        self.resumed = 0

    def start(self, *, resume: bool) -> None:
        """The next one, from the newest checkpoint there is if asked."""
        number = len(self.runs)
        path, out = self._directory / f"experiment{number}.yaml", self._directory / f"run{number}"
        path.write_text(yaml.safe_dump(self._settings(self._job, self._seed + number)))
        left = [run for run in self.runs if (run / "checkpoint.pt").is_file()]
        options = ["--resume", str(left[-1])] if resume and left else []
        self.resumed += bool(options)
        if self._serial:
            options.append("--serial")
        with (self._directory / f"run{number}.txt").open("wb") as said:
            # By default Ray gives its actors the least priority, and beside so many ranks on few cores they starve.
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "dynamiccl_ray.cli", "online", str(path), "--out", str(out), *options],
                env=os.environ | {MARK: self._job, "RAY_worker_niceness": "0"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self.runs.append(out)

    @property
    def up(self) -> bool:
        return self._driver is not None and self._driver.poll() is None

    def parts(self) -> dict[str, list[int]]:
        """Process ids by what they are."""
        found: dict[str, list[int]] = {}
        for pid, command in started_with(self._job).items():
            title = next((part for title, part in _TITLES.items() if title in command), "other")
            if self._driver is not None and pid == self._driver.pid:
                title = "driver"
            found.setdefault(title, []).append(pid)
        return found

    def last_words(self) -> str:
        """What the newest driver said in the end."""
        return (self._directory / f"run{len(self.runs) - 1}.txt").read_text(errors="replace")[-500:]

    def kill(self) -> None:
        """All of it, and what earlier ones left, until nothing is there any more."""
        deadline = time.monotonic() + 30
        while (left := started_with(self._job)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if self._driver is not None:
                self._driver.poll()
            time.sleep(0.02)

    def end(self, limit_s: float) -> int | None:
        """Tells the driver to end; its exit code, None where it did not."""
        assert self._driver is not None
        self._driver.terminate()
        try:
            return self._driver.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def left(self, limit_s: float) -> list[str]:
        """Processes that are still there after a while."""
        deadline = time.monotonic() + limit_s
        while (left := started_with(self._job)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return list(left.values())
