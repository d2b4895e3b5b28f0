"""How far a GPU's timer is from its host's clock, so that ranks of one node can be compared.

Kernels write down when they end by the timer of their GPU, and every GPU has its own. The plugin reads the host's clock
when it hears of an end: later than that by what it takes to hear of it. That is a microsecond where NCCL's proxy thread
looks at once, and more where it is late, but never less. So the least difference of a while is the distance of the two
clocks, and nearly the same microsecond for all ranks of a node.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.arrays import UInt32
from dynamiccl_ray.plugin_bridge.layout import GPU_TIMING

WHILE_NS: Final = 1_000_000_000
"""Over longer, two timers drift apart by more than they can be compared to."""
_MOST: Final = 4096


class Clock:
    """Of one rank of a communicator. All times are modulo 2^32 ns: ranks that are more than 2.1 s apart cannot be
    compared, and whoever compares them keeps to what each of them took."""

    def __init__(self) -> None:
        # Of the last records: when they ended by the GPU's timer, and the differences.
        self._end = np.zeros(0, np.int64)
        self._difference = np.zeros(0, np.uint32)

    def on_host(self, records: npt.NDArray[Any]) -> tuple[UInt32, UInt32]:
        """(N,) when records of ``RECORD_DTYPE`` started and ended by the host's clock. Those that were not timed by the
        GPU are by that clock already."""
        start = records["start_ns"].astype(np.uint32)
        gpu = records["timing"] == GPU_TIMING
        if gpu.any():
            end = (records["start_ns"] + records["exec_ns"])[gpu].astype(np.int64)
            self._end = np.append(self._end, end)[-_MOST:]
            self._difference = np.append(self._difference, records["clock"][gpu])[-_MOST:]
            # On either side: a time that was wrong and believed goes with the next records.
            recent = np.abs(self._end - end.max()) < WHILE_NS
            self._end, self._difference = self._end[recent], self._difference[recent]
            first = self._difference[:1]
            start[gpu] += first + (self._difference - first).astype(np.int32).min(keepdims=True).astype(np.uint32)
        return start, start + records["exec_ns"].astype(np.uint32)
