"""What a rank can be told to do. Every method is a command; arguments and answers are plain data or cases."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.gpu.buffers import Buffers
from benchmarks.gpu.cases import Case

CACHED_BYTES: Final = 1 << 30
"""Of buffers that are kept for their next use."""
BURST: Final = 32
"""Collectives between two waits: NCCL keeps 64 timestamps of a channel, and later ones would be taken for earlier."""
WINDOW: Final = 4
"""Collectives of several communicators that are under way at once."""


class Rank:
    """One rank. ``device`` is a CUDA device and the backend NCCL, or None: the CPU and gloo, for tests."""

    def __init__(self, *, rank: int, ranks: int, device: int | None, port: int) -> None:
        self._cuda = device is not None
        self._device = torch.device("cuda", device) if device is not None else torch.device("cpu")
        if self._cuda:
            torch.cuda.set_device(self._device)
        # Without device_id communicators are made when they are first used, each on its own.
        dist.init_process_group(
            "nccl" if self._cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
        )
        self._groups: dict[str, dist.ProcessGroup | None] = {"world": None}
        self._cache: dict[tuple[str, Case], Buffers] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: list[Buffers] = []

    def stop(self) -> None:
        self.drop_graph()
        self._cache.clear()
        dist.destroy_process_group()

    def _buffers(self, case: Case, group: str = "world") -> Buffers:
        key = (group, case)
        if key not in self._cache:
            self._cache[key] = Buffers(case, self._groups[group], self._device)
            while sum(b.nbytes for b in self._cache.values()) > CACHED_BYTES and len(self._cache) > 1:
                del self._cache[next(iter(self._cache))]
        else:
            self._cache[key] = self._cache.pop(key)
        return self._cache[key]

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    # -- results --

    def check(self, *, cases: Sequence[Case], group: str = "world") -> list[dict[str, Any] | None]:
        """Runs each case once; per case what is wrong with the result, or None. None for all who are not members."""
        if group not in self._groups:
            return [None] * len(cases)
        found = []
        for case in cases:
            buffers = self._buffers(case, group)
            buffers.fill()
            buffers.run()
            self._wait()
            found.append(buffers.wrong())
        return found

    def loop(self, *, cases: Sequence[Case], times: int) -> float:
        """All cases in turn, ``times`` times, as training does. Returns the seconds that took."""
        buffers = [self._buffers(case) for case in cases]
        for each in buffers:
            each.zero()
        began = time.perf_counter()
        for _ in range(times):
            for each in buffers:
                each.run()
            self._wait()
        return time.perf_counter() - began

    # -- times --

    def time(self, *, case: Case, warmup: int, measured: int) -> list[float]:
        """Microseconds of each measured call as the GPU's stream sees it, the launch included."""
        buffers = self._buffers(case)
        buffers.zero()
        for _ in range(warmup):
            buffers.run()
        self._wait()
        if not self._cuda:
            return [self._host_us(buffers, 1) for _ in range(measured)]
        times: list[float] = []
        while len(times) < measured:
            marks = [_mark() for _ in range(1 + min(BURST, measured - len(times)))]
            marks[0].record()
            for mark in marks[1:]:
                buffers.run()
                mark.record()
            self._wait()
            # Milliseconds, with a resolution of about half a microsecond.
            times += [1e3 * a.elapsed_time(b) for a, b in pairwise(marks)]
        return times

    def throughput(self, *, case: Case, blocks: int) -> dict[str, list[float]]:
        """Per block of ``BURST`` calls in a row: microseconds of the host and of the GPU for one call."""
        buffers = self._buffers(case)
        buffers.zero()
        host, gpu = [], []
        for block in range(-1, blocks):
            self._wait()
            first, last = (_mark(), _mark()) if self._cuda else (None, None)
            if first is not None:
                first.record()
            us = self._host_us(buffers, BURST)
            if last is not None:
                last.record()
            self._wait()
            if block >= 0:  # the one before warms up
                host.append(us)
                gpu.append(1e3 * first.elapsed_time(last) / BURST if first is not None and last is not None else us)
        return {"host_us": host, "gpu_us": gpu}

    def _host_us(self, buffers: Buffers, calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            buffers.run()
        return 1e6 * (time.perf_counter() - began) / calls

    def mask(self, *, library: str, on: bool) -> None:
        """Turns the profiler's events on or off through NCCL's activation mask; see events.c."""
        ctypes.CDLL(library).gpu_bench_mask(int(on))

    # -- CUDA graphs --

    def capture(self, *, cases: Sequence[Case]) -> None:
        """Warms up, then captures all cases into one graph."""
        self.drop_graph()
        self._captured = [Buffers(case, None, self._device) for case in cases]
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for buffers in self._captured:
                buffers.fill()
                buffers.run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # As nccl-tests does: NCCL's and PyTorch's own threads may go on calling CUDA.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for buffers in self._captured:
                buffers.run()
        torch.cuda.synchronize()

    def replay(self, *, times: int, seed: int) -> list[dict[str, Any] | None]:
        """Replays the graph, each time on other data; per case the first wrong result, or None."""
        assert self._graph is not None, "nothing has been captured"
        wrong: list[dict[str, Any] | None] = [None] * len(self._captured)
        for turn in range(times):
            for buffers in self._captured:
                buffers.seed(replace(buffers.case, seed=seed + turn))
                buffers.fill()
            torch.cuda.synchronize()
            self._graph.replay()
            torch.cuda.synchronize()
            for index, buffers in enumerate(self._captured):
                found = buffers.wrong()
                if found is not None and wrong[index] is None:
                    wrong[index] = {**found, "replay": turn, "seed": seed + turn}
        return wrong

    def drop_graph(self) -> None:
        """A graph that holds collectives must go before their communicator."""
        self._graph, self._captured = None, []
        gc.collect()
        self._wait()

    # -- communicators --

    def group(self, *, name: str, members: Sequence[int]) -> bool:
        """A process group; its communicator is made when it is first used. Whether this rank is a member."""
        made = dist.new_group(list(members))
        if dist.get_rank() not in members:
            return False
        self._groups[name] = made
        return True

    def ungroup(self, *, name: str) -> None:
        if name in self._groups:
            for key in [key for key in self._cache if key[0] == name]:
                del self._cache[key]
            self._wait()
            dist.destroy_process_group(self._groups.pop(name))

    def interleave(self, *, calls: Sequence[tuple[str, Case]]) -> list[dict[str, Any] | None]:
        """(group, case) in this order, a few at once on streams of their own. Per call what is wrong, or None."""
        mine = [Buffers(case, self._groups[name], self._device) for name, case in calls if name in self._groups]
        wrong: list[dict[str, Any] | None] = []
        for start in range(0, len(mine), WINDOW):
            window = mine[start : start + WINDOW]
            for buffers in window:
                buffers.fill()
            self._wait()
            for work in [buffers.run(async_op=True) for buffers in window]:
                work.wait()
            self._wait()
            wrong += [buffers.wrong() for buffers in window]
        return wrong

    def cycles(self, *, case: Case, times: int) -> list[dict[str, Any]]:
        """Makes a group of all ranks, uses it and destroys it; what the process holds after each time."""
        samples = []
        members = list(range(dist.get_world_size()))
        for _ in range(times):
            self.group(name="cycle", members=members)
            (wrong,) = self.check(cases=[case], group="cycle")
            self.ungroup(name="cycle")
            gc.collect()
            samples.append({**self.usage(), "wrong": wrong})
        return samples

    def usage(self) -> dict[str, int]:
        """What this process holds. ``gpu_bytes`` is of the whole GPU."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        free, total = torch.cuda.mem_get_info() if self._cuda else (0, 0)
        return {
            "anonymous_bytes": 1024 * int(status["RssAnon"].split()[0]),
            "threads": int(status["Threads"]),
            "files": len(os.listdir("/proc/self/fd")),
            "gpu_bytes": total - free,
        }


def _mark() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
