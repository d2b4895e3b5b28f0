"""The Python end of the channel: find, claim, drain and steer one rank's shared-memory segment.

Everything that touches ordering happens in ``libdynamiccl-channel.so``; this file only converts. The layout is
described in ``docs/channel.md`` and defined in ``native/channel.h``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np

from dynamiccl_ray.control.table import ENTRY_DTYPE, DecisionTable
from dynamiccl_ray.errors import ChannelBusyError, ChannelError
from dynamiccl_ray.keys import N_KEYS
from dynamiccl_ray.knobs import N_ALGORITHMS, N_PROTOCOLS
from dynamiccl_ray.plugin_bridge import native_dir

RECORD_DTYPE: Final = np.dtype(
    [
        ("dseq", "u8"),
        ("bytes", "u8"),
        ("exec_ns", "u8"),
        ("start_ns", "u8"),
        ("version", "u4"),
        ("plan", "u4"),
        ("reserved", "u4"),
        ("key", "u2"),
        ("flags", "u1"),
        ("timing", "u1"),
        ("func", "u1"),
        ("algo", "u1"),
        ("proto", "u1"),
        ("channels", "u1"),
        ("asked_algo", "u1"),
        ("asked_proto", "u1"),
        ("asked_channels", "u1"),
        ("asked_chunk_log2", "u1"),
        ("ticket", "u8"),
    ]
)
COST_ROW_DTYPE: Final = np.dtype([("key", "<u4"), ("cost_us", "<f4", (N_ALGORITHMS, N_PROTOCOLS))])
DECIDED: Final = 1
APPLIED: Final = 2
AGGREGATE: Final = 4
SURE: Final = 8
"""Flags of a record; see ``enum dcc_record_flags``."""
GPU_TIMING: Final = 1
"""``timing`` of a record from GPU timers; see ``enum dcc_timing``."""

UNDECIDED: Final = 0
ABORT: Final = 2**64 - 1
NO_HOLD: Final = 2**64 - 1
UNKNOWN_RANK: Final = 2**32 - 1
JOB_BYTES: Final = 63
"""Of a job id; what comes after is not looked at."""
PASSTHROUGH_CAUSES: Final = ("no_table", "bad_table", "no_entry", "masked", "user_env", "shadow")

_SEGMENT_NAME = re.compile(r"dynamiccl-(?P<job>[A-Za-z0-9_.=]+)-(?P<pid>\d+)-(?P<ordinal>\d+)")


class Prepared(IntEnum):
    """``enum dcc_prepared``."""

    PREPARED = 0
    BUSY = 1
    OVERTAKEN = 2
    REFUSED = 3


class _Identity(ctypes.Structure):
    _fields_ = (
        ("comm_id", ctypes.c_uint64),
        ("start_time", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("ordinal", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        ("nodes", ctypes.c_uint32),
        ("tuner_abi", ctypes.c_uint32),
        ("profiler_abi", ctypes.c_uint32),
        ("user_env", ctypes.c_uint32),
        ("state", ctypes.c_uint32),
        ("comm_name", ctypes.c_char * 64),
        ("job", ctypes.c_char * 64),
    )


_STATUS_FIELDS: Final = (
    "dseq",
    "hold_at",
    "decision",
    "base_version",
    "base_at",
    "pending_version",
    "promised",
    "applied",
    *(f"passthrough_{i}" for i in range(8)),
    "hold_waits",
    "hold_wait_ns",
    "overhead_ns",
    "overhead_calls",
    "plugin_heartbeat_ns",
    "runner_heartbeat_ns",
    "runner_pid",
    "records",
    "dropped_full",
    "dropped_busy",
    "dropped_incomplete",
    "dropped_timer",
    "undecided",
    "merged",
    "backlog",
    "term",
    "in_band",
    "out_of_step",
    "staged_version",
    "offered_version",
)


class _Status(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in _STATUS_FIELDS)


class _Job(ctypes.Structure):
    _fields_ = (
        ("reports", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("iteration_ns", ctypes.c_uint64),
        ("faults", ctypes.c_uint64),
        ("loss", ctypes.c_double),
    )


class _Offer(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint64), ("digest", ctypes.c_uint64), ("dseq", ctypes.c_uint64))


class _Table(ctypes.Structure):
    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("abi", ctypes.c_uint32),
        ("version", ctypes.c_uint64),
        ("digest", ctypes.c_uint64),
        ("max_channels", ctypes.c_uint32),
        ("apply", ctypes.c_uint32),
        ("entries", ctypes.c_uint8 * (N_KEYS * ENTRY_DTYPE.itemsize)),
    )


def _library() -> ctypes.CDLL:
    path = native_dir() / "libdynamiccl-channel.so"
    if not path.exists():
        raise ChannelError(f"{path} is missing: build it with `make native` or reinstall the package")
    lib = ctypes.CDLL(str(path), use_errno=True)
    pointer, u64 = ctypes.c_void_p, ctypes.c_uint64
    u64_out = ctypes.POINTER(u64)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "dcc_open": (pointer, [ctypes.c_int, ctypes.c_char_p]),
        "dcc_close": (None, [pointer]),
        "dcc_owner_lives": (ctypes.c_int, [ctypes.c_int]),
        "dcc_identity": (None, [pointer, ctypes.POINTER(_Identity)]),
        "dcc_status": (None, [pointer, ctypes.POINTER(_Status)]),
        "dcc_drain": (ctypes.c_size_t, [pointer, pointer, ctypes.c_size_t]),
        "dcc_fingerprints": (ctypes.c_size_t, [pointer, u64_out, u64_out]),
        "dcc_cost_rows": (ctypes.c_size_t, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
        "dcc_report_step": (None, [pointer, u64, u64, ctypes.c_double]),
        "dcc_report_fault": (None, [pointer]),
        "dcc_job": (ctypes.c_int, [pointer, ctypes.POINTER(_Job)]),
        "dcc_table": (ctypes.c_int, [pointer, ctypes.POINTER(_Table)]),
        "dcc_digest": (u64, [ctypes.POINTER(_Table)]),
        "dcc_beat": (None, [pointer, u64, u64]),
        "dcc_prepare": (ctypes.c_int, [pointer, ctypes.POINTER(_Table), u64, u64_out, u64_out]),
        "dcc_decide": (ctypes.c_int, [pointer, u64, u64]),
        "dcc_fold": (ctypes.c_int, [pointer]),
        "dcc_show_to": (ctypes.c_int, [pointer, u64]),
        "dcc_join_in_band": (None, [pointer]),
        "dcc_offer": (ctypes.c_int, [pointer, ctypes.POINTER(_Offer)]),
        "dcc_take_offer": (None, [pointer]),
        "dcc_out_of_step": (None, [pointer]),
        "dcc_stage": (ctypes.c_int, [pointer, ctypes.POINTER(_Table)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


_lib: ctypes.CDLL | None = None


def _c() -> ctypes.CDLL:
    """Loaded once. Raises ChannelError if it was never built here."""
    global _lib
    if _lib is None:
        _lib = _library()
    return _lib


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Whose segment it is. ``rank`` is None until an old profiler (v1 to v3) has seen its first collective."""

    comm_id: int
    comm_name: str
    job: str
    rank: int | None
    ranks: int
    nodes: int
    pid: int
    start_time: int
    ordinal: int
    tuner_abi: int
    profiler_abi: int
    user_env: bool
    closed: bool


