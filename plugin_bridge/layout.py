"""What a segment holds, as Python sees it: the types of its words, and the native reader that keeps their order.

The layout is described in ``docs/channel.md`` and defined in ``native/channel.h``.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from typing import Any, Final

import numpy as np

from dynamiccl_ray.control.table import ENTRY_DTYPE
from dynamiccl_ray.errors import ChannelError
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
        ("clock", "u4"),
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
RING_RECORDS: Final = 16384
"""That a segment holds until they are drained."""
COST_ROW_DTYPE: Final = np.dtype([("key", "<u4"), ("cost_us", "<f4", (N_ALGORITHMS, N_PROTOCOLS))])
DECIDED: Final = 1
APPLIED: Final = 2
AGGREGATE: Final = 4
SURE: Final = 8
"""Flags of a record; see ``enum dcc_record_flags``."""
GPU_TIMERS_ABI: Final = 4
"""The first profiler interface that passes the GPU's timers on, of NCCL 2.27."""
GPU_TIMING: Final = 1
"""``timing`` of a record from GPU timers; see ``enum dcc_timing``."""

UNDECIDED: Final = 0
ABORT: Final = 2**64 - 1
NO_HOLD: Final = 2**64 - 1
UNKNOWN_RANK: Final = 2**32 - 1
PASSTHROUGH_CAUSES: Final = ("no_table", "bad_table", "no_entry", "masked", "user_env", "shadow")


MOST_DUTY: Final = 8
"""At least one window in 2^8 is profiled."""
WINDOW_CALLS: Final = 256
TIMED_ONE_IN: Final = 256
"""Calls, and profiled collectives, for which the plugin times itself."""


class Prepared(IntEnum):
    """``enum dcc_prepared``."""

    PREPARED = 0
    BUSY = 1
    OVERTAKEN = 2
    REFUSED = 3


class IdentityWords(ctypes.Structure):
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
    "unprofiled",
    "spared",
    "duty",
    "overhead_ppm",
    "profile_ns",
    "backlog",
    "term",
    "in_band",
    "out_of_step",
    "staged_version",
    "offered_version",
)


class StatusWords(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_int64 if n == "profile_ns" else ctypes.c_uint64) for n in _STATUS_FIELDS)


class JobWords(ctypes.Structure):
    _fields_ = (
        ("reports", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("iteration_ns", ctypes.c_uint64),
        ("faults", ctypes.c_uint64),
        ("loss", ctypes.c_double),
    )


class PlaceWords(ctypes.Structure):
    _fields_ = (
        ("segment", ctypes.c_void_p),
        ("comm", ctypes.c_uint64),
        ("moved", ctypes.c_uint32),
        ("offered", ctypes.c_uint32),
        ("out_of_step", ctypes.c_uint32),
    )


class TableWords(ctypes.Structure):
    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("abi", ctypes.c_uint32),
        ("version", ctypes.c_uint64),
        ("digest", ctypes.c_uint64),
        ("max_channels", ctypes.c_uint32),
        ("apply", ctypes.c_uint32),
        ("entries", ctypes.c_uint8 * (N_KEYS * ENTRY_DTYPE.itemsize)),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The native reader, loaded once. Raises ChannelError if it was never built here, or from other sources."""
    path = native_dir() / "libdynamiccl-channel.so"
    if not path.exists():
        raise ChannelError(f"{path} is missing: build it with `make native` or reinstall the package")
    lib = ctypes.CDLL(str(path), use_errno=True)
    pointer, u64, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
    u64_out = ctypes.POINTER(u64)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "dcc_open": (pointer, [ctypes.c_int, ctypes.c_char_p]),
        "dcc_close": (None, [pointer]),
        "dcc_owner_lives": (ctypes.c_int, [ctypes.c_int]),
        "dcc_identity": (None, [pointer, ctypes.POINTER(IdentityWords)]),
        "dcc_status": (None, [pointer, ctypes.POINTER(StatusWords)]),
        "dcc_drain": (ctypes.c_size_t, [pointer, pointer, ctypes.c_size_t]),
        "dcc_fingerprints": (ctypes.c_size_t, [pointer, u64_out, u64_out]),
        "dcc_cost_rows": (ctypes.c_size_t, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
        "dcc_report_step": (None, [pointer, u64, u64, ctypes.c_double]),
        "dcc_report_fault": (None, [pointer]),
        "dcc_job": (ctypes.c_int, [pointer, ctypes.POINTER(JobWords)]),
        "dcc_table": (ctypes.c_int, [pointer, ctypes.POINTER(TableWords)]),
        "dcc_digest": (u64, [ctypes.POINTER(TableWords)]),
        "dcc_beat": (None, [pointer, u64, u64]),
        "dcc_govern": (None, [pointer, u64]),
        "dcc_note_overhead": (None, [pointer, u64]),
        "dcc_prepare": (ctypes.c_int, [pointer, ctypes.POINTER(TableWords), u64, u64_out, u64_out]),
        "dcc_decide": (ctypes.c_int, [pointer, u64, u64]),
        "dcc_fold": (ctypes.c_int, [pointer]),
        "dcc_show_to": (ctypes.c_int, [pointer, u64]),
        "dcc_join_in_band": (None, [pointer]),
        "dcc_boundary_bring": (None, [pointer, size, pointer]),
        "dcc_boundary_take": (size, [pointer, size, pointer]),
        "dcc_boundary_report": (None, [pointer, size, u64, u64, ctypes.c_double]),
        "dcc_stage": (ctypes.c_int, [pointer, ctypes.POINTER(TableWords)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name, None)
        if function is None:
            raise ChannelError(f"{path} is of another version: build it with `make native` or reinstall the package")
        function.restype, function.argtypes = result, arguments
    return lib
