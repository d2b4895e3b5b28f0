"""The rank processes as the script sees them: started with an environment each, told what to do, never left behind.

A rank that hangs is the likeliest failure of a wrong tuner. So every command has a time limit, and the stacks of all
ranks that did not answer go into the error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.gpu.machine import ROOT
from dynamiccl_ray.errors import RunError

START_S: Final = 300.0
STOP_S: Final = 60.0
STACKS_S: Final = 2.0
LOG_TAIL: Final = 3000
# A user's own choice of algorithm turns the tuner off, and blocking waits hang in the capture of a CUDA graph.
NOT_INHERITED: Final = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NTHREADS",
    "NCCL_LL128_NTHREADS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_TUNER_PLUGIN",
    "NCCL_PROFILER_PLUGIN",
    "NCCL_BLOCKING_WAIT",
    "NCCL_LAUNCH_MODE",
    "TORCH_NCCL_BLOCKING_WAIT",
    "CUDA_LAUNCH_BLOCKING",
)


class RankError(RunError):
    """A rank failed, ended or hangs."""


def environment(
    base: Mapping[str, str], rank: int, *, one_gpu: bool, nccl: Sequence[int], plugin: Mapping[str, str]
) -> dict[str, str]:
    """A rank's environment. Several ranks on one GPU look like as many hosts and talk over loopback."""
    env = {name: value for name, value in base.items() if name not in NOT_INHERITED}
    env |= {"PYTHONPATH": f"{ROOT}:{base.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1", **plugin}
    env.setdefault("NCCL_DEBUG", "WARN")
    if one_gpu:
        env |= {
            "NCCL_HOSTID": f"dynamiccl-rank-{rank}",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo",
            # Hosts of one NVLink domain would be found to be one after all.
            "NCCL_MNNVL_ENABLE": "0",
        }
        if tuple(nccl) >= (2, 30):
            env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return env


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """A job of one process per rank; a context manager that ends all of them.

    ``environments`` has one per rank. ``devices`` are CUDA devices, or None for a job on the CPU (gloo), as the tests
    of this file start it. ``directory`` receives what each rank prints.
    """

    def __init__(
        self,
        environments: Sequence[Mapping[str, str]],
        *,
        devices: Sequence[int | None],
        directory: Path,
        timeout_s: float,
    ) -> None:
        self.size = len(environments)
        self._timeout_s = timeout_s
        self._pipes: list[Connection[Any, Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        directory.mkdir(parents=True, exist_ok=True)
        self._logs = [directory / f"rank{rank}.log" for rank in range(self.size)]
        port = free_port()
        try:
            for rank, (env, device) in enumerate(zip(environments, devices, strict=True)):
                self._start(rank, env, {"rank": rank, "ranks": self.size, "device": device, "port": port})
            self._collect("start", START_S)
        except BaseException:
            self._end()
            raise

    def _start(self, rank: int, env: Mapping[str, str], first: dict[str, Any]) -> None:
        ours, theirs = Pipe()
        with theirs, self._logs[rank].open("wb") as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.worker", str(theirs.fileno())],
                env=dict(env),
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append(popen)
        self._pipes.append(ours)
        ours.send(first)

    @property
    def pids(self) -> list[int]:
        return [popen.pid for popen in self._processes]

    def call(self, op: str, *, timeout_s: float | None = None, **arguments: Any) -> list[Any]:
        """Has every rank do the same, and returns their answers. Raises RankError if one fails or hangs."""
        return self.call_each(op, [arguments] * self.size, timeout_s=timeout_s)

    def call_each(self, op: str, arguments: Sequence[dict[str, Any]], *, timeout_s: float | None = None) -> list[Any]:
        """As ``call``, with arguments for each rank."""
        for rank, (pipe, mine) in enumerate(zip(self._pipes, arguments, strict=True)):
            try:
                pipe.send((op, mine))
            except OSError:
                raise RankError(f"{op}: {self._ended(rank)}") from None
        return self._collect(op, timeout_s or self._timeout_s)

    def _collect(self, op: str, timeout_s: float) -> list[Any]:
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while missing := {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers.keys() | errors}:
            ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = missing[pipe]
                try:
                    kind, answer = pipe.recv()
                except (EOFError, OSError):
                    errors[rank] = self._ended(rank)
                else:
                    (answers if kind == "ok" else errors)[rank] = answer
            if errors:
                # The others wait for the one that failed; what they say in a moment is all they will say.
                deadline = min(deadline, time.monotonic() + 5.0)
        if errors:
            raise RankError(f"{op}: " + "\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))
        if len(answers) < self.size:
            raise RankError(self._hanging(op, timeout_s, sorted(set(range(self.size)) - answers.keys())))
        return [answers[rank] for rank in range(self.size)]

    def _ended(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(STACKS_S)
        return f"the process ended with {self._processes[rank].poll()}:\n{self.log(rank)}"

    def _hanging(self, op: str, timeout_s: float, ranks: list[int]) -> str:
        for rank in ranks:
            # The worker dumps the stacks of all its threads into its log.
            self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(STACKS_S)
        stacks = "\n".join(f"rank {rank}:\n{self.log(rank)}" for rank in ranks)
        return f"{op}: ranks {ranks} of {self.size} did not answer within {timeout_s:g} s, they hang\n{stacks}"

    def log(self, rank: int) -> str:
        """The end of what a rank printed."""
        return self._logs[rank].read_text(errors="replace")[-LOG_TAIL:].strip()

    def stop(self) -> None:
        """Destroys all process groups and ends the ranks. Raises RankError if one does not end well."""
        try:
            self.call("stop", timeout_s=STOP_S)
            for rank, popen in enumerate(self._processes):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    popen.wait(STOP_S)
                if popen.poll() != 0:
                    raise RankError(f"shutting down: rank {rank}: {self._ended(rank)}")
        finally:
            self._end()

    def _end(self) -> None:
        for popen in self._processes:
            if popen.poll() is None:
                popen.kill()
            popen.wait()
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self._end()


def base_environment() -> dict[str, str]:
    return dict(os.environ)