@dataclass(frozen=True, kw_only=True)
class Status:
    """A snapshot of the control words and counters."""

    dseq: int
    hold_at: int | None
    base_version: int
    base_at: int
    """The call at which it came into force."""
    pending_version: int
    promised: bool
    """An answer to PREPARE for the pending version may be out."""
    decision: int
    applied: int
    passthrough: dict[str, int]
    hold_waits: int
    hold_wait_us: float
    plugin_heartbeat_ns: int
    runner_pid: int
    """Who claimed it last; 0 for nobody."""
    records: int
    dropped: dict[str, int]
    undecided: int
    merged: int
    """Operations that share the record of the first one of their aggregate."""
    backlog: int
    term: int
    """Of the newest coordinator that was shown how this rank stands; 0 for none."""
    in_band: bool
    """The job puts tables in force at its step boundaries; a runner only stages them."""
    out_of_step: bool
    """... and does so no more: boundaries were not at the same call on all ranks, and runners agree as without it."""
    staged_version: int
    """Not taken by the job yet; 0 for none."""
    offered_version: int
    """Taken, and not in force on all ranks yet; 0 for none."""

    @property
    def open_version(self) -> int:
        """The version that this rank has promised to and not yet folded; 0 for none."""
        return self.pending_version if self.hold_at is not None else 0


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """What the training script said last; see ``dynamiccl_ray.plugin_bridge.job``."""

    reports: int
    """Steps that it has reported so far; without any, only ``faults`` means something."""
    step: int
    iteration_s: float
    loss: float
    """NaN where it reports none."""
    faults: int
    """So far."""


