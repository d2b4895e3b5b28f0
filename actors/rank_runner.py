"""The rank-local actor: drains its ranks' records, infers the next table beside them, and takes part in agreement.

An RLlib EnvRunner: ``sample`` runs one round of decision epochs on the live job and returns the episodes that came to
their end. Every runner computes the same decisions from (weights, context, seed); each returns the streams of its own
share of the keys, so that nothing is learned twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, NotRequired, TypedDict

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.actors.governor import Meter
from dynamiccl_ray.actors.messages import (
    COLLECTIVE_DTYPE,
    Collectives,
    CommContext,
    CommReport,
    Coordination,
    EpochContext,
    Member,
)
from dynamiccl_ray.actors.ranks import Rank
from dynamiccl_ray.actors.reduction import Matching, by_the_node
from dynamiccl_ray.actors.runner import PolicyRunner
from dynamiccl_ray.actors.serving import Serving
from dynamiccl_ray.actors.streams import Streams
from dynamiccl_ray.actors.waiting import Waiting
from dynamiccl_ray.actors.watchdog import STOPPED_S, Watchdog
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.control.agreement import Answer, Decision
from dynamiccl_ray.control.drawing import Drawer
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.heap import trim
from dynamiccl_ray.plugin_bridge.layout import GPU_TIMERS_ABI, Prepared

log = logging.getLogger("dynamiccl.runner")

# The hold lies this many times the usual way to the coordinator and back ahead. Too near costs a wait at the hold,
# too far only delays the switch.
HOLD_FACTOR: Final = 2.0
FIRST_PROMISE_S: Final = 0.02
PROMISE_SMOOTHING: Final = 0.1
# A hold lies no further ahead, however long an answer took lately: it comes when the coordinator is there again.
MOST_AHEAD_S: Final = 0.5
# Longer than the way to a decision may take; a runner that is silent for so long while ranks may wait is killed.
WATCHED_S: Final = 3.0
# What is left behind comes into force at a later call, or at the end of a step.
RELEASED_S: Final = 3.0
LEAST_MARGIN: Final = 8
POLL_S: Final = 0.001
QUIET_POLL_S: Final = 0.02
WATCH_POLL_S: Final = 0.2
LOOK_AFTER_S: Final = 0.25
IDLE_S: Final = 0.2


class RankEnv(TypedDict):
    """``config.env_config`` of a ``RankRunner``."""

    experiment: Online
    coordination: Callable[[], Coordination]
    """Called to reach the coordinator, in the runner's process."""
    advance: NotRequired[Callable[[], None]]
    """Lets a played job go on by one step and returns when it stands still: epochs then begin and end at the same call
    in every run, and a run can be repeated exactly."""
    per_node: int
    """So many runners share the processes of a node."""
    phase_rounds: NotRequired[Callable[[], int]]
    """For the learner: rounds since the phase began."""


