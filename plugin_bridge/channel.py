"""The Python end of the channel: claim, drain and steer one rank's shared-memory segment.

Everything that touches ordering happens in ``libdynamiccl-channel.so``; this file only converts.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import ChannelBusyError, ChannelError
from dynamiccl_ray.plugin_bridge.layout import (
    ABORT,
    COST_ROW_DTYPE,
    NO_HOLD,
    PASSTHROUGH_CAUSES,
    RECORD_DTYPE,
    RING_RECORDS,
    TIMED_ONE_IN,
    UNKNOWN_RANK,
    IdentityWords,
    JobWords,
    Prepared,
    StatusWords,
    TableWords,
    library,
)


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
    unprofiled: int
    """Calls in windows that are not profiled: nothing of them is to come."""
    spared: int
    """Operations that NCCL told of outside of the windows that are profiled."""
    duty: int
    """One window in 2^duty is profiled."""
    overhead: float
    """What the plugin takes of the process's time, as a runner measured it last, as a share of 1; 0 if none has."""
    own_ns: int
    """What the plugin has taken for this communicator so far, by what it has timed."""
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
        self._segment = library().dcc_open(self._fd, error)
        if not self._segment:
            self.close()
            busy = ctypes.get_errno() == errno.EAGAIN
            raise (ChannelBusyError if busy else ChannelError)(f"{path}: {error.value.decode()}")
        if claim:
            library().dcc_beat(self._segment, time.monotonic_ns(), os.getpid())
        else:
            os.close(self._fd)
            self._fd = -1

    @property
    def mapped(self) -> int:
        """Address of the segment, for other native parts. Raises ChannelError once it is closed."""
        if self._segment is None:
            raise ChannelError(f"{self.path}: this channel has been closed")
        return self._segment

    def close(self) -> None:
        """Unmaps the segment and drops the claim. The plugin does not notice."""
        if self._segment:
            library().dcc_close(self._segment)
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
        raw = IdentityWords()
        library().dcc_identity(self.mapped, ctypes.byref(raw))
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
        raw = StatusWords()
        library().dcc_status(self.mapped, ctypes.byref(raw))
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
            unprofiled=raw.unprofiled,
            spared=raw.spared,
            duty=raw.duty,
            overhead=raw.overhead_ppm / 1e6,
            own_ns=TIMED_ONE_IN * (raw.overhead_ns + raw.profile_ns),
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
            into = np.empty(RING_RECORDS, RECORD_DTYPE)
        elif into.dtype != RECORD_DTYPE or not into.flags.c_contiguous:
            raise ValueError("drain needs a contiguous buffer of RECORD_DTYPE")
        n = library().dcc_drain(self.mapped, into.ctypes.data, len(into))
        return into[:n]

    def fingerprints(self) -> dict[int, int]:
        """The last published rolling fingerprints: window number -> hash."""
        windows, hashes = (ctypes.c_uint64 * 16)(), (ctypes.c_uint64 * 16)()
        n = library().dcc_fingerprints(self.mapped, windows, hashes)
        return dict(zip(windows[:n], hashes[:n], strict=True))

    def cost_rows(self, first: int = 0) -> np.ndarray[Any, Any]:
        """NCCL's own predictions, one row per key in the order of their first use, from index ``first`` on."""
        out = np.empty(256, COST_ROW_DTYPE)
        return out[: library().dcc_cost_rows(self.mapped, out.ctypes.data, first, len(out))]

    @property
    def job(self) -> JobReport | None:
        """The job's last report; None if the script was writing one whenever this looked."""
        raw = JobWords()
        if not library().dcc_job(self.mapped, ctypes.byref(raw)):
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
        library().dcc_report_step(self.mapped, step, round(iteration_s * 1e9), loss)

    def report_fault(self) -> None:
        """As ``report_step``: one more fault."""
        library().dcc_report_fault(self.mapped)

    @property
    def table(self) -> DecisionTable | None:
        """What calls are decided by from now on, or from the last COMMIT's call on; None for NCCL's own choice."""
        raw = TableWords()
        if not library().dcc_table(self.mapped, ctypes.byref(raw)):
            return None
        return DecisionTable.from_bytes(bytes(raw))

    def prepare(self, table: DecisionTable, margin: int) -> tuple[Prepared, int, int]:
        """PREPARE: stage ``table`` and promise to hold ``margin`` calls from now.

        Returns (outcome, hold_at, digest of the staged table); the last two mean something only if PREPARED.
        """
        raw = TableWords.from_buffer_copy(table.to_bytes())
        hold, digest = ctypes.c_uint64(), ctypes.c_uint64()
        code = library().dcc_prepare(self.mapped, raw, margin, ctypes.byref(hold), ctypes.byref(digest))
        return Prepared(code), hold.value, digest.value

    def decide(self, version: int, switch_at: int | None) -> bool:
        """COMMIT ``version`` at dseq ``switch_at``, or ABORT it (None). True also where that is known already.

        False if that version is not open here, or was not promised for a call as early as ``switch_at``.
        """
        return bool(library().dcc_decide(self.mapped, version, ABORT if switch_at is None else switch_at) == 0)

    def fold(self) -> bool:
        """Folds a committed version once its S has passed. True if no version is open any more."""
        return bool(library().dcc_fold(self.mapped))

    def stage(self, table: DecisionTable) -> Prepared:
        """In band: hands ``table`` to the job, in place of one that it has not taken yet. BUSY: try again."""
        return Prepared(library().dcc_stage(self.mapped, TableWords.from_buffer_copy(table.to_bytes())))

    def show_to(self, term: int) -> bool:
        """Before the coordinator of ``term`` is shown how this rank stands. False if a newer one has been shown."""
        return bool(library().dcc_show_to(self.mapped, term))

    def govern(self, duty: int) -> None:
        """One window of calls in 2^duty is profiled from the next one on; at least one in 2^MOST_DUTY."""
        library().dcc_govern(self.mapped, max(duty, 0))

    def note_overhead(self, share: float) -> None:
        """What the plugin takes of its process's time, as a share of 1, for ``doctor``."""
        library().dcc_note_overhead(self.mapped, round(1e6 * min(max(share, 0.0), 1e6)))

    def beat(self) -> None:
        """Tells ``doctor`` that a runner is alive."""
        library().dcc_beat(self.mapped, time.monotonic_ns(), os.getpid())

    @property
    def alive(self) -> bool:
        """Whether the training process is there and has not closed the communicator."""
        if self.identity.closed:
            return False
        if self._fd >= 0:
            return bool(library().dcc_owner_lives(self._fd))
        return owner_lives(self.path)


def owner_lives(path: Path) -> bool:
    """Whether the process that made a segment lives, in whatever PID namespace: it holds a lock on the file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return bool(library().dcc_owner_lives(fd))
    finally:
        os.close(fd)


def c_digest(table: DecisionTable) -> int:
    """The plugin's own digest of a table."""
    return int(library().dcc_digest(ctypes.byref(TableWords.from_buffer_copy(table.to_bytes()))))