class Channel:
    """An open segment, claimed by this process for as long as the object lives.

    Raises ``ChannelError`` if the segment is not one of this build's, and ``ChannelBusyError`` if another process has
    claimed it or it is still being set up.
    Not thread-safe: one thread drains and steers.
    """

    def __init__(self, path: Path, *, claim: bool = True) -> None:
        self.path = path
        self._fd = -1
        self._segment: int | None = None
        error = ctypes.create_string_buffer(256)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as e:
            raise ChannelError(f"{path}: cannot open: {e.strerror}") from None
        if claim:
            try:
                # The kernel drops the lock when this process dies, however it dies.
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                self.close()
                if isinstance(e, BlockingIOError):
                    raise ChannelBusyError(f"{path}: claimed by another runner") from None
                raise ChannelError(f"{path}: {e.strerror}") from None
        self._segment = _c().dcc_open(self._fd, error)
        if not self._segment:
            self.close()
            busy = ctypes.get_errno() == errno.EAGAIN
            raise (ChannelBusyError if busy else ChannelError)(f"{path}: {error.value.decode()}")
        if claim:
            _c().dcc_beat(self._segment, time.monotonic_ns(), os.getpid())
        else:
            os.close(self._fd)
            self._fd = -1

    @property
    def _mapped(self) -> int:
        if self._segment is None:
            raise ChannelError(f"{self.path}: this channel has been closed")
        return self._segment

    def close(self) -> None:
        """Unmaps the segment and drops the claim. The plugin does not notice."""
        if self._segment:
            _c().dcc_close(self._segment)
            self._segment = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def identity(self) -> Identity:
        raw = _Identity()
        _c().dcc_identity(self._mapped, ctypes.byref(raw))
        return Identity(
            comm_id=raw.comm_id,
            comm_name=raw.comm_name.decode(errors="replace"),
            job=raw.job.decode(errors="replace"),
            rank=None if raw.rank == UNKNOWN_RANK else raw.rank,
            ranks=raw.ranks,
            nodes=raw.nodes,
            pid=raw.pid,
            start_time=raw.start_time,
            ordinal=raw.ordinal,
            tuner_abi=raw.tuner_abi,
            profiler_abi=raw.profiler_abi,
            user_env=bool(raw.user_env),
            closed=raw.state == 2,
        )

    @property
    def status(self) -> Status:
        raw = _Status()
        _c().dcc_status(self._mapped, ctypes.byref(raw))
        return Status(
            dseq=raw.dseq,
            hold_at=None if raw.hold_at == NO_HOLD else raw.hold_at,
            base_version=raw.base_version,
            base_at=raw.base_at,
            pending_version=raw.pending_version,
            promised=bool(raw.promised),
            decision=raw.decision,
            applied=raw.applied,
            passthrough={cause: getattr(raw, f"passthrough_{i}") for i, cause in enumerate(PASSTHROUGH_CAUSES)},
            hold_waits=raw.hold_waits,
            hold_wait_us=raw.hold_wait_ns / 1e3,
            plugin_heartbeat_ns=raw.plugin_heartbeat_ns,
            runner_pid=raw.runner_pid,
            records=raw.records,
            dropped={reason: getattr(raw, f"dropped_{reason}") for reason in ("full", "busy", "incomplete", "timer")},
            undecided=raw.undecided,
            merged=raw.merged,
            backlog=raw.backlog,
            term=raw.term,
            in_band=bool(raw.in_band),
            out_of_step=bool(raw.out_of_step),
            staged_version=raw.staged_version,
            offered_version=raw.offered_version,
        )

    def drain(self, into: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        """All records that are ready, oldest first, as an array of ``RECORD_DTYPE``.

        ``into`` is an optional contiguous buffer of that type; the answer is then a view of its head.
        """
        if into is None:
            into = np.empty(16384, RECORD_DTYPE)
        elif into.dtype != RECORD_DTYPE or not into.flags.c_contiguous:
            raise ValueError("drain needs a contiguous buffer of RECORD_DTYPE")
        n = _c().dcc_drain(self._mapped, into.ctypes.data, len(into))
        return into[:n]

    def fingerprints(self) -> dict[int, int]:
        """The last published rolling fingerprints: window number -> hash."""
        windows, hashes = (ctypes.c_uint64 * 16)(), (ctypes.c_uint64 * 16)()
        n = _c().dcc_fingerprints(self._mapped, windows, hashes)
        return dict(zip(windows[:n], hashes[:n], strict=True))

    def cost_rows(self, first: int = 0) -> np.ndarray[Any, Any]:
        """NCCL's own predictions, one row per key in the order of their first use, from index ``first`` on."""
        out = np.empty(256, COST_ROW_DTYPE)
        return out[: _c().dcc_cost_rows(self._mapped, out.ctypes.data, first, len(out))]

    @property
    def job(self) -> JobReport | None:
        """The job's last report; None if the script was writing one whenever this looked."""
        raw = _Job()
        if not _c().dcc_job(self._mapped, ctypes.byref(raw)):
            return None
        return JobReport(
            reports=raw.reports, step=raw.step, iteration_s=raw.iteration_ns / 1e9, loss=raw.loss, faults=raw.faults
        )

    def report_step(self, step: int, iteration_s: float, loss: float) -> None:
        """For the training process itself, one thread at a time; NaN for no loss. See ``job.py``.

        Raises ValueError for a step or a time below 0, or a time that is no number.
        """
        if step < 0 or not 0 <= iteration_s < 1e9:
            raise ValueError(f"step {step} of {iteration_s} s; neither can be negative, and the time must be finite")
        _c().dcc_report_step(self._mapped, step, round(iteration_s * 1e9), loss)

    def report_fault(self) -> None:
        """As ``report_step``: one more fault."""
        _c().dcc_report_fault(self._mapped)

    @property
    def table(self) -> DecisionTable | None:
        """What calls are decided by from now on, or from the last COMMIT's call on; None for NCCL's own choice."""
        raw = _Table()
        if not _c().dcc_table(self._mapped, ctypes.byref(raw)):
            return None
        return DecisionTable.from_bytes(bytes(raw))

    def prepare(self, table: DecisionTable, margin: int) -> tuple[Prepared, int, int]:
        """PREPARE: stage ``table`` and promise to hold ``margin`` calls from now.

        Returns (outcome, hold_at, digest of the staged table); the last two mean something only if PREPARED.
        """
        raw = _Table.from_buffer_copy(table.to_bytes())
        hold, digest = ctypes.c_uint64(), ctypes.c_uint64()
        code = _c().dcc_prepare(self._mapped, raw, margin, ctypes.byref(hold), ctypes.byref(digest))
        return Prepared(code), hold.value, digest.value

    def decide(self, version: int, switch_at: int | None) -> bool:
        """COMMIT ``version`` at dseq ``switch_at``, or ABORT it (None). True also where that is known already.

        False if that version is not open here, or was not promised for a call as early as ``switch_at``.
        """
        return bool(_c().dcc_decide(self._mapped, version, ABORT if switch_at is None else switch_at) == 0)

    def fold(self) -> bool:
        """Folds a committed version once its S has passed. True if no version is open any more."""
        return bool(_c().dcc_fold(self._mapped))

    def stage(self, table: DecisionTable) -> Prepared:
        """In band: hands ``table`` to the job, in place of one that it has not taken yet. BUSY: try again."""
        return Prepared(_c().dcc_stage(self._mapped, _Table.from_buffer_copy(table.to_bytes())))

    def join_in_band(self) -> None:
        """For the training process itself, as the next three: from now on it serves step boundaries."""
        _c().dcc_join_in_band(self._mapped)

    def offer(self) -> tuple[int, int, int]:
        """Version and digest of the table that this rank would put in force (0, 0: none), and its calls so far."""
        raw = _Offer()
        _c().dcc_offer(self._mapped, ctypes.byref(raw))
        return raw.version, raw.digest, raw.dseq

    def take_offer(self) -> None:
        """What was offered is in force from the next call on."""
        _c().dcc_take_offer(self._mapped)

    def say_out_of_step(self) -> None:
        """Boundaries are not at the same call on all ranks: nothing is put in force at them any more."""
        _c().dcc_out_of_step(self._mapped)

    def show_to(self, term: int) -> bool:
        """Before the coordinator of ``term`` is shown how this rank stands. False if a newer one has been shown."""
        return bool(_c().dcc_show_to(self._mapped, term))

    def beat(self) -> None:
        """Tells ``doctor`` that a runner is alive."""
        _c().dcc_beat(self._mapped, time.monotonic_ns(), os.getpid())

    @property
    def alive(self) -> bool:
        """Whether the training process is there and has not closed the communicator."""
        if self.identity.closed:
            return False
        if self._fd >= 0:
            return bool(_c().dcc_owner_lives(self._fd))
        return owner_lives(self.path)


def c_digest(table: DecisionTable) -> int:
    """The plugin's own digest of a table."""
    return int(_c().dcc_digest(ctypes.byref(_Table.from_buffer_copy(table.to_bytes()))))


def shm_dir() -> Path:
    """Where segments live: ``DYNAMICCL_SHM_DIR``, by default /dev/shm."""
    return Path(os.environ.get("DYNAMICCL_SHM_DIR") or "/dev/shm")


def segments(job: str | None = None) -> Iterator[Path]:
    """Names of all segments, or of one job's, in no particular order. Nothing is opened."""
    directory = shm_dir()
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        match = _SEGMENT_NAME.fullmatch(path.name)
        if match and (job is None or match["job"] == sanitized(job)):
            yield path


def claimed_by(path: Path) -> int | None:
    """The process that has claimed a segment; None for nobody, and for what is no segment of ours."""
    try:
        Channel(path).close()
    except ChannelBusyError:
        with contextlib.suppress(ChannelError), Channel(path, claim=False) as channel:
            return channel.status.runner_pid
    except ChannelError:
        pass
    return None


def segment_pid(path: Path) -> int:
    """The process that a segment's name says it belongs to. Raises ValueError for another file's name."""
    match = _SEGMENT_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name} is not the name of a segment")
    return int(match["pid"])


