"""The coordinator: who serves which ranks, what all of them measured, what the control loop makes of it.

A plain object: nothing in it waits, so that the serial mode and most tests need no Ray; ``coordinator_actor.py`` puts
an asyncio front on it. Whatever must survive a restart goes to the store before anyone hears of it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.actors.contexts import NONE, comm_contexts, learns, of_comm
from dynamiccl_ray.actors.durability import pack, unpack
from dynamiccl_ray.actors.governor import Governor
from dynamiccl_ray.actors.intake import Intake, turn_off
from dynamiccl_ray.actors.membership import Membership, Place
from dynamiccl_ray.actors.messages import CommReport, EpochContext, Member
from dynamiccl_ray.actors.phases import Phases
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.reduction import Part, decisions, measured, positions
from dynamiccl_ray.actors.rewards import JobReward
from dynamiccl_ray.actors.status import Alarm, Epoch
from dynamiccl_ray.actors.steering import Steering, check
from dynamiccl_ray.agent.reward import total
from dynamiccl_ray.arrays import Float, Int64
from dynamiccl_ray.control import loop as control
from dynamiccl_ray.control.agreement import Agreement, Answer, Decision, Store, new_term
from dynamiccl_ray.control.loop import Due, Keys, Loop, Verdicts
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import DAMAGED, RunError, short
from dynamiccl_ray.keys import key_name
from dynamiccl_ray.plugin_bridge.layout import MOST_DUTY

log = logging.getLogger("dynamiccl.coordinator")

# Alarms that are remembered, and rounds in which nothing learns after which what was measured is saved all the same.
_ALARMS: Final = 2000
_SAVED_ROUNDS: Final = 32


class Coordinator:
    """Not thread-safe; every method returns at once. ``report`` and ``promise`` return None while others are missing.

    ``observer`` hears of every communicator's part of every epoch.
    """

    def __init__(self, plan: Plan, store: Store, observer: Callable[[Epoch], None] | None = None) -> None:
        self.plan = plan
        self.experiment = plan.experiment
        self._store = store
        self._observer = observer
        self.loop = Loop(plan.experiment.control)
        self.membership = Membership(self._new)
        self.phases = Phases(self.loop)
        self.governor = Governor(plan.experiment.overhead)
        self.intake = Intake(plan, self.loop, self.phases)
        self._reports: dict[str, list[CommReport]] = {}
        self._entropy: list[float] = []
        self.alarms: list[Alarm] = []
        self.next_version = 1
        self.term = new_term()
        self.stopping = False
        told = plan.experiment
        self.steering = Steering(told.mode, told.canary, told.control.guardrail)
        self._orders: deque[dict[str, Any]] = deque()
        self._keeping: bool | None = None
        # (K,) keys that the loop does not decide on, and what is wanted of each.
        self._held, self._wanted = np.zeros(0, np.bool_), NONE
        self._closed_at = time.monotonic()
        # What was saved last, and in which round.
        self._saved = b"", 0
        saved = store.get(f"{plan.run}/state")
        if saved is not None:
            self._restore(*unpack(saved))
        else:
            self.context = self._context(self._due(), {}, round_end=False)

    @property
    def comms(self) -> dict[int, Communicator]:
        """Every communicator by its id."""
        return self.membership.comms

    # -- runners --

    def join(self, runner: str, members: list[Member], gone: frozenset[Place] = frozenset()) -> EpochContext:
        """A runner serves these ranks from now on, and no others; it has seen that those of ``gone`` are no more."""
        self._outdo(members)
        self.membership.join(runner, members, gone)
        self.next_version = max([self.next_version, *(member.standing.newest + 1 for member in members)])
        for comm_id in {member.comm for member in members}:
            comm = self.comms[comm_id]
            if comm.complete and not comm.off:
                turn_off(comm, comm.disagreement() or self.plan.hands_off(comm.example))
        return self.context

    def _outdo(self, members: list[Member]) -> None:
        """Where another coordinator was shown a rank since, what was heard before is worth nothing: all ranks have to
        be heard again, under a term above its own."""
        met = max((member.term for member in members), default=0)
        if met > self.term:
            log.warning("another control plane serves, or served, ranks of this job; asking all ranks again")
            self.term = new_term(met)
            for comm in self.comms.values():
                comm.agreement = Agreement(comm.agreement.ranks, self.term)
            self.context = dataclasses.replace(self.context, comms=(), term=self.term)

    def leave(self, runner: str) -> None:
        """A runner is gone; its ranks wait for another one."""
        self.membership.leave(runner)
        self._reports.pop(runner, None)

    def missing_reports(self) -> set[str]:
        """Runners that the current epoch still waits for."""
        return self.membership.silent(self._reports)

    def _new(self, number: int, member: Member) -> Communicator:
        plan = self.plan
        tier = plan.topology_of(member).tier_max
        return Communicator(
            number=number,
            example=member,
            agreement=Agreement(plan.ranks_of(member), self.term),
            reward=JobReward(self.experiment.reward, sms=plan.sms, tier=tier, nodes=member.nodes),
        )

    def _forget(self, gone: list[Communicator]) -> None:
        """Their keys, and all that was measured of them."""
        if not gone:
            return
        kept = np.ones(len(self.loop), np.bool_)
        kept[np.concatenate([comm.rows for comm in gone])] = False
        self.loop.keep(kept)
        self.phases.keep(kept)
        moved = np.cumsum(kept) - 1
        for comm in self.comms.values():
            comm.rows = moved[comm.rows]

    # -- one epoch --

    def report(self, runner: str, epoch: int, comms: list[CommReport], entropy: float | None) -> EpochContext | None:
        """Takes one runner's epoch. Returns the next context once it is there."""
        if not self.knows(runner):
            # Given up on, or from before a restart of the coordinator: it has to join again.
            return dataclasses.replace(self.context, round_end=True)
        if epoch < self.phases.epoch:
            return self.context  # asked again: that epoch is closed
        self._reports[runner] = comms
        if entropy is not None:
            self._entropy.append(entropy)
        return None if self.missing_reports() else self.close_epoch()

    def handed_in(self, epoch: int) -> bool:
        """Whether some runner has reported this epoch, or it shall end because an operator wants something."""
        return bool(self._reports) or bool(self._orders) or self.phases.epoch > epoch

    def close_epoch(self, *, cut: bool = False) -> EpochContext:
        """Reduces what was reported, moves the run on, and makes the next context. ``cut`` ends the round as well, so
        that whoever drives the runners can bring back the ones that are missing."""
        reports: dict[int, list[CommReport]] = {}
        for report in (r for of_runner in self._reports.values() for r in of_runner):
            if report.comm in self.comms:
                reports.setdefault(report.comm, []).append(report)
        asked = {c.comm: c.due for c in self.context.comms}
        for report in (report for of in reports.values() for report in of):
            self.governor.hear(report.overhead)
        parts = [self.intake.take(self.comms[comm], of, asked.get(comm)) for comm, of in reports.items()]
        phases = [self.loop.phase[part.rows] for part in parts]
        row = np.concatenate([NONE, *(part.rows for part in parts)])
        self._notice(self.loop.observe(measured(parts)), parts)
        closed = self.loop.closed
        self._obey()
        due = self._due()
        rewards = self._judge(due, parts, phases, closed)
        if self.phases.end_epoch(row, self._entropy):
            for comm in self.comms.values():
                comm.reward.forget_steps()
        self._reports, self._entropy = {}, []
        self.governor.end_epoch(exploiting=not all(self._learns(comm) for comm in self.comms.values()))
        round_end = self.context.watching or self.phases.epochs_in_round >= self.experiment.epochs.per_round
        known = len(self.loop)
        self._forget(self.membership.bury())
        if round_end or cut:
            self._end_round()
        if len(self.loop) != known:
            due = self._due()  # keys have other rows
        self.context = self._context(due, rewards, round_end=round_end or cut)
        return self.context

    def _notice(self, alarms: list[control.Drift], parts: list[Part]) -> None:
        first = np.cumsum([0, *(len(part.rows) for part in parts)])
        for alarm in alarms:
            group = self.loop.keys.group[alarm.row]
            comm_id, comm = next((c, comm) for c, comm in self.comms.items() if comm.number == group)
            key = int(comm.keys[comm.rows == alarm.row][0])
            # A sample of an epoch before this one belongs to a decision that began then.
            dseq = comm.last_dseq
            if alarm.sample >= 0:
                of = int(np.searchsorted(first, alarm.sample, "right")) - 1
                dseq = int(parts[of].collectives["dseq"][alarm.sample - first[of]])
            alarm_of = Alarm(comm=comm_id, key=key, dseq=dseq, epoch=self.phases.epoch, anew=alarm.anew)
            self.alarms = [*self.alarms, alarm_of][-_ALARMS:]
            then = "learning anew" if alarm.anew else "its choice was checked, and stands"
            log.info("the times of %s have changed by call %d: %s", key_name(key), dseq, then)
            if alarm.anew and self.intake.at_baseline(comm):
                comm.reward.shift()

    def _judge(self, due: Due, parts: list[Part], phases: list[Int64], closed: Verdicts) -> dict[int, Float]:
        """By communicator, (R,) the reward of those of its keys that are due. ``closed``: what was decided and is over
        by now."""
        rewards = {}
        before, self._closed_at = self._closed_at, time.monotonic()
        took_s = self._closed_at - before
        for part, phase in zip(parts, phases, strict=True):
            comm = self.comms[part.comm]
            mine = of_comm(self.loop, due, comm)
            keys = comm.keys[positions(comm.rows, due.row[mine])]
            terms = comm.reward.terms(due.outcome.part(mine), keys, part.collectives, max_channels=comm.max_channels)
            rewards[part.comm] = total(terms)
            over = decisions(closed, comm.rows, comm.keys, applied=self.context.apply)
            comm.weigh(over)
            if self._observer is not None:
                self._observer(
                    Epoch(
                        number=self.phases.epoch,
                        comm=part.comm,
                        ranks=comm.example.ranks,
                        nodes=comm.example.nodes,
                        name=comm.example.name,
                        version=comm.version,
                        phase=self.phases.phase,
                        samples=part.samples(phase),
                        took_s=took_s,
                        judged=keys,
                        terms=terms,
                        decisions=over,
                    )
                )
        return rewards

    def _end_round(self) -> None:
        self.steering.widen(self.loop, self.comms.values())
        served = [comm.version for comm in self.comms.values() if comm.members]
        self.phases.end_round(max(served, default=0))
        self._forget(self.membership.forget())
        limit = self.experiment.stop.rounds
        if limit is not None and self.phases.round >= limit:
            self.stopping = True
        if self._decided_of() != self._saved[0] or self.phases.round >= self._saved[1] + _SAVED_ROUNDS:
            self.save()

    # -- agreement --

    def promise(
        self, runner: str, comm_id: int, version: int, answers: list[Answer], table: bytes | None, term: int
    ) -> Decision | None:
        """Takes the answers of one runner's ranks; None while other ranks have not answered, and for a runner that has
        yet to join: of its ranks nothing is known."""
        if not self.knows(runner) or term != self.term:
            return None
        comm = self.comms.get(comm_id)
        if comm is None:
            return None
        decision: Decision | None = None
        for answer in answers:
            if answer.rank == comm.agreement.leader and table is not None:
                comm.propose(DecisionTable.from_bytes(table))
                comm.adopt = table
            decision = comm.agreement.answer(version, answer)
        if decision is not None:
            self._decided(comm, decision)
        return decision

    def knows(self, runner: str) -> bool:
        """Whether it has joined since this coordinator began, and was not given up on."""
        return runner in self.membership.runners

    def release(self, *, keep: bool) -> None:
        """The run ends: what is wanted from now on is NCCL's own choice, with ``keep`` but for keys that exploit. Asked
        again, under another version."""
        self._keeping = keep
        self.context = self._context(self._due(), {}, round_end=True)

    def open_version(self, comm_id: int) -> int | None:
        """The version whose answers are being gathered."""
        comm = self.comms.get(comm_id)
        return None if comm is None else comm.agreement.open_version

    def abort(self, comm_id: int, version: int) -> Decision | None:
        """Time is up for a version that this coordinator has opened; returns what holds, None of a communicator that is
        no more."""
        comm = self.comms.get(comm_id)
        if comm is None:
            return None
        decision = comm.agreement.abort(version)
        self._decided(comm, decision)
        return decision

    def settle(self, member: Member) -> Decision | None:
        """What holds about the version that a rank is open on; None until all of its communicator have been heard."""
        self._outdo([member])
        comm = self.membership.hear(member)
        if member.term != self.term:
            return None
        decision = comm.agreement.resolve(member.standing.pending)
        if decision is not None:
            self._decided(comm, decision)
        return decision

    def _decided(self, comm: Communicator, decision: Decision) -> None:
        if decision.switch_at is not None and decision.version in comm.tables:
            comm.switch(decision.version)
        if not decision.adopt_leader:
            comm.adopt = None

    # -- what an operator wants --

    def order(self, order: Any) -> None:
        """An order for ``Steering``: the epoch that is under way ends early, and the next one follows it. May be called
        from any thread. Raises ConfigError for what is no order."""
        self._orders.append(check(order))

    def _obey(self) -> None:
        if not self._orders:
            return
        while self._orders:
            order = self._orders.popleft()
            log.info("told: %s", order)
            self.steering.order(order, self.loop, self.next_version)
        self.save()  # before anyone hears of it

    def _due(self) -> Due:
        """Keys that need a decision, and that the loop may decide on."""
        self._held, self._wanted = self.steering.over(self.loop, self.comms.values())
        if self._keeping is not None:
            exploited = self.loop.exploited()
            kept = self._keeping & (exploited >= 0) & ~self._held
            self._wanted = np.where(kept, exploited, OWN_ACTION)
            self._held[:] = True
        due = self.loop.due()
        return due.part(np.flatnonzero(~self._held[due.row]))

    def _learns(self, comm: Communicator) -> bool:
        return learns(self.loop, comm, self._held)

    # -- context --

    def duty(self, comm: Communicator) -> int:
        """One window of its calls in 2^duty is to be profiled."""
        if comm.off or not self.steering.measures:
            return MOST_DUTY  # nothing comes of what is measured
        return self.governor.duty(learning=self._learns(comm))

    def _context(self, due: Due, rewards: dict[int, Float], *, round_end: bool) -> EpochContext:
        live = {c: comm for c, comm in self.comms.items() if comm.complete}
        duties = {c: self.duty(comm) for c, comm in live.items()}
        contexts = comm_contexts(self.loop, due, live, rewards, held=self._held, wanted=self._wanted, duties=duties)
        for comm in live.values():
            comm.agreement.open(self.next_version)
        version = self.next_version
        self.next_version += 1
        return EpochContext(
            epoch=self.phases.epoch,
            version=version,
            greedy=self.steering.mode == "shadow",
            watching=bool((self.loop.measured > 0).any()) and not any(c.need.any() for c in contexts),
            apply=self.steering.mode == "active",
            round_end=round_end,
            comms=contexts,
            adopt={c: comm.adopt for c, comm in live.items() if comm.adopt is not None},
            stop=self.stopping,
            term=self.term,
            applied_since=self.steering.applied_since,
            release=self._keeping is not None,
        )

    # -- durability --

    def save(self) -> None:
        """For a successor, and for checkpoints."""
        self._saved = self._decided_of(), self.phases.round
        self._store.put(f"{self.plan.run}/state", pack(*self._state()))

    def _decided_of(self) -> bytes:
        """What a successor may not forget; measurements alone can be made again."""
        offs = {comm_id: comm.off for comm_id, comm in self.comms.items()}
        said = repr((offs, len(self.alarms), self.membership.switches)).encode()
        return said + self.loop.phase.tobytes() + self.loop.wanted.tobytes()

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Everything that a successor needs, settings left out: it has its own."""
        said = {
            "next_version": self.next_version,
            "alarms": [dataclasses.asdict(alarm) for alarm in self.alarms],
            "phases": self.phases.state(),
            "membership": self.membership.state(),
            "run": self.plan.run,
            "steering": self.steering.state(),
        }
        return said, {**self.loop.state(), "cost": self.loop.keys.cost}

    def _restore(self, said: dict[str, Any], arrays: dict[str, Any]) -> None:
        try:
            self.membership.restore(said["membership"])
            self.next_version = int(said["next_version"])
            self.alarms = [Alarm(**alarm) for alarm in said["alarms"]]
            keyed = [comm for comm in self.comms.values() if len(comm.keys)]
            order = np.argsort(np.concatenate([NONE, *(comm.rows for comm in keyed)]))
            self.loop.grow(Keys.join([self.plan.keys(comm, comm.keys.tolist()) for comm in keyed]).part(order))
            self.loop.keys.cost[:] = arrays["cost"]
            self.loop.restore(arrays)
            for comm in keyed:
                self.intake.recognise(comm)
            self.phases.restore(said["phases"])
            if said["run"] == self.plan.run:  # orders are for a run; the one after it begins as its experiment says
                self.steering.restore(said["steering"])
            self.context = self._context(self._due(), {}, round_end=False)
        except DAMAGED as e:
            raise RunError(
                f"the state of run {self.plan.run} is damaged: {short(repr(e))}; start without --resume"
            ) from None
