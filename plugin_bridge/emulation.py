"""Emulated NCCL jobs: one host process per rank drives the real plugin through NCCL's plugin interface.

The host (``plugin_bridge/host``, C) loads the plugin as NCCL does, asks its tuner, reports to its profiler,
and takes the time of every collective from a table: a :class:`HostProgram`. :class:`EmulatedJob` starts the
processes, steers them through a shared page, and reads what every rank really used.

Three layouts cross the boundary and are checked on both sides: the program file (``host/program.h``), the job
page (``host/job.h``) and the log (``host/rank.h``).
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
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.knobs import CHANNEL_VALUES, N_ALGORITHMS, N_PAIRS, N_PROTOCOLS, Collective
from plugin_bridge import native_dir

HOST_NAME: Final = "dynamiccl-nccl-host"

PEER_DIED_CODE: Final = 3

FREE_RUNNING: Final = 2**64 - 1
MAX_PHASES: Final = 255
MAX_SWITCHES: Final = 64
MAX_CHANNELS: Final = 64
CHUNK_GRAINS: Final = (16, 1920, 512)
"""Smallest chunk per protocol, bytes; NCCL divides by zero below it."""

_PROGRAM_MAGIC: Final = b"DCCLPROG"
_PROGRAM_VERSION: Final = 1
_COMM_NAME_BYTES: Final = 64
_PAIR_TABLE: Final = (N_ALGORITHMS, N_PROTOCOLS)

_HEADER_DTYPE: Final = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("file_bytes", "<u8"),
        ("comm_id", "<u8"),
        ("comm_name", f"S{_COMM_NAME_BYTES}"),
        ("n_ranks", "<u4"),
        ("n_nodes", "<u4"),
        ("max_channels", "<u4"),
        ("n_keys", "<u4"),
        ("n_phases", "<u4"),
        ("order_length", "<u4"),
        ("window", "<u4"),
        ("reserved", "<u4"),
        ("rate_hz", "<f8"),
        ("total", "<u8"),
        ("noise_seed", "<u8"),
        ("rank_jitter", "<f8"),
        ("keys_offset", "<u8"),
        ("order_offset", "<u8"),
        ("time_offset", "<u8"),
        ("sigma_offset", "<u8"),
    ]
)
_KEY_DTYPE: Final = np.dtype(
    [
        ("collective", "<u4"),
        ("pipe_ops", "<u4"),
        ("bytes", "<u8"),
        ("cost_us", "<f4", _PAIR_TABLE),
        ("own_channels", "u1", _PAIR_TABLE),
        ("own_warps", "u1", _PAIR_TABLE),
        ("reserved", "u1", (2,)),
        ("own_chunk_bytes", "<u4", _PAIR_TABLE),
        ("buffer_bytes", "<u4", (N_PROTOCOLS,)),
    ]
)
USED_DTYPE: Final = np.dtype(
    [
        ("call", "<u8"),
        ("exec_ns", "<u8"),
        ("key", "<u4"),
        ("chunk_bytes", "<u4"),
        ("phase", "u1"),
        ("untouched", "u1"),
        ("algorithm", "u1"),
        ("protocol", "u1"),
        ("requested_channels", "u1"),
        ("channels", "u1"),
        ("n_collectives", "u1"),
        ("reserved", "u1"),
    ]
)
"""One record per getCollInfo call; ``untouched`` is 1 where the tuner left everything to NCCL,
``chunk_bytes`` is the chunk of the first part of the message, ``n_collectives`` is 2 for an aggregate."""

assert _HEADER_DTYPE.itemsize == 192
assert _KEY_DTYPE.itemsize == 240
assert USED_DTYPE.itemsize == 32

_JOB_MAGIC: Final = b"DCCLJOB1"
_JOB_VERSION: Final = 1
_JOB_PAGE_BYTES: Final = 832
_JOB_PROCESS_BYTES: Final = 64
# Byte offsets of the page's words.
_CREDIT: Final = 64
_STOP_AT: Final = 128
_HOLD: Final = 192
_SWITCHES: Final = 320

_STATES: Final = ("absent", "init", "running", "waiting", "finished", "failed")


class HostError(RuntimeError):
    """A host process failed, or the job did not do what was asked of it in time."""


# ---- the program ----


def _table(values: npt.ArrayLike, name: str) -> npt.NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.shape != _PAIR_TABLE:
        raise ValueError(f"{name} has shape {array.shape}; expected {_PAIR_TABLE} (algorithm, protocol)")
    return array


@dataclass(frozen=True, kw_only=True)
class HostKey:
    """One (collective, size) of the workload and what NCCL itself would do with it."""

    collective: Collective
    n_bytes: int
    """As NCCL counts them: the full buffer for all-gather and reduce-scatter."""
    cost_us: npt.NDArray[np.float32]
    """(7, 3): NCCL's cost table; -1 where a pair is not available."""
    own_channels: npt.NDArray[np.uint8]
    """(7, 3): the most channels that NCCL would use; it may use fewer for small messages."""
    own_warps: npt.NDArray[np.uint8]
    """(7, 3)."""
    own_chunk_bytes: npt.NDArray[np.uint32]
    """(7, 3)."""
    buffer_bytes: tuple[int, int, int] = (4 << 16, 15 << 18, 1 << 22)
    """Per protocol; a chunk is at most an eighth of it, or half for pipelined ring/simple."""
    pipe_ops: int = 1

    def __post_init__(self) -> None:
        cost = _table(self.cost_us, "cost_us")
        channels = _table(self.own_channels, "own_channels")
        warps = _table(self.own_warps, "own_warps")
        chunks = _table(self.own_chunk_bytes, "own_chunk_bytes")
        what = f"{self.collective.name.lower()} of {self.n_bytes} bytes"
        if self.n_bytes < 1:
            raise ValueError(f"n_bytes is {self.n_bytes}; expected at least 1")
        if np.isnan(cost).any() or np.any((cost < 0) & (cost != -1)):
            raise ValueError(f"{what}: a cost is NaN or negative; write -1 where a pair is not available")
        available = cost >= 0
        if not available.any():
            raise ValueError(f"{what}: no pair is available")
        if np.any(available & ((channels < 1) | (channels > MAX_CHANNELS))):
            raise ValueError(f"{what}: own_channels must be in 1..{MAX_CHANNELS} where available")
        if np.any(available & ((warps < 1) | (warps > 32))):
            raise ValueError(f"{what}: own_warps must be in 1..32 where available")
        if np.any(available & (chunks < np.asarray(CHUNK_GRAINS))):
            raise ValueError(
                f"{what}: own_chunk_bytes must be at least {CHUNK_GRAINS} (LL, LL128, Simple) where available"
            )


