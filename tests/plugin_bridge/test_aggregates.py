"""Operations of an aggregate that begin late, as the events of NCCL 2.27 tell of them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import pytest
from trained import Trained

from dynamiccl_ray.plugin_bridge import plugin_path
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.layout import AGGREGATE

KIB = 1 << 10
COMM = 0x91
COLL, KERNEL_CH = 1 << 1, 1 << 6
KERNEL_CH_STOP = 22
SLOTS = 1024
"""Decisions that the plugin measures at once."""


class _Coll(ctypes.Structure):
    _fields_ = (
        ("seq", ctypes.c_uint64), ("func", ctypes.c_char_p), ("send", ctypes.c_void_p), ("recv", ctypes.c_void_p),
        ("count", ctypes.c_size_t), ("root", ctypes.c_int), ("datatype", ctypes.c_char_p), ("channels", ctypes.c_uint8),
        ("warps", ctypes.c_uint8), ("algo", ctypes.c_char_p), ("proto", ctypes.c_char_p),
    )  # fmt: skip


class _KernelCh(ctypes.Structure):
    _fields_ = (("channel", ctypes.c_uint8), ("timer", ctypes.c_uint64))


class _Which(ctypes.Union):
    _fields_ = (("coll", _Coll), ("kernel_ch", _KernelCh))


class _Event(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint8), ("parent", ctypes.c_void_p), ("rank", ctypes.c_int), ("of", _Which))


_P, _I = ctypes.c_void_p, ctypes.c_int


class _Profiler(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("init", ctypes.CFUNCTYPE(_I, ctypes.POINTER(_P), ctypes.POINTER(_I), ctypes.c_char_p, ctypes.c_uint64, _I, _I,
                                  _I, _P)),
        ("start", ctypes.CFUNCTYPE(_I, _P, ctypes.POINTER(_P), ctypes.POINTER(_Event))),
        ("stop", ctypes.CFUNCTYPE(_I, _P)),
        ("state", ctypes.CFUNCTYPE(_I, _P, _I, ctypes.POINTER(ctypes.c_uint64))),
        ("finalize", ctypes.CFUNCTYPE(_I, _P)),
    )  # fmt: skip


class Rank:
    """A rank of which every operation takes ``NS`` on one channel."""

    NS = 1000

    def __init__(self, job: str) -> None:
        self._profiler = _Profiler.in_dll(ctypes.CDLL(str(plugin_path())), "ncclProfiler_v4")
        self._context, self._mask, self._now = _P(), ctypes.c_int(0), 1_000_000
        init = self._profiler.init
        assert init(ctypes.byref(self._context), ctypes.byref(self._mask), b"", COMM, 1, 2, 0, None) == 0
        self.tuner = Trained(job, COMM, 2)
        self.decide = lambda kib: self.tuner.call(4, kib * KIB)

    def _start(self, event: _Event) -> Any:
        handle = _P()
        self._profiler.start(self._context, ctypes.byref(handle), ctypes.byref(event))
        return handle

    def launch(self, kib: int) -> Any:
        """An all-reduce begins."""
        coll = _Coll(func=b"AllReduce", count=kib * KIB, datatype=b"ncclInt8", channels=1, algo=b"RING", proto=b"LL")
        return self._start(_Event(type=COLL, of=_Which(coll=coll)))

    def run(self, handle: Any) -> None:
        """... and runs."""
        begin = self._now
        self._now += self.NS
        channel = self._start(
            _Event(type=KERNEL_CH, parent=handle, of=_Which(kernel_ch=_KernelCh(channel=0, timer=begin)))
        )
        self._profiler.state(channel, KERNEL_CH_STOP, ctypes.c_uint64(self._now))
        self._profiler.stop(channel)
        self._profiler.stop(handle)

    def close(self) -> None:
        self._profiler.finalize(self._context)
        self.tuner.close()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    name = f"aggregates_{os.getpid()}"
    monkeypatch.setenv("DYNAMICCL_JOB_ID", name)
    started = Rank(name)
    yield started
    started.close()


def test_what_comes_after_its_slot_was_used_again_is_not_taken_for_a_part_of_another(rank: Rank) -> None:
    with Channel(rank.tuner.path) as runner:
        rank.decide(96)
        rank.run(rank.launch(64))
        # Replays of a graph, whose decisions were made long ago: the slot of the first is given up, and its turn comes.
        for _ in range(SLOTS - 1):
            rank.run(rank.launch(1024))
            runner.drain()
        assert runner.status.dropped["incomplete"] == 1
        rank.decide(192)
        other = rank.launch(128)
        rank.run(rank.launch(32))  # what the first still had to come
        assert runner.status.dropped["incomplete"] == 2
        assert runner.status.merged == 0
        rank.run(other)
        rank.run(rank.launch(64))
        (record,) = runner.drain()
        assert record["bytes"] == 192 * KIB
        assert record["flags"] & AGGREGATE
        assert record["exec_ns"] == 2 * Rank.NS, "the two operations, one after the other"
        assert runner.status.merged == 1


def test_the_operations_of_an_aggregate_share_a_record(rank: Rank) -> None:
    with Channel(rank.tuner.path) as runner:
        rank.decide(96)
        rank.run(rank.launch(64))
        assert len(runner.drain()) == 0
        rank.run(rank.launch(32))
        (record,) = runner.drain()
        assert record["exec_ns"] == 2 * Rank.NS
        assert runner.status.merged == 1