def sanitized(job: str) -> str:
    """A job id as the plugin writes it into file names: its first 63 bytes, and as =XX those that are no ASCII letter,
    digit, _ or dot."""
    raw = job.encode(errors="surrogateescape")[:JOB_BYTES]
    return "".join(chr(c) if re.fullmatch(rb"[A-Za-z0-9_.]", bytes([c])) else f"={c:02X}" for c in raw)


def owner_lives(path: Path) -> bool:
    """Whether the process that made a segment lives, in whatever PID namespace: it holds a lock on the file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return bool(_c().dcc_owner_lives(fd))
    finally:
        os.close(fd)


def process_alive(pid: int, start_time: int) -> bool:
    """Whether ``pid`` is still the process that started at ``start_time`` (clock ticks after boot)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    fields = stat.rpartition(")")[2].split()
    return fields[0] not in "ZX" and int(fields[19]) == start_time


def remove_stale(job: str | None = None) -> list[Path]:
    """Removes segments whose process is gone and returns their names. Live ones are never touched, nor what another
    user has made."""
    removed = []
    for path in segments(job):
        try:
            with Channel(path, claim=False) as channel:
                stale = not channel.alive
        except ChannelBusyError:
            stale = not owner_lives(path)
        except ChannelError:
            # Perhaps of a build that took no lock.
            stale = _is_ours(path) and not owner_lives(path) and not Path(f"/proc/{segment_pid(path)}").exists()
        if stale:
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False
