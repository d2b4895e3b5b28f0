"""When an epoch's decisions have been measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from dynamiccl_ray.actors.messages import Collectives, EpochContext
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.keys import N_KEYS

GRACE: Final = 0.25
"""For what is almost there when another runner is done, and no longer than the epoch has taken."""


@dataclass(eq=False)
class _Missing:
    """Of one communicator."""

    of: Int64
    """(N_KEYS,) collectives."""
    keys: int
    """That the epoch began with."""
    left: int
    """That are waited for still."""


class Waiting:
    """Keys that an epoch waits for, of all communicators that are served here.

    The epoch ends when all have been measured as often as they need. Nobody holds up the others: it also ends when half
    of the keys of any communicator have, and as much time again has passed; and when nothing that it waits for has come
    for a while. So keys that are called rarely wait for half of the keys of their own communicator, and a communicator
    that is idle for nobody. An epoch that waits for nothing ends as much time again after the first collective of a key
    that nobody knows: from then on there is something to decide.
    """

    def __init__(
        self,
        context: EpochContext,
        versions: dict[int, int],
        served: set[int],
        clock: Callable[[], float] = time.monotonic,
        *,
        patience: float = np.inf,
        heard: set[int] | None = None,
    ) -> None:
        """``versions`` has the table that is to be measured, by communicator. ``patience`` is how long what is waited
        for may be silent, by ``clock``. ``heard`` has the communicators that ended an epoch before anybody knew of
        them, and gets those that end this one: some of their ranks may be served nowhere."""
        self._heard_of = set() if heard is None else heard
        self._versions, self._clock, self._began = versions, clock, clock()
        self._heard, self._patience = self._began, patience
        self._ends = np.inf
        self._missing: dict[int, _Missing] = {}
        waited_for = [comm for comm in context.comms if comm.need.any()]
        self.idle: Final = not waited_for
        """Nothing is waited for, here or by any other runner."""
        self._known = {comm.comm: comm.keys for comm in context.comms}
        for comm in waited_for:
            if comm.comm in served:
                of = np.zeros(N_KEYS, np.int64)
                of[comm.keys] = comm.need
                keys = int(np.count_nonzero(of))
                self._missing[comm.comm] = _Missing(of, keys, keys)

    def count(self, comm: int, collectives: Collectives) -> None:
        """More has been measured."""
        missing = self._missing.get(comm)
        if missing is not None:
            now = collectives["version"] == self._versions.get(comm, 0)
            came = np.bincount(collectives["key"][now], minlength=N_KEYS)
            if came[missing.of > 0].any():
                self._heard = self._clock()
            missing.of -= came
            missing.left = int(np.count_nonzero(missing.of > 0))
        elif self.idle and self._is_new(comm, collectives):
            self._end_in(self._clock() - self._began)

    def _is_new(self, comm: int, collectives: Collectives) -> bool:
        if comm in self._known:
            return len(np.setdiff1d(collectives["key"], self._known[comm])) > 0
        new = comm not in self._heard_of
        self._heard_of.add(comm)
        return new

    def close(self) -> None:
        """Another runner is done: what is almost there here is still waited for."""
        left = any(missing.left for missing in self._missing.values())
        self._end_in(min(self._clock() - self._began, GRACE) if left else 0.0)

    def done(self) -> bool:
        """Whether the epoch may end."""
        if self._clock() >= self._ends:
            return True
        if not self._missing:
            return False
        if not any(missing.left for missing in self._missing.values()):
            return True
        if any(2 * missing.left <= missing.keys for missing in self._missing.values()):
            self._end_in(self._clock() - self._began)
        return self._clock() >= min(self._ends, self._heard + self._patience)

    def _end_in(self, more: float) -> None:
        self._ends = min(self._ends, self._clock() + more)
