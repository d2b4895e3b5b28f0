"""``dynamiccl bench plugin`` and ``bench channel``: what the plugin and the channel cost on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from dynamiccl_ray.actions import Action
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol, pair_index
from dynamiccl_ray.plugin_bridge import native_dir
from dynamiccl_ray.plugin_bridge.boundary import Boundary
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.doctor import require_plugin
from dynamiccl_ray.plugin_bridge.layout import RECORD_DTYPE, RING_RECORDS, Prepared
from dynamiccl_ray.plugin_bridge.segments import segments

BENCH_NAME: Final = "dynamiccl-plugin-bench"
_JOB = "dynamiccl_bench"
_NBYTES = 1 << 20
_CALLS = 400_000


def hardware() -> dict[str, Any]:
    """What a number was measured on."""
    model = platform.processor()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"cpu": model, "cores": os.cpu_count(), "machine": platform.machine()}


def bench_plugin(*, in_band: bool = False) -> dict[str, Any]:
    """getCollInfo with a table in force against an empty function in the same run, and the profiler's 26 calls of one
    collective on 8 channels. Nanoseconds; nothing but C runs while they are measured. The table is put in force by the
    coordinator's agreement, or as at a step boundary (``in_band``).

    Percentiles of single calls are as coarse as the processor's counter, which some virtual machines advance in steps
    of 10 ns; ``block`` is the median over blocks of calls, per call, and is not.
    """
    command = [
        *(str(native_dir() / BENCH_NAME), "--plugin", str(require_plugin()), "--bytes", str(_NBYTES)),
        *("--calls", str(_CALLS), "--pause-us", "2000"),
    ]
    program = subprocess.Popen(
        command,
        env={**os.environ, "DYNAMICCL_JOB_ID": _JOB},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    if program.stdout.readline().strip() != "ready":
        raise RunError(f"the program that calls the plugin did not start: {program.communicate()[1]}")
    with _staged(program.pid, in_band) as channel:
        program.stdin.write("go\n")
        program.stdin.flush()
        while program.poll() is None:
            # As a runner does. Until it has folded the switch, each call looks at the decision anew.
            channel.drain()
            channel.fold()
            time.sleep(0.001)
        out, err = program.communicate()
        if program.returncode:
            raise RunError(f"the program that calls the plugin failed: {err}")
    raw = json.loads(out)
    call, empty = raw["tuner_ns"], raw["baseline_ns"]
    return {
        "mode": "in band" if in_band else "coordinator",
        "get_coll_info_ns": {"p50": call["p50"], "p99": call["p99"], "block": raw["tuner_block_ns"]},
        "empty_call_ns": {"p50": empty["p50"], "p99": empty["p99"], "block": raw["baseline_block_ns"]},
        "above_empty_ns": {
            "p50": raw["tuner_block_ns"] - raw["baseline_block_ns"],
            "p99": call["p99"] - empty["p99"],
        },
        "profiler_path_ns": raw["profiler_ns_per_collective"]["p50"],
        "calls": raw["calls"],
        "hardware": hardware(),
    }


def _switched(channel: Channel, table: DecisionTable) -> bool:
    outcome, hold_at, _ = channel.prepare(table, 0)
    return outcome is Prepared.PREPARED and channel.decide(table.version, hold_at)


def _switched_in_band(channel: Channel, table: DecisionTable) -> bool:
    boundary = Boundary()
    boundary.serve([channel])
    if channel.stage(table) is not Prepared.PREPARED:
        return False
    boundary.bring()
    boundary.take()
    in_force = channel.table
    return in_force is not None and in_force.digest == table.digest


@contextlib.contextmanager
def _staged(pid: int, in_band: bool) -> Iterator[Channel]:
    """The bench process's channel, with a table in force."""
    path = next((p for p in segments(_JOB) if f"-{pid}-" in p.name), None)
    if path is None:
        raise RunError("the plugin made no channel; see `dynamiccl doctor`")
    with Channel(path) as channel:
        action = Action(pair=pair_index(Algorithm.RING, Protocol.LL128), channels=3)
        table = DecisionTable.of(1, {key_of(Collective.ALL_REDUCE, _NBYTES, False): action}, max_channels=16)
        accepted = _switched_in_band(channel, table) if in_band else _switched(channel, table)
        if not accepted:
            raise RunError("the bench table was not accepted")
        yield channel


def bench_channel(records: int = 20_000_000) -> dict[str, Any]:
    """The record ring: writes from C, drains into NumPy, each timed alone; then both at once.

    ``lost`` counts records of the concurrent run that were neither drained nor refused by a full ring.
    """
    lib = ctypes.CDLL(str(native_dir() / "libdynamiccl-channel.so"))
    lib.dcc_bench_segment.restype = ctypes.c_void_p
    lib.dcc_bench_segment.argtypes = [ctypes.c_char_p]
    lib.dcc_bench_push.restype = ctypes.c_uint64
    lib.dcc_bench_push.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    lib.dcc_bench_start.restype = ctypes.c_void_p
    lib.dcc_bench_start.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
    lib.dcc_bench_over.argtypes = [ctypes.c_void_p]
    lib.dcc_bench_join.restype = ctypes.c_uint64
    lib.dcc_bench_join.argtypes = [ctypes.c_void_p]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory) / "ring"
        segment = lib.dcc_bench_segment(os.fsencode(path))
        if not segment:
            raise RunError(f"cannot make a segment in {directory}; see `dynamiccl doctor`")
        with Channel(path) as channel:
            buffer = np.empty(RING_RECORDS, RECORD_DTYPE)
            write_ns = drain_ns = 0
            rounds = max(1, records // RING_RECORDS)
            for _ in range(rounds):
                write_ns += lib.dcc_bench_push(segment, RING_RECORDS)
                begin = time.perf_counter_ns()
                drained = len(channel.drain(buffer))
                drain_ns += time.perf_counter_ns() - begin
                assert drained == RING_RECORDS
            # A million records a second: a thousand ranks' worth, and far below what either end can do.
            total = 2_000_000
            writer = lib.dcc_bench_start(segment, total, 1_000_000)
            seen = 0
            while not lib.dcc_bench_over(writer):
                got = len(channel.drain(buffer))
                seen += got
                if not got:
                    time.sleep(0.0005)
            refused = lib.dcc_bench_join(writer)
            seen += len(channel.drain(buffer))
    return {
        "write_per_s": rounds * RING_RECORDS / write_ns * 1e9,
        "drain_per_s": rounds * RING_RECORDS / drain_ns * 1e9,
        "lost": total - seen - refused,
        "refused": refused,
        "hardware": hardware(),
    }