_ResponseTable = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class HostProgram:
    """What an emulated job does and how long it takes."""

    comm_id: int
    comm_name: str
    n_ranks: int
    n_nodes: int
    max_channels: int
    keys: Sequence[HostKey]
    order: npt.NDArray[np.uint32]
    """Key indices in the order in which a communicator calls them, repeated for ever."""
    time_us: _ResponseTable
    """(phases, keys, 22, 9): median time by pair (0: NCCL's own choice, else 1 + 3 * algorithm + protocol)
    and by position of the requested count in ``CHANNEL_VALUES``; NaN where nothing was measured."""
    sigma: _ResponseTable
    """Same shape: standard deviation of the log of the time, shared by all ranks of one collective."""
    window: int = 16
    """Collectives that one rank may begin before another has."""
    rate_hz: float = 0.0
    """Collectives per second and rank; 0 for as fast as possible."""
    total: int = 0
    """Collectives to run; 0 until stopped."""
    noise_seed: int = 0
    rank_jitter: float = 0.0
    """Standard deviation of the rank's own share of the log of the time."""

    def __post_init__(self) -> None:
        shape = (len(self.time_us), len(self.keys), N_PAIRS, len(CHANNEL_VALUES))
        if not 1 <= shape[0] <= MAX_PHASES:
            raise ValueError(f"time_us has {shape[0]} phases; expected 1 to {MAX_PHASES}")
        for name, table in (("time_us", self.time_us), ("sigma", self.sigma)):
            if np.shape(table) != shape:
                raise ValueError(f"{name} has shape {np.shape(table)}; expected {shape}")
        if np.any(np.asarray(self.time_us) <= 0):
            raise ValueError("time_us must be positive, or NaN where nothing was measured")
        if np.any(np.asarray(self.sigma) < 0):
            raise ValueError("sigma must not be negative")
        order = np.asarray(self.order)
        if order.ndim != 1 or order.size == 0 or order.min() < 0 or order.max() >= len(self.keys):
            raise ValueError(f"order must be a non-empty vector of key indices below {len(self.keys)}")
        if not 1 <= self.n_nodes <= self.n_ranks:
            raise ValueError(f"{self.n_nodes} nodes and {self.n_ranks} ranks; expected 1 <= nodes <= ranks")
        if not 1 <= self.max_channels <= MAX_CHANNELS:
            raise ValueError(f"max_channels is {self.max_channels}; expected 1 to {MAX_CHANNELS}")
        if self.window < 1:
            raise ValueError(f"window is {self.window}; expected at least 1")
        if self.rate_hz < 0 or self.rank_jitter < 0 or self.total < 0:
            raise ValueError("rate_hz, rank_jitter and total must not be negative")
        if len(self.comm_name.encode()) >= _COMM_NAME_BYTES or "\0" in self.comm_name:
            raise ValueError(f"comm_name {self.comm_name!r} does not fit {_COMM_NAME_BYTES - 1} bytes")
        for name, value in (("comm_id", self.comm_id), ("noise_seed", self.noise_seed)):
            if not 0 <= value < 2**64:
                raise ValueError(f"{name} is {value}; expected an unsigned 64-bit number")

    def write(self, path: Path) -> None:
        """Write the program file that the host maps."""
        keys = np.zeros(len(self.keys), _KEY_DTYPE)
        for row, key in zip(keys, self.keys, strict=True):
            row["collective"] = int(key.collective)
            row["pipe_ops"] = key.pipe_ops
            row["bytes"] = key.n_bytes
            row["cost_us"] = key.cost_us
            row["own_channels"] = key.own_channels
            row["own_warps"] = key.own_warps
            row["own_chunk_bytes"] = key.own_chunk_bytes
            row["buffer_bytes"] = key.buffer_bytes
        order = np.asarray(self.order, "<u4")
        sections = [
            keys.tobytes(),
            order.tobytes() + b"\0" * (-order.nbytes % 8),
            np.ascontiguousarray(self.time_us, "<f8").tobytes(),
            np.ascontiguousarray(self.sigma, "<f8").tobytes(),
        ]
        offsets = np.cumsum([_HEADER_DTYPE.itemsize, *map(len, sections)])
        header = np.zeros((), _HEADER_DTYPE)
        values: dict[str, object] = {
            "magic": _PROGRAM_MAGIC,
            "version": _PROGRAM_VERSION,
            "header_bytes": _HEADER_DTYPE.itemsize,
            "file_bytes": offsets[4],
            "comm_id": self.comm_id,
            "comm_name": self.comm_name.encode(),
            "n_ranks": self.n_ranks,
            "n_nodes": self.n_nodes,
            "max_channels": self.max_channels,
            "n_keys": len(self.keys),
            "n_phases": len(self.time_us),
            "order_length": order.size,
            "window": self.window,
            "rate_hz": self.rate_hz,
            "total": self.total,
            "noise_seed": self.noise_seed,
            "rank_jitter": self.rank_jitter,
            "keys_offset": offsets[0],
            "order_offset": offsets[1],
            "time_offset": offsets[2],
            "sigma_offset": offsets[3],
        }
        for name, value in values.items():
            header[name] = value
        path.write_bytes(header.tobytes() + b"".join(sections))


