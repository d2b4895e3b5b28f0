"""Jobs on a virtual GPU: processes that run a ``Program`` on NCCL, its own or the emulated one.

Two layouts cross the boundary besides the program and the times, and are checked on both sides: the job page
(``job_host/page.h``) and the log (``gpu/gpu.h``).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.plugin_bridge import native_dir
from dynamiccl_ray.plugin_bridge.program import SEND_RECV, Program
from dynamiccl_ray.plugin_bridge.times import Times

HOST_NAME: Final = "dynamiccl-nccl-job"
PEER_DIED_CODE: Final = 3
FREE_RUNNING: Final = 2**64 - 1
MAX_SWITCHES: Final = 64

LOG_DTYPE: Final = np.dtype(
    [
        *((name, "<u8") for name in ("comm", "ordinal", "bytes", "start_ns", "stop_ns", "priced_ns", "step")),
        *(("chunk_bytes", "<u4"), ("phase", "<u2"), ("rank", "<u2")),
        *((name, "u1") for name in ("func", "algo", "proto", "channels", "members", "own", "asked", "device")),
        *(("number", "<u4"), ("reserved", "<u4")),
    ]
)
"""One collective, or one transfer, as one rank played it; see ``struct gpu_log_record``."""
assert LOG_DTYPE.itemsize == 80
LOG = npt.NDArray[np.void]

_PAGE_MAGIC: Final = b"DCCLJOB2"
_PAGE_VERSION: Final = 2
_PAGE_BYTES: Final = 832
_RANK_BYTES: Final = 64
_ID_BYTES: Final = 192
# Byte offsets of the page's words.
_CREDIT: Final = 64
_STOP_AT: Final = 128
_HOLD: Final = 192
_SWITCHES: Final = 320
_STATES: Final = ("absent", "init", "running", "waiting", "finished", "failed")

_MEETING_MAGIC: Final = b"DCCLMEET"
_MEETING_VERSION: Final = 1


class HostError(RuntimeError):
    """A process of a job failed, or the job did not do what was asked of it in time."""


class _Page:
    """The shared page, mapped. Words are read and written as aligned 64-bit numbers, one store each."""

    def __init__(self, path: Path, n_ranks: int, n_comms: int) -> None:
        size = _PAGE_BYTES + n_ranks * _RANK_BYTES + n_comms * _ID_BYTES
        path.write_bytes(b"\0" * size)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        words = np.frombuffer(self._map, np.uint64)
        head = np.frombuffer(self._map, np.uint32, count=6)
        head[2:5] = _PAGE_VERSION, n_ranks, n_comms
        words[3] = size
        self._words = words
        first = _PAGE_BYTES // 8
        ranks = words[first : first + n_ranks * _RANK_BYTES // 8].reshape(n_ranks, _RANK_BYTES // 8)
        self.begun, self.intent, self.pid_and_state = ranks[:, 0], ranks[:, 1], ranks[:, 2]
        self.host_ns, self.iteration_ns, self.thread = ranks[:, 3], ranks[:, 4], ranks[:, 5]
        self.switches = words[_SWITCHES // 8 : _SWITCHES // 8 + MAX_SWITCHES]
        self._barrier = threading.Lock()
        self[_CREDIT] = self[_STOP_AT] = FREE_RUNNING
        self._map[: len(_PAGE_MAGIC)] = _PAGE_MAGIC

    def __getitem__(self, offset: int) -> int:
        return int(self._words[offset // 8])

    def __setitem__(self, offset: int, value: int) -> None:
        self._words[offset // 8] = value

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """Keeps every rank from beginning anything; yields the first step that none can have begun.

        Taking and releasing a lock is the memory barrier; it pairs with the seq_cst accesses of page_admit.
        """
        self[_HOLD] = 1
        with self._barrier:
            pass
        try:
            yield int(self.intent.max())
        finally:
            with self._barrier:
                pass
            self[_HOLD] = 0

    def state(self, rank: int) -> str:
        return _STATES[int(self.pid_and_state[rank]) >> 32]


def make_meeting(path: Path, *, max_comms: int, max_ranks: int) -> None:
    """An empty file through which ranks wait for each other; ``gpu/meeting.h``."""
    cells, transfers = 4096 * 24, max_ranks * max_ranks * 64 * 32
    comm_bytes = (16 + cells + transfers + 4095) & ~4095
    header = np.zeros((), [("magic", "S8"), ("words", "<u4", (4,))])
    header["magic"], header["words"] = _MEETING_MAGIC, (_MEETING_VERSION, max_comms, max_ranks, 0)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.truncate(4096 + max_comms * comm_bytes)


@dataclass(kw_only=True)
class _Process:
    first: int
    last: int
    popen: subprocess.Popen[bytes]
    log: Path
    stderr: Path


def read_log(path: Path) -> LOG:
    """What one process's ranks played, less a torn last record; nothing where there is no file yet."""
    data = path.read_bytes() if path.exists() else b""
    return np.frombuffer(data, LOG_DTYPE, count=len(data) // LOG_DTYPE.itemsize)


class NcclJob:
    """The processes of a job; a context manager that leaves none of them behind.

    ``library`` is the NCCL to run: one that ``real_nccl.py`` built, or the emulated one. ``env`` is added
    to the environment of every process, ``env_of`` to that of each node. ``within`` has what comes before the command
    on each node, and has to become it, as ``nsenter`` and ``taskset`` do. ``times`` says how long everything takes;
    without, a formula does. ``ranks_per_process`` ranks of a node share a process, a thread each. ``directory``
    receives the program, the times, the job page, the logs and what the processes print.
    """

    def __init__(
        self,
        program: Program,
        *,
        library: Path,
        directory: Path,
        times: Times | None = None,
        env: Mapping[str, str] | None = None,
        env_of: Sequence[Mapping[str, str]] = (),
        within: Sequence[Sequence[str]] = (),
        ranks_per_process: int = 1,
        pace: float = 0.0,
        least_us: float = 0.0,
    ) -> None:
        host = native_dir() / HOST_NAME
        for what, path in (("the host of jobs", host), ("the NCCL library", library)):
            if not path.is_file():
                raise ValueError(f"{what} {path} does not exist; build it with `make native` or `make real-nccl`")
        for first in range(0, len(program.ranks), ranks_per_process):
            if len({rank.node for rank in program.ranks[first : first + ranks_per_process]}) > 1:
                raise ValueError(f"{ranks_per_process} ranks per process: one would have ranks of two nodes")
        directory.mkdir(parents=True, exist_ok=True)
        self.program = program
        self._directory = directory
        self._env_of = env_of
        self._within = within
        self._per_process = ranks_per_process
        self._processes: list[_Process] = []
        self._n_switches = 0
        self._n_phases = times.n_phases if times is not None else 255
        program.write(directory / "program.bin")
        self._page = _Page(directory / "job.page", len(program.ranks), len(program.comms))
        make_meeting(directory / "meeting", max_comms=64, max_ranks=min(len(program.ranks), 16))
        self._env = {**os.environ, **(env or {}), "GPU_MEETING": str(directory / "meeting")}
        self._env |= {"GPU_PACE": str(pace), "GPU_LEAST_US": str(least_us)}
        self._env["LD_LIBRARY_PATH"] = f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        if times is not None:
            times.write(directory / "times.bin")
            self._env["GPU_TIMES"] = str(directory / "times.bin")
        self._command = [
            str(host),
            *("--nccl", str(library)),
            *("--program", str(directory / "program.bin")),
            *("--page", str(directory / "job.page")),
        ]

    def start(self) -> None:
        """Starts every process. Set a credit first to have them wait before the first step."""
        if self._processes:
            raise HostError("the job has been started already")
        ranks = self.program.ranks
        for index, first in enumerate(range(0, len(ranks), self._per_process)):
            last = min(first + self._per_process, len(ranks)) - 1
            log, stderr = self._directory / f"log.{index}", self._directory / f"stderr.{index}"
            node = ranks[first].node
            env = {**self._env, "GPU_LOG": str(log), **(self._env_of[node] if self._env_of else {})}
            within = self._within[node] if self._within else ()
            with stderr.open("wb") as output:
                popen = subprocess.Popen(
                    [*within, *self._command, "--ranks", f"{first}-{last}", "--parent", str(os.getpid())],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # Ctrl-C is for who started them: ranks that end by themselves end at different steps, and wait.
                    process_group=0,
                )
            self._processes.append(_Process(first=first, last=last, popen=popen, log=log, stderr=stderr))

    # -- steering --

    def progress(self) -> npt.NDArray[np.uint64]:
        """Steps begun, per rank."""
        return self._page.begun.copy()

    def states(self) -> list[str]:
        """Per rank: absent, init, running, waiting (for credit or the window), finished or failed."""
        return [self._page.state(rank) for rank in range(len(self.program.ranks))]

    def iteration_us(self) -> npt.NDArray[np.float64]:
        """Virtual time of the last step, per rank."""
        return np.asarray(self._page.iteration_ns / 1e3)

    def set_credit(self, n: int) -> None:
        """Lets steps below ``n`` begin; :data:`FREE_RUNNING` takes the limit away.

        Lowering the credit below what was begun has no effect on what was begun.
        """
        if not 0 <= n <= FREE_RUNNING:
            raise ValueError(f"credit is {n}; expected an unsigned 64-bit number")
        self._page[_CREDIT] = n

    def add_credit(self, n: int) -> int:
        """Lets ``n`` more steps begin and returns the new credit; a free-running job is limited first."""
        if n < 0:
            raise ValueError(f"cannot add a credit of {n}")
        with self._page.held() as unbegun:
            credit = self._page[_CREDIT]
            credit = (unbegun if credit == FREE_RUNNING else credit) + n
            self.set_credit(credit)
        return credit

    def schedule_phase(self, phase: int, at: int | None = None) -> int:
        """Switches every rank to phase ``phase`` of the times at the same step, and returns which one.

        Without ``at`` that is the first step which no rank has begun. Raises ValueError where the phase does not
        exist, ``at`` lies behind, or switches are not in ascending order.
        """
        if not 0 <= phase < self._n_phases:
            raise ValueError(f"phase is {phase}; there are {self._n_phases}")
        if self._n_switches == MAX_SWITCHES:
            raise HostError(f"a job takes no more than {MAX_SWITCHES} phase switches")
        with self._page.held() as unbegun:
            switch_at = max(unbegun, self._last_switch()) if at is None else at
            if switch_at < unbegun:
                raise ValueError(f"step {at} may have begun; the first that has not is {unbegun}")
            if switch_at < self._last_switch():
                raise ValueError(f"step {at} lies before the last switch, at {self._last_switch()}")
            # An entry for step 0 and phase 0 would read as none; the job starts like that anyway.
            if (switch_at, phase) != (0, 0):
                self._page.switches[self._n_switches] = switch_at << 8 | phase
                self._n_switches += 1
        return switch_at

    def _last_switch(self) -> int:
        return int(self._page.switches[self._n_switches - 1]) >> 8 if self._n_switches else 0

    def stop(self, timeout: float = 60.0) -> int:
        """Ends every process in good order after the same step, and returns how many steps ran.

        Raises HostError where a process failed, or did not end within ``timeout`` seconds (all are killed then).
        """
        with self._page.held() as unbegun:
            stop_at = min(unbegun, self._page[_STOP_AT])
            self._page[_STOP_AT] = stop_at
            self._page[_CREDIT] = max(self._page[_CREDIT], stop_at)
        self.wait(timeout)
        return stop_at

    def kill(self, process: int) -> None:
        """SIGKILL one process, as a crash would."""
        self._processes[process].popen.kill()

    def wait(self, timeout: float = 60.0) -> None:
        """Waits until every process has ended well; raises as ``stop`` does."""
        codes = self.join(timeout)
        # Those that ended because a peer did come last: they are not the cause.
        for index in sorted(range(len(codes)), key=lambda i: codes[i] == PEER_DIED_CODE):
            if (code := codes[index]) != 0:
                raise HostError(f"process {index} ended with code {code}:\n{self.stderr(index)[-2000:]}")

    def join(self, timeout: float = 60.0) -> list[int | None]:
        """Waits until every process has ended, however it did, and returns the codes; see :meth:`wait`."""
        deadline = time.monotonic() + timeout
        for index, process in enumerate(self._processes):
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                states, progress = self.states(), self.progress().tolist()
                self._end()
                raise HostError(
                    f"process {index} did not end within {timeout} s (states {states}, begun {progress}):\n"
                    f"{self.stderr(index)[-2000:]}"
                ) from None
        return self.returncodes()

    def await_ranks(self, timeout: float = 180.0) -> None:
        """Waits until every rank has run its setup. Raises HostError where one failed or time is up."""
        deadline = time.monotonic() + timeout
        while set(self.states()) - {"running", "waiting", "finished"}:
            self.check()
            if time.monotonic() > deadline:
                raise HostError(f"the ranks did not start within {timeout} s: {self.states()}")
            time.sleep(0.01)

    def check(self) -> None:
        """Raises HostError where a process has failed."""
        codes = self.returncodes()
        for index in sorted(range(len(codes)), key=lambda i: codes[i] == PEER_DIED_CODE):
            if codes[index]:
                raise HostError(f"process {index} ended with {codes[index]}: {self.stderr(index).strip()[-2000:]}")

    # -- results --

    def returncodes(self) -> list[int | None]:
        """Per process: 0, 1 (a rank failed), 2 (usage), 3 (a peer died), minus a signal, None while it runs."""
        return [process.popen.poll() for process in self._processes]

    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    def log(self, process: int) -> LOG:
        """What one process's ranks played, as far as it was written; complete once it has ended."""
        return read_log(self._processes[process].log)

    def logs(self) -> LOG:
        """All of them, one after the other."""
        return np.concatenate([self.log(i) for i in range(len(self._processes))])

    def stderr(self, process: int) -> str:
        return self._processes[process].stderr.read_text(errors="replace")

    def threads(self) -> list[int]:
        """The kernel's number of the thread that runs each rank; 0 before it does."""
        return [int(number) for number in self._page.thread]

    # -- lifetime --

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self, grace: float = 1.0) -> None:
        for process in self._processes:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            if process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait()


_AGREED: Final = ("func", "bytes", "algo", "proto", "channels", "chunk_bytes")


def agreement_violations(log: LOG) -> int:
    """Collectives that two ranks of a communicator ran differently. NCCL hangs or corrupts data at the first.

    ``log`` has the records of all ranks; those that only some ranks have written yet are compared among these.
    """
    collectives = log[log["func"] != SEND_RECV]
    if not len(collectives):
        return 0
    order = np.lexsort((collectives["ordinal"], collectives["comm"]))
    ordered = collectives[order]
    same = (ordered["comm"][1:] == ordered["comm"][:-1]) & (ordered["ordinal"][1:] == ordered["ordinal"][:-1])
    differs = np.zeros(len(same), np.bool_)
    for name in _AGREED:
        differs |= ordered[name][1:] != ordered[name][:-1]
    wrong: Any = ordered[1:][same & differs]
    return len({(int(r["comm"]), int(r["ordinal"])) for r in wrong})
