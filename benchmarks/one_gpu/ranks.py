"""Ranks of a job on GPUs, a thread each: NCCL through its C interface, with our plugin in it.

Where there are fewer GPUs than ranks, several share one, which NCCL allows from 2.30 on. Their kernels run side by side
and wait for each other, as on GPUs of their own; messages go through the memory that they share.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.one_gpu.cudart import Cuda
from dynamiccl_ray.actions import Action
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.plugin_bridge import plugin_path
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.layout import RECORD_DTYPE, Prepared
from dynamiccl_ray.plugin_bridge.segments import segments

T = TypeVar("T")
_FLOAT32, _SUM = 7, 0
_SETTLE_BYTES = 1024
"""Of the all-reduces that carry ranks over a switch of tables."""
_MARGIN = 2
_MOST_BLOCKS = 64
"""Of all ranks' kernels together: all have to run at once, and a multiprocessor holds one of them."""
_HANGING_S = 20.0


def environment(job: str, *, plugin: bool = True) -> dict[str, str]:
    """What has to be set before NCCL is loaded."""
    path = str(plugin_path())
    loaded = {"NCCL_TUNER_PLUGIN": path, "NCCL_PROFILER_PLUGIN": path, "DYNAMICCL_JOB_ID": job}
    return {
        **(loaded if plugin else {}),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        # Kernels of ranks that share a GPU wait for each other: nothing may wait for the GPU as a whole meanwhile.
        "NCCL_RUNTIME_CONNECT": "0",
        "NCCL_SET_STACK_SIZE": "1",
        "CUDA_MODULE_LOADING": "EAGER",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }


class _UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class _Config(ctypes.Structure):
    """The beginning of ncclConfig_t, up to the name of a communicator; see plugin_bridge/job_host/nccl.h."""

    _fields_ = (
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
        ("cga", ctypes.c_int), ("min_ctas", ctypes.c_int), ("max_ctas", ctypes.c_int), ("net", ctypes.c_char_p),
        ("split_share", ctypes.c_int), ("traffic_class", ctypes.c_int), ("name", ctypes.c_char_p),
    )  # fmt: skip


@dataclass
class Rank:
    """One of them; its functions are for its own thread."""

    number: int
    of: int
    cuda: Cuda
    nccl: ctypes.CDLL
    buffer_bytes: int

    def open(self, unique: _UniqueId, name: str) -> None:
        self.cuda.use(self.number % self.cuda.devices)
        self.stream = self.cuda.stream()
        self.sent, self.received = self.cuda.memory(self.buffer_bytes), self.cuda.memory(self.buffer_bytes)
        self._events: list[ctypes.c_void_p] = []
        undefined = -(2**31)
        config = _Config(
            size=ctypes.sizeof(_Config), magic=0xCAFEBEEF, version=22700, blocking=1, cga=undefined, min_ctas=undefined,
            max_ctas=_MOST_BLOCKS // self.of, split_share=undefined, traffic_class=undefined, name=name.encode(),
        )  # fmt: skip
        self.comm = ctypes.c_void_p()
        self._do("ncclCommInitRankConfig", ctypes.byref(self.comm), self.of, unique, self.number, ctypes.byref(config))

    def _do(self, name: str, *arguments: Any) -> None:
        code = getattr(self.nccl, name)(*arguments)
        if code:
            raise RuntimeError(f"rank {self.number}: {name} failed with {code}")

    def event(self, index: int) -> ctypes.c_void_p:
        while len(self._events) <= index:
            self._events.append(self.cuda.event())
        return self._events[index]

    def call(self, collective: Collective, nbytes: int, root: int = 0) -> None:
        """Enqueues one, of floats; ``nbytes`` as NCCL counts them for a tuner."""
        count = nbytes // 4
        part = count // self.of
        tail = (self.comm, self.stream)
        both = (self.sent, self.received)
        if collective is Collective.ALL_REDUCE:
            self._do("ncclAllReduce", *both, ctypes.c_size_t(count), _FLOAT32, _SUM, *tail)
        elif collective is Collective.ALL_GATHER:
            self._do("ncclAllGather", *both, ctypes.c_size_t(part), _FLOAT32, *tail)
        elif collective is Collective.REDUCE_SCATTER:
            self._do("ncclReduceScatter", *both, ctypes.c_size_t(part), _FLOAT32, _SUM, *tail)
        else:
            self._do("ncclBroadcast", *both, ctypes.c_size_t(count), _FLOAT32, root, *tail)

    def timed(self, collective: Collective, nbytes: int, times: int, *, late_s: float = 0.0) -> np.ndarray[Any, Any]:
        """Enqueues ``times`` of them and waits. Returns (times,) us between CUDA's events around each."""
        if late_s:
            time.sleep(late_s)
        self.cuda.record(self.event(0), self.stream)
        for i in range(times):
            self.call(collective, nbytes)
            self.cuda.record(self.event(i + 1), self.stream)
        self.cuda.sync(self.stream)
        return np.array([self.cuda.elapsed_us(self.event(i), self.event(i + 1)) for i in range(times)])

    def close(self) -> None:
        self._do("ncclCommDestroy", self.comm)


