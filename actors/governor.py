"""How much is profiled: what the plugin takes of a training process is held within a budget.

Runners measure it, by what the plugin has timed of itself. The coordinator turns it into a *duty* for each
communicator: one window of calls in 2^duty is profiled (docs/channel.md), the same one on all ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from dynamiccl_ray.actors.messages import EpochContext
from dynamiccl_ray.actors.ranks import Rank
from dynamiccl_ray.config.overhead import Overhead
from dynamiccl_ray.plugin_bridge.layout import MOST_DUTY

STRETCH_S: Final = 2.0
"""Over less, the few calls that are timed say little."""
LEAD: Final = 4
"""Communicators that exploit are this many halvings ahead of those that learn."""
RELAX: Final = 0.4
"""Of the budget: with so little, twice as much is profiled."""


class Meter:
    """What the plugin takes of the processes that a runner serves."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._began: dict[Rank, tuple[int, float]] = {}
        self._duty: dict[int, int] = {}
        self._share = math.nan

    def follow(self, context: EpochContext, ranks: Collection[Rank]) -> None:
        """Tells the plugins what to profile."""
        duty = {comm.comm: comm.duty for comm in context.comms}
        for rank in ranks:
            rank.channel.govern(duty.get(rank.comm, self._duty.get(rank.comm, 0)))
        if any(self._duty.get(comm, 0) != n for comm, n in duty.items()):
            self._begin(ranks)  # what was measured until now is no answer
        self._duty |= duty

    def leave(self, ranks: Collection[Rank]) -> None:
        """Nobody reads from now on, so next to nothing is profiled; whoever comes next says what they want."""
        for rank in ranks:
            rank.channel.govern(MOST_DUTY)

    def look(self, ranks: Collection[Rank]) -> None:
        """From time to time."""
        span_s = self._clock() - self._since
        if span_s < STRETCH_S:
            return
        own_ns: dict[int, int] = {}
        stepped_s: dict[int, float] = {}
        for rank in ranks:
            if rank in self._began:
                own, stepped = self._began[rank]
                own_ns[rank.pid] = own_ns.get(rank.pid, 0) + rank.channel.status.own_ns - own
                stepped_s[rank.pid] = max(stepped_s.get(rank.pid, 0.0), rank.stepped_s - stepped)
        for rank in ranks:
            if own_ns.get(rank.pid, 0) > 0:  # an idle job says nothing
                share = own_ns[rank.pid] / 1e9 / (min(stepped_s[rank.pid], span_s) or span_s)
                rank.channel.note_overhead(share)
                self._share = share if math.isnan(self._share) else max(self._share, share)
        self._begin(ranks)

    def take(self) -> float:
        """The largest share of a process's time since this was asked last; NaN if nothing new is known."""
        share, self._share = self._share, math.nan
        return share

    def _begin(self, ranks: Collection[Rank]) -> None:
        self._since = self._clock()
        self._began = {rank: (rank.channel.status.own_ns, rank.stepped_s) for rank in ranks}


class Governor:
    """The coordinator's part."""

    def __init__(self, settings: Overhead) -> None:
        self._settings = settings
        self._heard = math.nan
        self._pressure = 0
        self.share: float | None = None
        """Of a process's time, the largest that was measured last."""

    def hear(self, share: float) -> None:
        """What a runner has measured; NaN for nothing."""
        if not math.isnan(share):
            self._heard = share if math.isnan(self._heard) else max(self._heard, share)

    def end_epoch(self, *, exploiting: bool) -> None:
        """Moves the duty. ``exploiting``: some communicator only uses what it has learned."""
        if math.isnan(self._heard):
            return
        self.share, self._heard = self._heard, math.nan
        over = self.share / (self._settings.max_percent / 100)
        if over > 1:
            least = 0 if exploiting else LEAD
            self._pressure = min(max(self._pressure, least) + math.ceil(math.log2(over)), LEAD + MOST_DUTY)
        elif over <= RELAX and self._pressure > 0:
            self._pressure -= 1

    def duty(self, *, learning: bool) -> int:
        """Of a communicator."""
        if self._settings.profile_one_in is not None:
            return self._settings.profile_one_in.bit_length() - 1
        return min(max(self._pressure - (LEAD if learning else 0), 0), MOST_DUTY)

    def status(self, duties: dict[str, int]) -> dict[str, Any]:
        """As JSON; ``duties`` by communicator."""
        return {
            "percent": None if self.share is None else 100 * self.share,
            "max_percent": self._settings.max_percent,
            "profiled_one_in": {comm: 1 << duty for comm, duty in duties.items()},
        }
