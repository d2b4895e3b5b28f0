"""A rank as NCCL sees it, without NCCL: the plugin's own tuner, called through its interface, and what it was told."""

from __future__ import annotations

import ctypes
import os

from dynamiccl_ray.plugin_bridge import plugin_path
from dynamiccl_ray.plugin_bridge.segments import segments


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


class Trained:
    """One rank of a communicator of ``ranks``. ``told`` has, for each call of getCollInfo, the pair that it was given
    (its place in the cost table; -1 for NCCL's own) and the channels."""

    def __init__(self, job: str, comm: int, ranks: int) -> None:
        self._tuner = _Tuner.in_dll(ctypes.CDLL(str(plugin_path())), "ncclTunerPlugin_v6")
        self._context = ctypes.c_void_p()
        before = set(segments(job))
        assert self._tuner.init(ctypes.byref(self._context), comm, ranks, 1, None, None, None) == 0
        # Other processes make theirs at the same time.
        mine = [path for path in set(segments(job)) - before if f"-{os.getpid()}-" in path.name]
        (self.path,) = mine
        self.told: list[tuple[int, int]] = []

    def call(self, func: int, nbytes: int) -> None:
        cost = (ctypes.c_float * 21)(*[1.0] * 21)
        channels = ctypes.c_int(0)
        self._tuner.decide(self._context, func, nbytes, 1, cost, 7, 3, 0, ctypes.byref(channels))
        self.told.append((next((i for i in range(21) if cost[i] == 0.0), -1), channels.value))

    def close(self) -> None:
        self._tuner.finalize(self._context)