class Ranks:
    """All ranks of one communicator, and our end of their channels. A context manager."""

    def __init__(
        self, n: int, *, nccl: Path, job: str = "", name: str = "world", buffer_bytes: int = 256 << 20
    ) -> None:
        """Without ``job`` nothing looks for channels. :func:`environment` must be in force before the first."""
        library = ctypes.CDLL(str(nccl))
        cuda = Cuda()
        self.list = [Rank(i, n, cuda, library, buffer_bytes) for i in range(n)]
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank{i}") for i in range(n)]
        self._version = 0
        self.hanging = False
        """NCCL's kernels wait for each other for ever; nothing more can be done with these ranks, or be waited for."""
        self.channels: list[Channel] = []
        unique = _UniqueId()
        if library.ncclGetUniqueId(ctypes.byref(unique)):
            raise RuntimeError("ncclGetUniqueId failed")
        self.all(lambda rank: rank.open(unique, name))
        if job:
            self.claim(job)

    def claim(self, job: str) -> None:
        """Opens their channels; nobody else may have them."""
        self.channels = sorted((Channel(path) for path in segments(job)), key=lambda c: c.identity.rank or 0)
        found = [channel.identity.rank for channel in self.channels]
        assert found == [rank.number for rank in self.list], found
        self._version = max(channel.status.base_version for channel in self.channels)

    def all(self, do: Callable[[Rank], T]) -> list[T]:
        """What each rank does, on its thread, at the same time as the others."""
        if self.hanging:
            raise RuntimeError("ranks hang, since an earlier call")
        futures = [thread.submit(do, rank) for thread, rank in zip(self._threads, self.list, strict=True)]
        try:
            return [future.result(timeout=_HANGING_S) for future in futures]
        except TimeoutError:
            self.hanging = True
            raise RuntimeError(f"ranks hang: {[future.done() for future in futures]} are done") from None

    def timed(
        self, collective: Collective, nbytes: int, times: int, *, late_s: Mapping[int, float] | None = None
    ) -> np.ndarray[Any, Any]:
        """(ranks, times) us by CUDA's events."""
        late = late_s or {}
        return np.stack(self.all(lambda rank: rank.timed(collective, nbytes, times, late_s=late.get(rank.number, 0.0))))

    # -- the channels --

    def use(self, actions: Mapping[tuple[Collective, int], Action], *, max_channels: int = 32) -> None:
        """Every rank goes over to a table that says so, and NCCL's own choice of all else."""
        of_keys = {key_of(*call, False): action for call, action in actions.items()}
        self.switch(DecisionTable.of(0, of_keys, max_channels=max_channels))

    def switch(self, table: DecisionTable) -> None:
        """Every rank goes over to a table, as the next version of it."""
        self._version += 1
        table = replace(table, version=self._version)
        prepared = [channel.prepare(table, _MARGIN) for channel in self.channels]
        assert {outcome for outcome, _, _ in prepared} == {Prepared.PREPARED}, prepared
        at = max(hold_at for _, hold_at, _ in prepared)
        assert all(channel.decide(self._version, at) for channel in self.channels)
        while not all(list(map(Channel.fold, self.channels))):
            self.timed(Collective.ALL_REDUCE, _SETTLE_BYTES, 1)

    def records(self, times: int, timeout_s: float = 0.5) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Of the last ``times`` calls, those of which all ranks have a record: (n,) which, and (ranks, n) of
        ``RECORD_DTYPE``. NCCL's proxy thread may miss one that starts and ends between two of its looks."""
        first = self.channels[0].status.dseq - times + 1
        found: list[list[np.ndarray[Any, Any]]] = [[] for _ in self.channels]
        until = time.monotonic() + timeout_s
        while True:
            for mine, channel in zip(found, self.channels, strict=True):
                mine.append(channel.drain().copy())
            of = [np.concatenate(mine) for mine in found]
            of = [mine[mine["dseq"] >= first] for mine in of]
            if min(map(len, of)) >= times or time.monotonic() > until:
                break
            time.sleep(0.0005)
        which = functools.reduce(np.intersect1d, [mine["dseq"] for mine in of])
        assert len(which) > 0.8 * times, f"{len(which)} of {times} calls have records of all ranks"
        sorted_ = [mine[np.argsort(mine["dseq"])] for mine in of]
        kept = [mine[np.isin(mine["dseq"], which)] for mine in sorted_]
        return which.astype(np.int64) - first, np.stack(kept).astype(RECORD_DTYPE)

    def measured(
        self, collective: Collective, nbytes: int, times: int, *, late_s: Mapping[int, float] | None = None
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(events, records), of the calls that all ranks have a record of: (ranks, n) both, us and ``RECORD_DTYPE``."""
        events = self.timed(collective, nbytes, times, late_s=late_s)
        which, records = self.records(times)
        return events[:, which], records

    # -- what is computed --

    def check(self, collective: Collective, nbytes: int) -> None:
        """Runs one on random numbers and compares what every rank gets. Raises AssertionError where one is wrong."""
        rng = np.random.default_rng(nbytes)
        n, count = len(self.list), nbytes // 4
        # Small whole numbers: their sums are exact in any order.
        data = rng.integers(-1000, 1000, (n, count)).astype(np.float32)
        part = count // n
        wanted: Sequence[np.ndarray[Any, Any]]
        if collective is Collective.ALL_REDUCE:
            wanted = [data.sum(0)] * n
        elif collective is Collective.ALL_GATHER:
            wanted = [np.concatenate([mine[:part] for mine in data])] * n
        elif collective is Collective.REDUCE_SCATTER:
            wanted = list(data[:, : part * n].sum(0).reshape(n, part))
        else:
            wanted = [data[0]] * n

        def one(rank: Rank) -> np.ndarray[Any, Any]:
            rank.cuda.write(rank.sent, data[rank.number])
            got = np.full(len(wanted[rank.number]), np.nan, np.float32)
            rank.cuda.write(rank.received, got)
            return got

        outputs = self.all(one)
        self.timed(collective, nbytes, 1)
        self.all(lambda rank: rank.cuda.read(outputs[rank.number], rank.received))
        for number, (got, expected) in enumerate(zip(outputs, wanted, strict=True)):
            assert np.array_equal(got, expected), f"rank {number}: {collective.name} of {nbytes} bytes is wrong"

    # -- lifetime --

    def close(self) -> None:
        if not self.hanging:
            self.all(lambda rank: rank.close())
        for channel in self.channels:
            channel.close()
        for thread in self._threads:
            thread.shutdown(wait=not self.hanging)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
