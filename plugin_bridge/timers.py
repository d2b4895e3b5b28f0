"""Which records can be believed.

NCCL keeps 64 timestamps per channel and writes over the oldest, so a proxy thread that falls further behind reads
those of a later collective. The plugin marks a record *sure* where so few operations had been called by the time
its timers were read that nothing can have been written over. The rest is told apart by order. A communicator's
kernels run one after the other, and what is read too late is always the time of a later kernel; so a record that
ends after a later kernel began is *wrong*. Where reading catches up at last, the first record that is right again
begins before the wrong ones end. So a run of records between two sure ones is right if none in it is wrong, and
doubtful up to the last one that is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.plugin_bridge.layout import GPU_TIMING, RECORD_DTYPE, SURE

Records = npt.NDArray[Any]

TOLERANCE_NS: Final = 1000
"""Kernels overlap by as much as the GPU's timer is coarse: 32 ns on new GPUs, 1 us on older ones."""
MOST_HELD: Final = 1024
LEAST_HELD: Final = 256
"""Where nothing is ever sure, the host being far ahead of the GPU, this many records wait for those behind them."""
HELD_S: Final = 1.0
"""Nor does a record wait for longer than this: it is believed unless one before it was wrong."""


class TimerCheck:
    """Of one communicator's records on one rank, those that can be believed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._held = np.zeros(0, RECORD_DTYPE)
        self._clock, self._since = clock, 0.0
        self._suspect = False  # one was wrong, and neither a sure one nor many right ones have come since
        self.rejected = 0
        """Records that were not believed so far."""

    @property
    def held(self) -> int:
        """Records that wait for those behind them."""
        return len(self._held)

    def take(self, records: Records) -> Records:
        """Drained records, oldest first, of any number. Returns what can be believed now, in the order of kernels."""
        now = self._clock()
        if not len(self._held):
            self._since = now
        if not len(records) and not len(self._held):
            return records
        both = np.concatenate([self._held, records])
        # Kernels are counted modulo 2^32.
        kernel = (both["plan"] - both["plan"][0]).astype(np.int32)
        order = np.argsort(kernel, kind="stable")
        both, kernel = both[order], kernel[order]
        start = both["start_ns"].astype(np.int64)
        # Only the GPU's timers wait to be read; the host's are taken at once.
        timed = both["timing"] == GPU_TIMING
        wrong = timed & (_later_start(kernel, start) < start + both["exec_ns"].astype(np.int64) - TOLERANCE_NS)
        sure = (both["flags"] & SURE != 0) & ~wrong
        believed = sure | ~_doubtful(sure, wrong)
        # What follows the last sure one, and is not doubtful, waits.
        waits = believed & (np.cumsum(sure) == np.count_nonzero(sure)) & ~sure
        last_run = wrong[np.flatnonzero(sure)[-1] :] if sure.any() else wrong
        self._suspect = bool(last_run.any()) or (self._suspect and not sure.any())
        if np.count_nonzero(waits) > MOST_HELD:
            waits[np.flatnonzero(waits)[:-LEAST_HELD]] = False
            self._suspect = False
        elif now - self._since > HELD_S:
            self._since = now
            believed &= ~(waits & self._suspect)
            waits[:] = False
        self._held = both[waits]
        self.rejected += int(np.count_nonzero(~believed))
        return np.asarray(both[believed & ~waits])


def _later_start(kernel: npt.NDArray[np.int32], start: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(N,) the earliest start in any later kernel; ``kernel`` ascends."""
    least = np.append(np.minimum.accumulate(start[::-1])[::-1], np.iinfo(np.int64).max)
    return np.asarray(least[np.searchsorted(kernel, kernel, side="right")])


def _doubtful(sure: npt.NDArray[np.bool_], wrong: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """(N,) records of a run without a sure one, up to the last in it that is wrong."""
    run = np.cumsum(sure)
    last_wrong = np.full(int(run[-1]) + 1, -1)
    at = np.flatnonzero(wrong)
    np.maximum.at(last_wrong, run[at], at)
    return np.asarray(~sure & (np.arange(len(sure)) <= last_wrong[run]))