# ---- the noise: the same numbers as in host/clock.h ----

_U64 = np.uint64


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = x + _U64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = x ^ (x >> _U64(31))
    return mixed


def _mix_one(x: int) -> int:
    return int(_mix(np.array([x % 2**64], np.uint64))[0])


def noise(seed: int, index: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Standard normal numbers ``index`` of stream ``seed``: splitmix64 and Box-Muller, two hashes each."""
    stream = _U64(_mix_one(seed))
    counter = np.asarray(index, np.uint64)
    shift, scale = _U64(11), 2.0**-53
    u1 = ((_mix(stream ^ (counter * _U64(2))) >> shift) + _U64(1)).astype(np.float64) * scale
    u2 = (_mix(stream ^ (counter * _U64(2) + _U64(1))) >> shift).astype(np.float64) * scale
    return np.asarray(np.sqrt(-2.0 * np.log(u1)) * np.cos(2.0 * np.pi * u2), np.float64)


def comm_stream(noise_seed: int, comm_id: int) -> int:
    """Seed of the noise that all ranks of a communicator share."""
    return noise_seed ^ _mix_one(comm_id)


def rank_stream(noise_seed: int, comm_id: int, rank: int) -> int:
    """Seed of the noise of one rank alone."""
    return comm_stream(noise_seed, comm_id) ^ _mix_one(rank + 0x52414E4B00000000)


def expected_ns(
    program: HostProgram, used: npt.NDArray[np.void], *, rank: int, communicator: int = 0
) -> npt.NDArray[np.float64]:
    """Priced execution times of logged calls, in ns before rounding; ``used`` has :data:`USED_DTYPE`."""
    comm_id = program.comm_id + communicator
    pair = np.where(used["untouched"] != 0, 0, 1 + N_PROTOCOLS * used["algorithm"] + used["protocol"])
    channels = np.searchsorted(CHANNEL_VALUES, used["requested_channels"])
    cell = (used["phase"], used["key"], pair, channels)
    shared = noise(comm_stream(program.noise_seed, comm_id), used["call"])
    own = noise(rank_stream(program.noise_seed, comm_id, rank), used["call"])
    scale = np.exp(program.sigma[cell] * shared + program.rank_jitter * own)
    return np.asarray(1e3 * program.time_us[cell] * scale, np.float64)


# ---- the log ----


def read_used(path: Path) -> npt.NDArray[np.void]:
    """The log of one rank and communicator, (calls,) of :data:`USED_DTYPE`, less a torn last record."""
    data = path.read_bytes()
    return np.frombuffer(data, USED_DTYPE, count=len(data) // USED_DTYPE.itemsize)


_AGREED: Final = ("untouched", "algorithm", "protocol", "requested_channels", "channels", "chunk_bytes")


def agreement_violations(used: Sequence[npt.NDArray[np.void]]) -> int:
    """Calls at which two ranks of a communicator used different settings.

    Compares as many calls as all ranks made. NCCL hangs or corrupts data at the first such call.
    """
    if len(used) < 2:
        return 0
    n_calls = min(len(log) for log in used)
    differs = np.zeros(n_calls, np.bool_)
    first = used[0][:n_calls]
    for other in used[1:]:
        for name in _AGREED:
            differs |= first[name] != other[:n_calls][name]
    return int(np.count_nonzero(differs))


# ---- the job ----


class _JobPage:
    """The shared page, mapped. Words are read and written as aligned 64-bit numbers, one store each."""

    def __init__(self, path: Path, n_processes: int) -> None:
        size = _JOB_PAGE_BYTES + n_processes * _JOB_PROCESS_BYTES
        path.write_bytes(b"\0" * size)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        words = np.frombuffer(self._map, np.uint64)
        head = np.frombuffer(self._map, np.uint32, count=4)
        head[2:4] = _JOB_VERSION, n_processes
        words[2] = size
        self._words = words
        processes = words[_JOB_PAGE_BYTES // 8 :].reshape(n_processes, _JOB_PROCESS_BYTES // 8)
        self.begun = processes[:, 0]
        self.intent = processes[:, 1]
        self.pid_and_state = processes[:, 2]
        self.switches = words[_SWITCHES // 8 : _SWITCHES // 8 + MAX_SWITCHES]
        self._barrier = threading.Lock()
        self[_CREDIT] = self[_STOP_AT] = FREE_RUNNING
        self._map[: len(_JOB_MAGIC)] = _JOB_MAGIC

    def __getitem__(self, offset: int) -> int:
        return int(self._words[offset // 8])

    def __setitem__(self, offset: int, value: int) -> None:
        self._words[offset // 8] = value

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """Keep every process from beginning anything; yields the first collective that none can have begun.

        Taking and releasing a lock is the memory barrier; it pairs with the seq_cst accesses of job_admit.
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

    def state(self, process: int) -> str:
        return _STATES[int(self.pid_and_state[process]) >> 32]


@dataclass(kw_only=True)
class _Process:
    rank: int
    popen: subprocess.Popen[bytes]
    log: Path
    stderr: Path


class EmulatedJob:
    """The processes of one emulated job; a context manager that leaves none of them behind.

    ``ranks`` are the communicator ranks that are played, one process each. The plugin finds its job by
    ``DYNAMICCL_JOB_ID``, which is set to ``job_id`` for the processes. ``directory`` receives the program,
    the job page, the logs and what the processes print; ``env`` is added to the environment,
    ``extra_args`` to the host's command line. ``host`` is the executable, by default the one built with the
    plugin.
    """

    def __init__(
        self,
        program: HostProgram,
        *,
        ranks: Sequence[int],
        job_id: str,
        plugin: Path,
        directory: Path,
        tuner_abi: int = 6,
        profiler_abi: int = 6,
        seed: int = 0,
        max_delay_us: int = 0,
        host: Path | None = None,
        env: Mapping[str, str] | None = None,
        communicators: int = 1,
        extra_args: Sequence[str] = (),
    ) -> None:
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks are {list(ranks)}; expected at least one, and each once")
        if min(ranks) < 0 or max(ranks) >= program.n_ranks:
            raise ValueError(f"ranks are {list(ranks)}; the communicator has 0 to {program.n_ranks - 1}")
        self._host = native_dir() / HOST_NAME if host is None else host
        for what, path in (("host", self._host), ("plugin", plugin)):
            if not path.is_file():
                raise ValueError(f"{what} {path} does not exist; build it with `make`")
        directory.mkdir(parents=True, exist_ok=True)
        self.program = program
        self._ranks = tuple(ranks)
        self._directory = directory
        self._env = {**os.environ, **(env or {}), "DYNAMICCL_JOB_ID": job_id}
        self._processes: list[_Process] = []
        self._page = _JobPage(directory / "job.page", len(ranks))
        self._n_switches = 0
        program.write(directory / "program.bin")
        self._common = [
            str(self._host),
            *("--program", str(directory / "program.bin")),
            *("--job", str(directory / "job.page")),
            *("--plugin", str(plugin)),
            *("--tuner-abi", str(tuner_abi)),
            *("--profiler-abi", str(profiler_abi)),
            *("--communicators", str(communicators)),
            *("--seed", str(seed)),
            *("--max-delay-us", str(max_delay_us)),
            *extra_args,
        ]

    def start(self) -> None:
        """Start one process per rank. Set a credit first to have them wait before the first collective."""
        if self._processes:
            raise HostError("the job has been started already")
        for index, rank in enumerate(self._ranks):
            log = self._directory / f"used.{index}"
            stderr = self._directory / f"stderr.{index}"
            command = [*self._common, "--process", str(index), "--rank", str(rank), "--log", str(log)]
            with stderr.open("wb") as output:
                popen = subprocess.Popen(command, env=self._env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            self._processes.append(_Process(rank=rank, popen=popen, log=log, stderr=stderr))

    # -- steering --

    def progress(self) -> npt.NDArray[np.uint64]:
        """Collectives begun, per process."""
        return self._page.begun.copy()

    def states(self) -> list[str]:
        """Per process: absent, init, running, waiting (for credit or the window), finished or failed."""
        return [self._page.state(index) for index in range(len(self._ranks))]

    def set_credit(self, n: int) -> None:
        """Let collectives below ``n`` begin; :data:`FREE_RUNNING` takes the limit away.

        Lowering the credit below what was begun has no effect on what was begun.
        """
        if not 0 <= n <= FREE_RUNNING:
            raise ValueError(f"credit is {n}; expected an unsigned 64-bit number")
        self._page[_CREDIT] = n

    def add_credit(self, n: int) -> int:
        """Let ``n`` more collectives begin and return the new credit; a free-running job is limited first."""
        if n < 0:
            raise ValueError(f"cannot add a credit of {n}")
        credit = self._page[_CREDIT]
        if credit == FREE_RUNNING:
            with self._page.held() as unbegun:
                credit = unbegun
        self.set_credit(credit + n)
        return credit + n

    def schedule_phase(self, phase: int, at: int | None = None) -> int:
        """Switch every process to response ``phase`` at the same collective, and return which one.

        Without ``at`` that is the first collective which no process has begun.

        Raises:
            ValueError: the phase does not exist, ``at`` lies behind, or switches are not in ascending order.
        """
        if not 0 <= phase < len(self.program.time_us):
            raise ValueError(f"phase is {phase}; the program has {len(self.program.time_us)}")
        if self._n_switches == MAX_SWITCHES:
            raise HostError(f"a job takes no more than {MAX_SWITCHES} phase switches")
        with self._page.held() as unbegun:
            switch_at = max(unbegun, self._last_switch()) if at is None else at
            if switch_at < unbegun:
                raise ValueError(f"collective {at} may have begun; the first that has not is {unbegun}")
            if switch_at < self._last_switch():
                raise ValueError(f"collective {at} lies before the last switch, at {self._last_switch()}")
            # An entry for collective 0 and phase 0 would read as none; the job starts like that anyway.
            if (switch_at, phase) != (0, 0):
                self._page.switches[self._n_switches] = switch_at << 8 | phase
                self._n_switches += 1
        return switch_at

    def _last_switch(self) -> int:
        return int(self._page.switches[self._n_switches - 1]) >> 8 if self._n_switches else 0

    def stop(self, timeout: float = 30.0) -> int:
        """End every process in good order after the same collective, and return how many collectives ran.

        Raises:
            HostError: a process failed, or did not end within ``timeout`` seconds (all are killed then).
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

    def wait(self, timeout: float = 30.0) -> None:
        """Wait until every process has ended well.

        Raises:
            HostError: a process failed, or one did not end within ``timeout`` seconds (all are killed then).
        """
        codes = self.join(timeout)
        # Those that ended because a peer did come last: they are not the cause.
        for index in sorted(range(len(codes)), key=lambda i: codes[i] == PEER_DIED_CODE):
            if (code := codes[index]) != 0:
                raise HostError(f"process {index} ended with code {code}:\n{self.stderr(index)[-2000:]}")

    def join(self, timeout: float = 30.0) -> list[int | None]:
        """Wait until every process has ended, however it did, and return the codes; see :meth:`wait`."""
        deadline = time.monotonic() + timeout
        for index, process in enumerate(self._processes):
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                states, progress = self.states(), self.progress().tolist()
                self._end()
                raise HostError(
                    f"process {index} did not end within {timeout} s (states {states}, begun {progress})"
                ) from None
        return self.returncodes()

    # -- results --

    def returncodes(self) -> list[int | None]:
        """Per process: 0, 1 (host error), 2 (usage), 3 (a peer died), minus a signal, None while it runs."""
        return [process.popen.poll() for process in self._processes]

    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    def used(self, process: int, communicator: int = 0) -> npt.NDArray[np.void]:
        """What one process really used, as far as it was written; complete once the process has ended."""
        log = self._processes[process].log
        path = log if communicator == 0 else log.with_name(f"{log.name}.{communicator}")
        return read_used(path) if path.exists() else np.zeros(0, USED_DTYPE)

    def stderr(self, process: int) -> str:
        return self._processes[process].stderr.read_text(errors="replace")

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
