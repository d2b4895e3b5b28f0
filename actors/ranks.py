"""The ranks that a runner serves: their segments, what is drained from them, what they say beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.actions import OWN_ACTION, flat_action
from dynamiccl_ray.actors.messages import COLLECTIVE_DTYPE, Collectives, Member, RankNews
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.control.agreement import Decision, Standing
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_ALGORITHMS, N_PROTOCOLS, OWN_PAIR
from dynamiccl_ray.plugin_bridge.channel import Channel, Status
from dynamiccl_ray.plugin_bridge.clocks import Clock
from dynamiccl_ray.plugin_bridge.coverage import Coverage
from dynamiccl_ray.plugin_bridge.layout import ABORT, AGGREGATE, APPLIED, DECIDED, RECORD_DTYPE, RING_RECORDS, UNDECIDED
from dynamiccl_ray.plugin_bridge.timers import TimerCheck

_CHUNK_LOG2 = np.array([max(0, chunk.bit_length() - 1) for chunk in CHUNK_VALUES])
_ROOM = 1 << 16


@dataclass(eq=False)
class Rank:
    """One claimed segment."""

    channel: Channel
    comm: int
    rank: int
    max_channels: int = 1
    rate_hz: float = 0.0
    """Calls of getCollInfo per second, lately; 0 until two looks are far enough apart."""
    stepped_s: float = 0.0
    """Time of the steps that the job has reported, as far as they were seen one by one or alike."""
    _timers: TimerCheck = field(default_factory=TimerCheck)
    _clock: Clock = field(default_factory=Clock)
    _looked: tuple[float, int] | None = None
    # Before the last look; calls by then.
    _unused: int = 0
    _costs: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    _reports: int = 0
    _steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    _step_s: float = np.inf
    _faults: int = 0
    _refused: dict[int, int] = field(default_factory=dict)
    _entries: tuple[tuple[int, int], ...] = ()
    _entries_of: int = 0
    _given_up: int = 0

    @cached_property
    def pid(self) -> int:
        return self.channel.identity.pid

    @property
    def member(self) -> Member:
        identity, status, table = self.channel.identity, self.channel.status, self._table()
        return Member(
            comm=self.comm,
            rank=self.rank,
            ranks=identity.ranks,
            nodes=identity.nodes,
            tuner_abi=identity.tuner_abi,
            profiler_abi=identity.profiler_abi,
            user_env=identity.user_env,
            name=identity.comm_name,
            standing=Standing(
                base=status.base_version,
                base_at=status.base_at,
                pending=status.pending_version,
                switch_at=status.decision if status.decision not in (UNDECIDED, ABORT) else None,
            ),
            term=status.term,
            in_band=status.in_band and not status.out_of_step,
            in_force=0 if table is None else table.version,
            table=self._entries,
        )

    @property
    def has_staged(self) -> bool:
        """In band: a table is on its way that is not in force yet."""
        status = self.channel.status
        return status.staged_version > 0 or status.offered_version > 0

    def stands_still(self) -> bool:
        """No table is on its way, in band or otherwise."""
        return self.channel.fold() and not self.has_staged

    def shown_to(self, term: int) -> Member:
        """How the rank stands, for the coordinator of ``term``. The mark comes before the look: what is shown stays
        true as long as the mark is there."""
        self.channel.show_to(term)
        return self.member

    def settle(self, ask: Callable[[Member], Decision | None], term: int) -> bool:
        """Folds what has been decided, and asks the coordinator of ``term`` about a version that a runner promised to
        and then died. False if nobody knows yet: calls wait at the hold meanwhile."""
        if self.channel.fold():
            return True
        status = self.channel.status
        if status.decision != UNDECIDED:
            return True
        if not status.promised:  # its runner died before anyone could hear of a promise
            return self.channel.decide(status.pending_version, None)
        decision = ask(self.shown_to(term))
        return decision is not None and self.channel.decide(decision.version, decision.switch_at)

    def _table(self) -> DecisionTable | None:
        """In force; its entries are taken out once."""
        table = self.channel.table
        if table is None:
            self._entries_of, self._entries = 0, ()
        elif table.version != self._entries_of:
            flat = table.flat()
            keys = np.flatnonzero(flat)
            self._entries_of = table.version
            self._entries = tuple(zip(keys.tolist(), flat[keys].tolist(), strict=True))
        return table

    def drain(self, *, applied_since: int) -> Collectives:
        """What has been measured since the last call, each decision once. Tables are applied from a version on."""
        rejected = self._timers.rejected
        records = self._timers.take(self.channel.drain(_buffer()))
        self._unused += self._timers.rejected - rejected
        self._listen()
        usable = records["flags"] & DECIDED != 0
        asked, applied = _asked(records), records["flags"] & APPLIED != 0
        refused = usable & (asked != OWN_ACTION) & ~applied & (records["version"] >= applied_since)
        self._refused |= dict(zip(records["key"][refused].tolist(), asked[refused].tolist(), strict=True))
        usable &= ~refused
        self._unused += int(np.count_nonzero(~usable))
        records = records[usable]
        if len(records):
            self.max_channels = max(self.max_channels, int(records["channels"].max()))
        return collectives_of(records, self._clock)

    def _listen(self) -> None:
        """Keeps what the training script has reported since the last look."""
        said = self.channel.job
        if said is None:
            return
        self._faults = said.faults
        if said.reports != self._reports:
            self.stepped_s += max(said.reports - self._reports, 0) * said.iteration_s
            self._reports, self._step_s = said.reports, said.iteration_s
            self._steps[said.step] = (said.iteration_s, said.loss)

    def look(self) -> None:
        """Marks the segment as looked after, and estimates how fast calls come."""
        self.channel.beat()
        # From before the one look to after the other: a process that is held up in between sees fewer calls a second,
        # never more.
        before, calls, after = time.monotonic(), self.channel.status.dseq, time.monotonic()
        if self._looked is None:
            self._looked = before, calls
        elif after - self._looked[0] >= _RATE_S:
            self.rate_hz = (calls - self._looked[1]) / (after - self._looked[0])
            self._looked = before, calls

    @property
    def unseen_s(self) -> float:
        """For how long it may go unseen until its ring is a quarter full (the plugin drops what does not fit) or a step
        of its job is missed; infinity if neither is known to happen."""
        ring_s = RING_RECORDS / 4 / self.rate_hz if self.rate_hz else np.inf
        return min(ring_s, self._step_s / 2)

    def news(self) -> RankNews:
        """What is new beside the records."""
        status = self.channel.status
        unused, self._unused = self._unused, 0
        steps, self._steps = self._steps, {}
        return RankNews(
            fingerprints=self.channel.fingerprints(),
            dropped=sum(status.dropped.values()),
            unused=unused,
            steps=steps,
            faults=self._faults,
            in_force=status.base_version,
            coverage=Coverage.of(status),
            hold_wait_s=status.hold_wait_us / 1e6,
        )

    def refused(self) -> dict[int, int]:
        """Key -> flat action that NCCL did not take, since the last call."""
        refused, self._refused = self._refused, {}
        return refused

    def costs(self) -> dict[int, npt.NDArray[np.float32]]:
        """Of all keys that the segment knows by now, NCCL's own cost table."""
        rows = self.channel.cost_rows(len(self._costs))
        self._costs |= {int(row["key"]): row["cost_us"].copy() for row in rows}
        return self._costs

    @property
    def standing_still(self) -> bool:
        """Every call that was made has been measured, drained, or counted as lost, but for those that were given up."""
        status = self.channel.status
        return status.backlog == 0 and self._unmeasured(status) <= self._given_up

    def give_up(self) -> None:
        """Waits no longer for what has not been measured by now."""
        self._given_up = self._unmeasured(self.channel.status)

    @staticmethod
    def _unmeasured(status: Status) -> int:
        return status.dseq - status.records - sum(status.dropped.values()) - status.unprofiled


