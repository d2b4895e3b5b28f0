"""Ranks of a job in this process: no GPU, no PyTorch, but the real plugin, driven as NCCL 2.30 drives it.

It understands the commands of ``benchmarks.gpu.rank`` as far as the sections need them. Results are always right unless
``wrong`` says otherwise. Interfaces are declared here on their own (tuner v6, profiler v6), from the published layouts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.gpu.cases import Case
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol
from dynamiccl_ray.plugin_bridge import plugin_path

FUNCTIONS = {
    Collective.BROADCAST: b"Broadcast",
    Collective.REDUCE: b"Reduce",
    Collective.ALL_GATHER: b"AllGather",
    Collective.REDUCE_SCATTER: b"ReduceScatter",
    Collective.ALL_REDUCE: b"AllReduce",
}
TYPES = {
    "float32": b"ncclFloat32",
    "float16": b"ncclFloat16",
    "bfloat16": b"ncclBfloat16",
    "float64": b"ncclFloat64",
    "int32": b"ncclInt32",
    "int64": b"ncclInt64",
    "int8": b"ncclInt8",
    "uint8": b"ncclUint8",
}
COLL, KERNEL_CH, KERNEL_CH_STOP = 1 << 1, 1 << 6, 22
MOST_CHANNELS = 8
p, i, u64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64


class _Coll(ctypes.Structure):
    _fields_ = (
        ("seq", u64),
        ("func", ctypes.c_char_p),
        ("send", p),
        ("recv", p),
        ("count", ctypes.c_size_t),
        ("root", i),
        ("datatype", ctypes.c_char_p),
        ("channels", ctypes.c_uint8),
        ("warps", ctypes.c_uint8),
        ("algo", ctypes.c_char_p),
        ("proto", ctypes.c_char_p),
        ("group", p),
    )


class _KernelCh(ctypes.Structure):
    _fields_ = (("channel", ctypes.c_uint8), ("timer", u64))


class _Event(ctypes.Union):
    _fields_ = (("coll", _Coll), ("kernel_ch", _KernelCh), ("room", ctypes.c_uint8 * 128))


class _Descriptor(ctypes.Structure):
    _fields_ = (("type", u64), ("parent", p), ("rank", i), ("event", _Event))


class _Tuner(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("init", ctypes.CFUNCTYPE(i, p, u64, ctypes.c_size_t, ctypes.c_size_t, p, p, p)),
        ("coll_info", ctypes.CFUNCTYPE(i, p, i, ctypes.c_size_t, i, p, i, i, i, p)),
        ("finalize", ctypes.CFUNCTYPE(i, p)),
        ("chunk_size", ctypes.CFUNCTYPE(i, p, i, ctypes.c_size_t, i, i, i, p)),
    )


class Profiler(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("init", ctypes.CFUNCTYPE(i, p, u64, p, ctypes.c_char_p, i, i, i, p)),
        ("start", ctypes.CFUNCTYPE(i, p, p, p)),
        ("stop", ctypes.CFUNCTYPE(i, p)),
        ("state", ctypes.CFUNCTYPE(i, p, i, p)),
        ("finalize", ctypes.CFUNCTYPE(i, p)),
    )


def costs(collective: Collective) -> np.ndarray[Any, Any]:
    """(7, 3) float32: ring and, for all-reduce, tree; NCCL itself takes ring/simple."""
    table = np.full((7, 3), -1.0, np.float32)
    table[Algorithm.RING] = (30, 20, 10)
    if collective is Collective.ALL_REDUCE:
        table[Algorithm.TREE] = (40, 50, 60)
    return table


def time_ns(case: Case, algo: int, proto: int, channels: int, rank: int) -> int:
    """LL is best for small messages and Simple for large ones; more channels help; rank 1 comes a little later."""
    latency = {Protocol.LL: 4_000, Protocol.LL128: 7_000, Protocol.SIMPLE: 12_000}[Protocol(proto)]
    per_byte = {Protocol.LL: 0.5, Protocol.LL128: 0.25, Protocol.SIMPLE: 0.2}[Protocol(proto)]
    tree = 1.3 if algo == Algorithm.TREE else 1.0
    return int(tree * (latency + per_byte * case.nbytes / channels**0.5) * (1 + 0.01 * rank))


@dataclass
class _Call:
    algo: int
    proto: int
    channels: int
    chunk: int


class _Member:
    """One rank of one communicator."""

    def __init__(self, comm: int, rank: int, ranks: int) -> None:
        library = ctypes.CDLL(str(plugin_path()))
        self._tuner = _Tuner.in_dll(library, "ncclTunerPlugin_v6")
        self._profiler = Profiler.in_dll(library, "ncclProfiler_v6")
        self.rank, self.ranks = rank, ranks
        self._seq, self._now = 0, 1_000
        self._mask = i(0)
        self._measuring, self._deciding = p(), p()
        assert (
            self._profiler.init(
                ctypes.byref(self._measuring), comm, ctypes.byref(self._mask), b"", 1, ranks, rank, None
            )
            == 0
        )
        assert self._tuner.init(ctypes.byref(self._deciding), comm, ranks, ranks, None, None, None) == 0

    def close(self) -> None:
        self._tuner.finalize(self._deciding)
        self._profiler.finalize(self._measuring)

    def decide(self, case: Case, *, deaf: bool = False) -> _Call:
        """getCollInfo, and getChunkSize as NCCL calls it. ``deaf``: a NCCL that does not listen to the tuner."""
        own = costs(case.collective)
        table, channels, chunk = own.copy(), i(0), ctypes.c_size_t(1 << 17)
        func = int(case.collective)
        assert (
            self._tuner.coll_info(
                self._deciding, func, case.nbytes, 1, table.ctypes.data, 7, 3, 0, ctypes.byref(channels)
            )
            == 0
        )
        if deaf:
            table, channels = own, i(0)
        flat = np.where(table >= 0, table, np.inf).ravel()
        algo, proto = divmod(int(np.argmin(flat)), 3)
        own_channels = MOST_CHANNELS if case.nbytes >= 1 << 19 else MOST_CHANNELS // 2
        used = max(1, min(channels.value or own_channels, MOST_CHANNELS, case.nbytes // 1024 + 1))
        self._tuner.chunk_size(self._deciding, func, case.nbytes, algo, proto, 1, ctypes.byref(chunk))
        return _Call(algo, proto, used, chunk.value)

    def report(self, case: Case, call: _Call) -> None:
        """The events of one execution."""
        count = case.sent(self.ranks) if case.collective is not Collective.REDUCE_SCATTER else case.received(self.ranks)
        start = self._now
        stop = start + time_ns(case, call.algo, call.proto, call.channels, self.rank)
        self._now = stop + 1_000
        self._seq += 1
        algo, proto = Algorithm(call.algo).name.encode(), Protocol(call.proto).name.encode()
        coll = _Coll(
            seq=self._seq,
            func=FUNCTIONS[case.collective],
            count=count,
            root=case.root,
            datatype=TYPES[case.dtype],
            channels=call.channels,
            warps=16,
            algo=algo,
            proto=proto,
        )
        parent = self._start(COLL, None, _Event(coll=coll))
        children = [
            self._start(KERNEL_CH, parent, _Event(kernel_ch=_KernelCh(channel=c, timer=start)))
            for c in range(call.channels)
        ]
        self._profiler.stop(parent)
        for child in children:
            self._profiler.state(child, KERNEL_CH_STOP, ctypes.byref(u64(stop)))
            self._profiler.stop(child)

    def _start(self, kind: int, parent: int | None, event: _Event) -> int | None:
        handle = p()
        descriptor = _Descriptor(type=kind, parent=parent, rank=self.rank, event=event)
        assert self._profiler.start(self._measuring, ctypes.byref(handle), ctypes.byref(descriptor)) == 0
        return handle.value


@dataclass
class FakeRanks:
    """In the place of ``benchmarks.gpu.ranks.Ranks``."""

    size: int
    wrong: Callable[[Case, _Call], bool] = lambda case, call: False
    """Whether rank 1 computes something else."""
    silent: frozenset[Collective] = frozenset()
    """Collectives without events."""
    deaf: frozenset[int] = frozenset()
    """Ranks whose NCCL does not listen to the tuner."""
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._groups: dict[str, list[_Member]] = {}
        self._made = 0
        self._sizes = {"world": self.size}
        self._captured: list[tuple[Case, list[_Call]]] = []

    def _members(self, name: str) -> list[_Member]:
        """A communicator is made when it is first used."""
        if name not in self._groups:
            self._made += 1
            ranks = self._sizes[name]
            self._groups[name] = [_Member(0xBE0 + self._made, rank, ranks) for rank in range(ranks)]
        return self._groups[name]

    def close(self) -> None:
        for members in self._groups.values():
            for member in members:
                member.close()
        self._groups.clear()

    def call(self, op: str, *, timeout_s: float | None = None, **arguments: Any) -> list[Any]:
        self.calls.append(op)
        return list(getattr(self, f"do_{op}")(**arguments))

    def _run(self, case: Case, group: str = "world") -> list[_Call]:
        made = []
        for member in self._members(group):
            call = member.decide(case, deaf=member.rank in self.deaf)
            if case.collective not in self.silent:
                member.report(case, call)
            made.append(call)
        return made

    def _judged(self, case: Case, made: Sequence[_Call], rank: int) -> dict[str, Any] | None:
        return {"wrong_elements": 1, "first": 7} if rank == 1 and self.wrong(case, made[rank]) else None

    def do_check(self, cases: Sequence[Case], group: str = "world") -> list[Any]:
        ran = [(case, self._run(case, group)) for case in cases]
        return [
            [self._judged(case, made, rank) if rank < len(made) else None for case, made in ran]
            for rank in range(self.size)
        ]

    def do_loop(self, cases: Sequence[Case], times: int) -> list[float]:
        for _ in range(times):
            for case in cases:
                self._run(case)
        return [0.0] * self.size

    def do_time(self, case: Case, warmup: int, measured: int) -> list[list[float]]:
        made = [self._run(case) for _ in range(warmup + measured)][warmup:]
        return [
            [time_ns(case, c[rank].algo, c[rank].proto, c[rank].channels, rank) / 1e3 + 5 for c in made]
            for rank in range(self.size)
        ]

    def do_throughput(self, case: Case, blocks: int) -> list[dict[str, list[float]]]:
        return [
            {"host_us": [20.0 + b for b in range(blocks)], "gpu_us": [30.0 + rank] * blocks}
            for rank in range(self.size)
        ]

    def do_mask(self, library: str, on: bool) -> list[None]:
        return [None] * self.size

    def do_capture(self, cases: Sequence[Case]) -> list[None]:
        for case in cases:
            self._run(case)
        self._captured = [(case, [member.decide(case) for member in self._members("world")]) for case in cases]
        return [None] * self.size

    def do_replay(self, times: int, seed: int) -> list[Any]:
        for _ in range(times):
            for case, made in self._captured:
                for member, call in zip(self._members("world"), made, strict=True):
                    member.report(case, call)
        return [[self._judged(case, made, rank) for case, made in self._captured] for rank in range(self.size)]

    def do_drop_graph(self) -> list[None]:
        self._captured = []
        return [None] * self.size

    def do_group(self, name: str, members: Sequence[int]) -> list[bool]:
        self._sizes[name] = len(members)
        return [rank in members for rank in range(self.size)]

    def do_ungroup(self, name: str) -> list[None]:
        for member in self._groups.pop(name, []):
            member.close()
        return [None] * self.size

    def do_interleave(self, calls: Sequence[tuple[str, Case]]) -> list[Any]:
        ran = [(name, case, self._run(case, name)) for name, case in calls]
        return [
            [self._judged(case, made, rank) for name, case, made in ran if rank < self._sizes[name]]
            for rank in range(self.size)
        ]

    def do_cycles(self, case: Case, times: int) -> list[Any]:
        found = []
        for turn in range(times):
            self.do_group("cycle", range(self.size))
            self._run(case, "cycle")
            self.do_ungroup("cycle")
            found.append({"anonymous_bytes": turn, "threads": 9, "files": 9, "gpu_bytes": 0, "wrong": None})
        return [found] * self.size
