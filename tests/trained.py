"""A rank as NCCL sees it, without NCCL: the plugin's own tuner, called through its interface, and what it was told."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from dynamiccl_ray.plugin_bridge import plugin_path
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.segments import segment_pid, segments


class _Tuner(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("init", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64, ctypes.c_size_t,
                                  ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)),
        ("decide", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int,
                                    ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                                    ctypes.POINTER(ctypes.c_int))),
        ("finalize", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
    )  # fmt: skip


class _Profiler(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("init", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64,
                                  ctypes.POINTER(ctypes.c_int), ctypes.c_char_p, ctypes.c_int, ctypes.c_int,
                                  ctypes.c_int, ctypes.c_void_p)),
        ("start", ctypes.c_void_p), ("stop", ctypes.c_void_p), ("state", ctypes.c_void_p),
        ("finalize", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
    )  # fmt: skip


def _comm_of(path: Path) -> int:
    with Channel(path, claim=False) as channel:
        return channel.identity.comm_id


class Trained:
    """One rank of a communicator of ``ranks``. ``told`` has, for each call of getCollInfo, the pair that it was given
    (its place in the cost table; -1 for NCCL's own) and the channels. Only with its ``rank``, which NCCL tells a
    profiler, is it one that a runner serves; nothing that it does is measured."""

    def __init__(self, job: str, comm: int, ranks: int, rank: int | None = None) -> None:
        before = set(segments(job))
        self._profiler, self._profiled = None, ctypes.c_void_p()
        if rank is not None:
            self._profiler = _Profiler.in_dll(ctypes.CDLL(str(plugin_path())), "ncclProfiler_v6")
            mask = ctypes.c_int(0)
            init = self._profiler.init
            assert init(ctypes.byref(self._profiled), comm, ctypes.byref(mask), b"", 1, ranks, rank, None) == 0
        self._tuner = _Tuner.in_dll(ctypes.CDLL(str(plugin_path())), "ncclTunerPlugin_v6")
        self._context = ctypes.c_void_p()
        assert self._tuner.init(ctypes.byref(self._context), comm, ranks, 1, None, None, None) == 0
        # Other processes make theirs at the same time. Where no new one is there, the profiler's half had begun before.
        mine = [path for path in segments(job) if segment_pid(path) == os.getpid()]
        (self.path,) = set(mine) - before or {path for path in mine if _comm_of(path) == comm}
        self.told: list[tuple[int, int]] = []

    def call(self, func: int, nbytes: int) -> None:
        cost = (ctypes.c_float * 21)(*[1.0] * 21)
        channels = ctypes.c_int(0)
        self._tuner.decide(self._context, func, nbytes, 1, cost, 7, 3, 0, ctypes.byref(channels))
        self.told.append((next((i for i in range(21) if cost[i] == 0.0), -1), channels.value))

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.finalize(self._profiled)
        self._tuner.finalize(self._context)