_RATE_S = 0.05
"""Over less, one burst of calls looks like a rate."""
_shared: npt.NDArray[Any] | None = None


def _buffer() -> npt.NDArray[Any]:
    """Where records are drained to; one for all ranks of the process, because what is drained is copied on."""
    global _shared
    if _shared is None:
        _shared = np.empty(_ROOM, RECORD_DTYPE)
    return _shared


def collectives_of(records: npt.NDArray[Any], clock: Clock) -> Collectives:
    """What records of ``RECORD_DTYPE`` of one rank say."""
    out = np.zeros(len(records), COLLECTIVE_DTYPE)
    for name in ("dseq", "bytes", "version", "key", "channels"):
        out[name] = records[name]
    out["least_ns"] = out["most_ns"] = records["exec_ns"]
    out["start"], out["end"] = clock.on_host(records)
    out["first_end"] = out["end"]
    out["ranks"] = 1
    out["pair"] = _pairs(records)
    out["aggregate"] = records["flags"] & AGGREGATE != 0
    return out


def _asked(records: npt.NDArray[Any]) -> Int64:
    """(N,) flat action of each record's table entry."""
    pair = np.where(
        records["asked_algo"] == 255,
        OWN_PAIR,
        1 + N_PROTOCOLS * records["asked_algo"].astype(np.int64) + records["asked_proto"],
    )
    channels = np.searchsorted(CHANNEL_VALUES, records["asked_channels"])
    chunk = np.searchsorted(_CHUNK_LOG2, records["asked_chunk_log2"])
    return flat_action(pair, channels, chunk)


def _pairs(records: npt.NDArray[Any]) -> Int64:
    """(N,) the pair that NCCL says it used."""
    algo, proto = records["algo"].astype(np.int64), records["proto"].astype(np.int64)
    known = (algo < N_ALGORITHMS) & (proto < N_PROTOCOLS)
    return np.where(known, 1 + N_PROTOCOLS * algo + proto, OWN_PAIR)
