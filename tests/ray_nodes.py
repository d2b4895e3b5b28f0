"""A Ray cluster of several nodes on one machine, each with segments of its own, and jobs that are submitted to it."""

from __future__ import annotations

import contextlib
import json
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

from hosts import Hosts

ROOT = Path(__file__).parents[1]
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
# Of a machine that does other work, too.
_UP_S = 180.0


class RayNodes:
    """A head without slots and ``nodes`` raylets with one each; a context manager.

    With ``apart`` each is a machine of its own, as far as processes see (``hosts.py``). Without, what a node is to tell
    apart by is the directory of its segments. ``env_of`` and ``within`` have it for the ranks that are said to run
    there. The cluster asks for a token.
    """

    def __init__(self, directory: Path, nodes: int, *, apart: bool = False) -> None:
        self.directory = directory
        self.names = [f"node{i}" for i in range(nodes)]
        self.hosts = Hosts(["head", *self.names]) if apart else None
        self._shm = {name: directory / f"shm-{name}" for name in ("head", *self.names)}
        for shm in self._shm.values():
            shm.mkdir(parents=True)
        self._head_port, self._dashboard = _free_port(), _free_port()
        # Sockets live there, whose paths may have 107 bytes. A node of its own machine shares none with others, either;
        # the working directory of a job is deleted by the first node on which it is over.
        self.temp = Path(tempfile.mkdtemp(prefix="rn", dir="/tmp"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._asker: subprocess.Popen[str] | None = None
        self.env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ADDRESS": f"{self._address('head')}:{self._head_port}",
            # Ranks may wait for Ray's workers, beside whatever else runs.
            "RAY_worker_niceness": "0",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "15",
            "RAY_raylet_start_wait_time_s": "150",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }

    @property
    def env_of(self) -> list[dict[str, str]]:
        return [self._shm_of(name) for name in self.names]

    @property
    def within(self) -> list[list[str]]:
        return [self._within(name) for name in self.names]

    def _within(self, name: str) -> list[str]:
        return [] if self.hosts is None else self.hosts.within(name)

    def _shm_of(self, name: str) -> dict[str, str]:
        return {"DYNAMICCL_SHM_DIR": str(self._shm[name])} if self.hosts is None else {}

    def _address(self, name: str) -> str:
        return "127.0.0.1" if self.hosts is None else self.hosts.address[name]

    def start_head(self) -> None:
        self._start(
            "head",
            "--head",
            f"--port={self._head_port}",
            f"--dashboard-host={self._address('head')}",
            f"--dashboard-port={self._dashboard}",
            f"--ray-client-server-port={_free_port()}",
            "--num-cpus=2",
        )
        self.until("the dashboard", lambda: self.ray("job", "list").returncode == 0)

    def start(self, node: int) -> None:
        self._start(
            self.names[node],
            f"--address={self._address('head')}:{self._head_port}",
            "--num-cpus=1",
            '--resources={"dynamiccl": 1}',
        )

    def kill(self, node: int) -> None:
        """The raylet and all that it has started, at once."""
        process = self._processes.pop(self.names[node])
        below = _below(process.pid)
        for pid in (process.pid, *below):
            _kill(pid)
        process.wait()

    def _start(self, name: str, *options: str) -> None:
        log = self.directory / f"{name}.log"
        said = log.open("wb")
        self._processes[name] = subprocess.Popen(
            [
                *self._within(name),
                *_RAY,
                "start",
                "--block",
                f"--node-ip-address={self._address(name)}",
                f"--node-name={name}",
                f"--temp-dir={self.temp / name}",
                f"--dashboard-agent-listen-port={_free_port()}",
                f"--metrics-export-port={_free_port()}",
                "--object-store-memory=100000000",
                *options,
            ],
            env={k: v for k, v in self.env.items() if k != "RAY_ADDRESS"} | self._shm_of(name),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        self.until(f"{name} is up", lambda: "Ray runtime started" in log.read_text())

    def ray(self, *args: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Ray's command line, as somebody with the token runs it anywhere."""
        return self._run([*_RAY, *args], {"RAY_ADDRESS": f"http://{self._address('head')}:{self._dashboard}"}, timeout)

    def dynamiccl(self, *args: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Our own, on a machine of the cluster that has no ranks."""
        return self._run([sys.executable, "-m", "dynamiccl_ray", *args], {}, timeout)

    def _run(self, command: list[str], env: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._within("head"), *command],
            env=self.env | self._shm_of("head") | env,
            cwd=self.directory,
            text=True,
            capture_output=True,
            timeout=timeout,
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

    def state(self, name: str) -> str:
        """Of a submitted job, in Ray's words and upper case."""
        said = self.ray("job", "status", name)
        return (said.stdout + said.stderr).upper()

    def ask(self, job: str) -> dict[str, Any] | None:
        """What ``dynamiccl status --json`` says of a job's run, without a start of Python and a Ray driver each time;
        None where there is no run."""
        if self._asker is None:
            self._asker = subprocess.Popen(
                [*self._within("head"), sys.executable, str(Path(__file__).with_name("asker.py"))],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._asker.stdin is not None
        assert self._asker.stdout is not None
        self._asker.stdin.write(job + "\n")
        self._asker.stdin.flush()
        said: dict[str, Any] | None = json.loads(self._asker.stdout.readline())
        return said

    def until(self, what: str, done: Callable[[], Any], limit_s: float = _UP_S) -> float:
        """Seconds until ``done``."""
        began = time.monotonic()
        while not done():
            assert time.monotonic() - began < limit_s, f"{what}: not within {limit_s} s"
            time.sleep(0.5)
        return time.monotonic() - began

    def __enter__(self) -> Self:
        if self.hosts is not None:
            self.hosts.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._asker is not None:
            self._asker.communicate()
        below = [pid for process in self._processes.values() for pid in (process.pid, *_below(process.pid))]
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for pid in below:
            _kill(pid)
        if self.hosts is not None:
            self.hosts.__exit__()
        shutil.rmtree(self.temp, ignore_errors=True)


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
