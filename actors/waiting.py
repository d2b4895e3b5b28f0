"""When an epoch's decisions have been measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from dynamiccl_ray.actors.messages import Collectives, EpochContext
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.keys import N_KEYS


class Waiting:
    """Keys that an epoch waits for, of all communicators that are served here.

    The epoch ends when all have been measured as often as they need. Keys that are called rarely do not hold up the
    others: it also ends when half of them have, and as much time again has passed.
    """

    def __init__(
        self,
        context: EpochContext,
        versions: dict[int, int],
        served: set[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``versions`` has the table that is to be measured, by communicator."""
        self._versions, self._clock, self._began = versions, clock, clock()
        self._half: float | None = None
        self._missing: dict[int, Int64] = {}
        for comm in context.comms:
            if comm.comm in served and comm.need.any():
                missing = self._missing[comm.comm] = np.zeros(N_KEYS, np.int64)
                missing[comm.keys] = comm.need
        self._keys = sum(int(np.count_nonzero(missing)) for missing in self._missing.values())

    @property
    def idle(self) -> bool:
        """Nothing is waited for."""
        return self._keys == 0

    def count(self, comm: int, collectives: Collectives) -> None:
        """More has been measured."""
        missing = self._missing.get(comm)
        if missing is not None:
            now = collectives["version"] == self._versions.get(comm, 0)
            missing -= np.bincount(collectives["key"][now], minlength=N_KEYS)

    def done(self) -> bool:
        """Whether the epoch may end."""
        if self.idle:
            return False
        left = sum(int(np.count_nonzero(missing > 0)) for missing in self._missing.values())
        if left == 0:
            return True
        if 2 * left > self._keys:
            return False
        now = self._clock()
        if self._half is None:
            self._half = now
        return now - self._half >= self._half - self._began