class RankRunner(PolicyRunner):
    """``config.env_config`` is a ``RankEnv``."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        env: RankEnv = config.env_config
        self._coordination = env["coordination"]()
        self._experiment = env["experiment"]
        self._job = self._experiment.job
        self._advance = env.get("advance")
        self._name = f"{os.uname().nodename}:{self.worker_index or 0}"
        self._serving = Serving(self._job, env["per_node"])
        self._matching: dict[int, Matching] = {}
        self._collected: dict[int, list[Collectives]] = {}
        self._version: dict[int, int] = {}
        self._staged: dict[int, bytes] = {}
        self._heard: set[int] = set()
        self._offered: defaultdict[int, set[int]] = defaultdict(set)
        self._promise_s = FIRST_PROMISE_S
        self._term = self._applied_since = 0
        self._looked_at, self._meter = 0.0, Meter()
        self._failed = False
        """A switch of this epoch was aborted: there is nothing to wait for before it is tried again."""
        sequence = self._experiment.control.learning.sequence
        self._drawer = Drawer(self.module.net, seed=self._experiment.seed, sequence=sequence)
        # Which one of how many runners this is in a round: they come and go.
        self._share = (0, 1)
        self._streams = Streams(lambda key: key % self._share[1] == self._share[0], sequence)
        # A driver that runs its ranks itself may be stopped, as with Ctrl-Z: no other actor waits for it.
        stopped_s = STOPPED_S if self.worker_index else None
        self._watchdog: Watchdog | None = None if self._advance else Watchdog(WATCHED_S, stopped_s)
        self._serving.look()
        self._serving.renew()

    # -- RLlib's interface --

    def stop(self) -> None:
        self._serving.close()
        if self._watchdog is not None:
            self._watchdog.close()

    def sample(self, *, share: tuple[int, int] = (0, 1), **_: Any) -> list[SingleAgentEpisode]:
        """One round: decision epochs until the coordinator ends it. Returns the keys of share i of n."""
        self._share = share
        self._renew()
        if not self._serving.ranks:
            time.sleep(IDLE_S)
        context = self._join()
        self._settle_all()  # a restarted runner: its ranks may be waiting
        while not (context.stop or context.release):
            decided, entropy = {}, []
            self._failed = False
            if context.greedy:
                # What is drawn in shadow is never tried: nothing says how what was open has ended.
                self._streams.keep(())
            for comm in context.comms:
                self._offered[comm.comm] = set(comm.keys[comm.offered].tolist())
                drawn = self._drawer.draw(comm.due, greedy=context.greedy)
                decided[comm.comm] = comm.due.actions(drawn.actions)
                entropy += drawn.entropy.tolist()
                if not context.greedy:
                    self._streams.advance(comm, drawn)
                if not self._switch(comm, context, decided[comm.comm]):
                    # The coordinator is gone, or thinks that this runner is: nothing is decided until they have met.
                    self._join()
                    self._settle_all()
                    return self._streams.episodes()
            self._collect(context)
            reports = [self._report(comm, decided.get(comm, _NOTHING)) for comm in self._serving.comms]
            # Another runner may have died: its ranks must not wait for as long as the coordinator waits for it.
            context = self._coordination.report(
                self._name, context.epoch, reports, float(np.mean(entropy)) if entropy else None, self._look_around
            )
            if context.round_end or context.term != self._term:
                break
            if self._serving.changed:
                self._renew()
                context = self._join()
        return self._streams.episodes()

    def activate(self, state: dict[str, Any]) -> float:
        """Takes weights, decides with them and waits until the new table is in force on this runner's ranks. Returns
        the machine's monotonic time then. For ``dynamiccl bench activation``."""
        self.set_state(state)
        context = self._join()
        reports = {}
        for comm in context.comms:
            decided = comm.due.actions(self._drawer.draw(comm.due).actions)
            self._switch(comm, context, decided)
            reports[comm.comm] = decided
        while not all(rank.channel.fold() for rank in self._serving.ranks):
            time.sleep(0.0002)
        at = time.monotonic()
        self._drain()
        self._coordination.report(self._name, context.epoch, [self._report(c, d) for c, d in reports.items()], None)
        return at

    def release(self) -> None:
        """Leaves behind what the coordinator wants at the end of a run."""
        self._serving.look()
        self._renew()
        context = self._join()
        for comm in context.comms if context.release else ():
            self._switch(comm, context, _NOTHING)
        self._meter.leave(self._serving.ranks)
        deadline = time.monotonic() + RELEASED_S
        while not all(rank.stands_still() for rank in self._serving.ranks) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._join()

    def _renew(self) -> None:
        """Serves what has come and lets go of what is gone, after the last report of it."""
        changed = self._serving.changed
        self._serving.renew()
        for of_comms in (self._matching, self._collected, self._version, self._staged, self._offered):
            for comm in of_comms.keys() - set(self._serving.comms):
                del of_comms[comm]
        self._heard &= set(self._serving.comms)
        self._streams.keep(self._serving.comms)
        if changed:
            trim()

    def _join(self) -> EpochContext:
        """Shows the coordinator how the ranks stand, under the term that it has by then."""
        while True:
            term, members = self._term, [rank.shown_to(self._term) for rank in self._serving.ranks]
            gone = frozenset(self._serving.dead)
            context = self._coordination.join(self._name, members, gone)
            self._serving.dead.difference_update(gone)
            self._term = context.term
            if term == context.term:
                return context

    # -- decisions --

    def _switch(self, comm: CommContext, context: EpochContext, decided: Int64) -> bool:
        """Puts the decisions in force on all ranks, or none; skipped when nothing changes. False if nobody could say
        which."""
        actions = comm.wanted.copy()
        actions[comm.due.row] = decided
        if comm.off:
            actions[:] = OWN_ACTION
        told = np.flatnonzero(actions != OWN_ACTION)
        wanted = dict(zip(comm.keys[told].tolist(), actions[told].tolist(), strict=True))
        mine = self._serving.of(comm.comm)
        settled = [self._settle(rank) for rank in mine]
        self._version[comm.comm] = comm.version_in_force
        staged = comm.in_band and any(rank.has_staged for rank in mine)
        if comm.comm in context.adopt:
            table = DecisionTable.from_bytes(context.adopt[comm.comm]).with_version(context.version)
        elif wanted == comm.in_force and (comm.applied == context.apply or not wanted) and not staged:
            return True
        else:
            table = DecisionTable.of_flat(
                context.version, comm.keys[told], actions[told], max_channels=comm.max_channels, apply=context.apply
            )
        if comm.in_band:
            self._stage(comm.comm, table, mine)
            return True
        with self._watchdog.armed() if self._watchdog is not None else contextlib.nullcontext():
            return self._agree(comm, context.version, table, dict(zip(mine, settled, strict=True)))

    def _stage(self, comm: int, table: DecisionTable, ranks: list[Rank]) -> None:
        """Hands a table to the job. Where some rank does not take it, none puts it in force, and the next one may."""
        for rank in ranks:
            rank.channel.stage(table)
        self._staged[comm] = table.to_bytes()
        self._version[comm] = table.version

    def _agree(self, comm: CommContext, version: int, table: DecisionTable, ranks: dict[Rank, bool]) -> bool:
        """PREPARE on the ranks that may (the others refuse), and what was decided. False if nobody could say."""
        answers = []
        for rank, may in ranks.items():
            if not may:
                answers.append(Answer(rank=rank.rank, digest=table.digest, hold_at=None))
                continue
            # A job that stands still is overtaken by nothing.
            margin = 0
            if self._advance is None:
                margin = LEAST_MARGIN + int(rank.rate_hz * min(HOLD_FACTOR * self._promise_s, MOST_AHEAD_S))
            outcome, hold_at, digest = rank.channel.prepare(table, margin)
            prepared = outcome is Prepared.PREPARED
            answers.append(
                Answer(
                    rank=rank.rank,
                    digest=digest if prepared else table.digest,
                    hold_at=hold_at if prepared else None,
                )
            )
        asked = time.monotonic()
        decision = self._coordination.promise(self._name, comm.comm, version, answers, table.to_bytes(), self._term)
        if decision is None:
            return False
        self._promise_s += PROMISE_SMOOTHING * (time.monotonic() - asked - self._promise_s)
        for rank in ranks:
            rank.channel.decide(version, decision.switch_at)
        if decision.switch_at is not None:
            self._version[comm.comm] = version
        else:
            self._failed = True
        return True

    def _ask(self, member: Member) -> Decision | None:
        return self._coordination.settle(member)

    def _settle(self, rank: Rank) -> bool:
        """A rank whose runner died, or could not reach the coordinator, waits at its hold until somebody tells it the
        decision. Whoever is on its node can, long before its own runner is back. False if nobody knows it yet."""
        return rank.settle(self._ask, self._term)

    def _settle_all(self) -> None:
        """Of this runner, and those that nobody serves."""
        for rank in self._serving.ranks:
            self._settle(rank)
        self._serving.look(self._settle)

    # -- measuring --

    def _collect(self, context: EpochContext) -> None:
        """Waits until this epoch's decisions have been measured on every rank here, or time is up."""
        settings = self._experiment.epochs
        self._applied_since = context.applied_since
        self._meter.follow(context, self._serving.ranks)
        if self._advance is not None:
            self._collect_in_steps(context, self._advance)
            return
        served = set(self._serving.comms)
        waiting = Waiting(context, self._version, served, patience=settings.watch_s, heard=self._heard)
        limit = settings.watch_s if context.watching else IDLE_S if waiting.idle else settings.most_s
        limit = min(limit, IDLE_S) if self._failed else limit
        deadline = time.monotonic() + limit
        others = self._coordination.others_done(context.epoch)
        watch_nap = min([WATCH_POLL_S, limit, *(rank.unseen_s for rank in self._serving.ranks)])
        watch_nap = max(watch_nap, QUIET_POLL_S)
        nap = POLL_S
        while True:
            came = self._drain(waiting)
            if others():
                waiting.close()
            if waiting.done() or time.monotonic() > deadline:
                break
            if self._look_around():
                self._drain()  # what is left of ranks that are gone
                break
            # No longer than it has been quiet: what comes 30 times a second is not looked for 1,000 times.
            nap = watch_nap if context.watching else POLL_S if came else min(2 * nap, QUIET_POLL_S)
            time.sleep(nap)
        for rank in self._serving.ranks:
            rank.look()
        self._meter.look(self._serving.ranks)

    def _collect_in_steps(self, context: EpochContext, advance: Callable[[], None]) -> None:
        """The same with a job that stands still between two steps: time is counted in these."""
        steps = 0
        waiting = Waiting(context, self._version, set(self._serving.comms), clock=lambda: steps, heard=self._heard)
        limit = _WATCH_STEPS if waiting.idle else _MOST_STEPS
        while steps < limit and not waiting.done():
            advance()
            steps += 1
            # NCCL's proxy thread may miss a kernel, and never say so.
            deadline = time.monotonic() + _STILL_S
            while not self._all_still() and time.monotonic() < deadline:
                self._drain(waiting)
                time.sleep(POLL_S / 4)
            self._drain(waiting)
            for rank in self._serving.ranks:
                rank.give_up()
        self._serving.look()

    def _all_still(self) -> bool:
        return all(rank.standing_still for rank in self._serving.ranks if rank.channel.alive)

    def _drain(self, waiting: Waiting | None = None) -> bool:
        """Takes what has been measured, and matches it over the ranks here. Whether there was something."""
        parts: dict[int, list[Collectives]] = {}
        for rank in self._serving.ranks:
            part = rank.drain(applied_since=self._applied_since)
            if len(part):
                parts.setdefault(rank.comm, []).append(part)
            rank.channel.fold()
        for comm, of_ranks in parts.items():
            here = self._serving.of(comm)
            matched = self._matching.setdefault(comm, Matching()).take(of_ranks, len(here))
            if len(matched):
                of = here[0].channel.identity
                # The time of played jobs is not that of any clock.
                if self._experiment.fabric.kind == "nccl" and of.profiler_abi >= GPU_TIMERS_ABI:
                    matched = by_the_node(matched, [rank.rank for rank in here], of.ranks, of.nodes)
                self._collected.setdefault(comm, []).append(matched)
                if waiting is not None:
                    waiting.count(comm, matched)
        return bool(parts)

    def _look_around(self) -> bool:
        """A few times a second: no rank on this node may wait. Whether ranks have come or gone."""
        now = time.monotonic()
        if now - self._looked_at <= LOOK_AFTER_S:
            return False
        self._looked_at = now
        for rank in self._serving.ranks:
            self._settle(rank)
        return self._serving.look(self._settle)

    def _report(self, comm: int, decided: Int64) -> CommReport:
        """This epoch's collectives of one communicator, and what is new in its segments."""
        ranks = self._serving.of(comm)
        matching = self._matching.setdefault(comm, Matching())
        given_up, matching.given_up = matching.given_up, 0
        refused = {key: action for rank in ranks for key, action in rank.refused().items()}
        costs = {key: cost for rank in ranks for key, cost in rank.costs().items() if key not in self._offered[comm]}
        return CommReport(
            comm=comm,
            collectives=np.concatenate([np.zeros(0, COLLECTIVE_DTYPE), *self._collected.pop(comm, [])]),
            unmatched=given_up,
            decided=decided,
            refused=refused,
            costs=costs,
            max_channels=max(rank.max_channels for rank in ranks),
            ranks={rank.rank: rank.news() for rank in ranks},
            overhead=self._meter.take(),
            staged=self._staged.pop(comm, None),
        )


_NOTHING: Final = np.zeros(0, np.int64)
# Of a played job that goes on step by step: in an epoch in which no key is waited for, and in any.
_WATCH_STEPS: Final = 8
_MOST_STEPS: Final = 256
# Longer than any record takes from a kernel to its ring.
_STILL_S: Final = 1.0
