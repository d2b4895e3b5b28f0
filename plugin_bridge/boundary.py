"""The communicators of a training process at the ends of its steps; see ``docs/channel.md``, "In band"."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np

from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.layout import PlaceWords, library

PLACES: Final = 64
"""In the all-reduce; two communicators that fall on one move on to others."""
_WORDS: Final = 6


class Boundary:
    """For the training process itself, one thread at a time."""

    def __init__(self) -> None:
        self.words: Int64 = np.zeros(PLACES * _WORDS + 1, np.int64)
        """What this process brings to an all-reduce (MIN) over all ranks, and then its result. The last one is
        ``step_ns``."""
        self._at = self.words.ctypes.data
        self._channels: list[Channel] = []
        self._places = (PlaceWords * 0)()
        self._c = library()

    def serve(self, channels: Iterable[Channel]) -> None:
        """All open segments of this process: from now on it puts the tables of these in force."""
        known = dict(zip(self._channels, self._places, strict=True))
        self._channels = list(channels)
        self._places = (PlaceWords * len(self._channels))()
        for i, channel in enumerate(self._channels):
            # Where NCCL tells the id of a communicator with its first collective only, ranks could not be told apart.
            comm = channel.identity.comm_id
            self._places[i] = known.get(channel, PlaceWords(segment=channel.mapped, comm=comm))
            if comm and channel not in known:
                self._c.dcc_join_in_band(channel.mapped)

    def report(self, step: int, iteration_s: float, loss: float | None) -> None:
        """The step that ended, for the control plane."""
        self._c.dcc_boundary_report(
            self._places, len(self._places), step, round(iteration_s * 1e9), math.nan if loss is None else loss
        )

    def bring(self, step_ns: int = 0) -> None:
        """Fills in ``words``: what this process would put in force, and what a step takes it; 0 if that is unknown."""
        self._c.dcc_boundary_bring(self._places, len(self._places), self._at)
        self.words[-1] = step_ns

    def take(self) -> int:
        """By the result in ``words``, puts in force what all ranks brought. Returns how many communicators have been
        found out of step: their ranks end a step after different numbers of calls, so nothing changes there again."""
        return int(self._c.dcc_boundary_take(self._places, len(self._places), self._at))

    @property
    def step_ns(self) -> int:
        """By the result in ``words``: what a step takes the fastest rank. The same on all ranks."""
        return int(self.words[-1])

    @property
    def offering(self) -> bool:
        """A table is being agreed on."""
        return any(place.offered for place in self._places)
