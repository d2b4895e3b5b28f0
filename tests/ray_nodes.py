"""A Ray cluster of several nodes on one machine, each with segments of its own, and jobs that are submitted to it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_UP_S = 90.0


class RayNodes:
    """A head without slots and ``nodes`` raylets with one each; a context manager.

    What a node is to tell apart by is the directory of its segments: ``env_of`` has it for the ranks that are said to
    run there. The cluster asks for a token.
    """

    def __init__(self, directory: Path, nodes: int) -> None:
        self.directory = directory
        self.shm = [directory / f"shm{i}" for i in range(nodes)]
        for shm in (*self.shm, directory / "shm"):
            shm.mkdir(parents=True)
        self._head_port, self._dashboard = _free_port(), _free_port()
        # Sockets live there, whose paths may have 107 bytes. A node of its own machine shares none with others, either;
        # the working directory of a job is deleted by the first node on which it is over.
        self._temp = Path(tempfile.mkdtemp(prefix="rn", dir="/tmp"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ADDRESS": f"127.0.0.1:{self._head_port}",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "15",
            "RAY_raylet_start_wait_time_s": "60",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }

    @property
    def env_of(self) -> list[dict[str, str]]:
        return [{"DYNAMICCL_SHM_DIR": str(shm)} for shm in self.shm]

    def start_head(self) -> None:
        self._start(
            "head",
            self.directory / "shm",
            "--head",
            f"--port={self._head_port}",
            f"--dashboard-port={self._dashboard}",
            f"--ray-client-server-port={_free_port()}",
            "--num-cpus=2",
        )
        self.until("the dashboard", lambda: self.ray("job", "list").returncode == 0)

    def start(self, node: int) -> None:
        self._start(
            f"node{node}",
            self.shm[node],
            f"--address=127.0.0.1:{self._head_port}",
            "--num-cpus=1",
            '--resources={"dynamiccl": 1}',
        )

    def kill(self, node: int) -> None:
        """The raylet and all that it has started, at once."""
        process = self._processes.pop(f"node{node}")
        below = _below(process.pid)
        for pid in (process.pid, *below):
            _kill(pid)
        process.wait()

    def _start(self, name: str, shm: Path, *options: str) -> None:
        log = self.directory / f"{name}.log"
        said = log.open("wb")
        self._processes[name] = subprocess.Popen(
            [
                *_RAY,
                "start",
                "--block",
                "--node-ip-address=127.0.0.1",
                f"--node-name={name}",
                f"--temp-dir={self._temp / name}",
                f"--dashboard-agent-listen-port={_free_port()}",
                f"--metrics-export-port={_free_port()}",
                "--object-store-memory=100000000",
                *options,
            ],
            env={k: v for k, v in self.env.items() if k != "RAY_ADDRESS"} | {"DYNAMICCL_SHM_DIR": str(shm)},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        self.until(f"{name} is up", lambda: "Ray runtime started" in log.read_text())

    def ray(self, *args: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Ray's command line, as somebody with the token runs it anywhere."""
        return self._run([*_RAY, *args], {"RAY_ADDRESS": f"http://127.0.0.1:{self._dashboard}"}, timeout)

    def dynamiccl(self, *args: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Our own, on a machine of the cluster that has no ranks."""
        return self._run([sys.executable, "-m", "dynamiccl_ray", *args], {}, timeout)

    def _run(self, command: list[str], env: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.env | env, cwd=self.directory, text=True, capture_output=True, timeout=timeout
        )

    def submit(self, name: str, working_dir: Path, *args: str) -> None:
        """``dynamiccl`` with these arguments as a job of this name."""
        done = self.ray(
            *("job", "submit", "--no-wait", f"--submission-id={name}", f"--working-dir={working_dir}", "--"),
            *(sys.executable, "-m", "dynamiccl_ray", *args),
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def logs(self, name: str) -> str:
        return self.ray("job", "logs", name).stdout

    def until(self, what: str, done: Callable[[], Any], limit_s: float = _UP_S) -> float:
        """Seconds until ``done``."""
        began = time.monotonic()
        while not done():
            assert time.monotonic() - began < limit_s, f"{what}: not within {limit_s} s"
            time.sleep(0.5)
        return time.monotonic() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        below = [pid for process in self._processes.values() for pid in (process.pid, *_below(process.pid))]
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for pid in below:
            _kill(pid)
        shutil.rmtree(self._temp, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _below(pid: int) -> list[int]:
    """A process's children, theirs, and so on."""
    try:
        children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:
        return []
    return [of for child in children for of in (child, *_below(child))]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
