"""What runners say of a communicator, taken in: its keys, what was measured of them, why it may not be tuned."""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.actors.messages import CommReport
from dynamiccl_ray.actors.phases import Phases
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.reduction import Part
from dynamiccl_ray.agent.observation import encode_context
from dynamiccl_ray.control.loop import Due, Loop, Phase
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.fabric.recognise import taken_for

log = logging.getLogger("dynamiccl.coordinator")


def turn_off(comm: Communicator, why: str) -> None:
    """Tunes a communicator no more, if there is a reason; the first one is kept."""
    if why and not comm.off:
        comm.off = why
        log.warning("communicator %016x: tuning is off: %s", comm.example.comm, why)


class Intake:
    """Into the control loop and the communicators; one communicator at a time."""

    def __init__(self, plan: Plan, loop: Loop, phases: Phases) -> None:
        self._plan: Final = plan
        self._loop: Final = loop
        self._phases: Final = phases

    def add_keys(self, comm: Communicator, keys: list[int]) -> None:
        """Keys that are new to a communicator."""
        comm.rows = np.append(comm.rows, len(self._loop) + np.arange(len(keys)))
        comm.keys = np.append(comm.keys, np.array(keys, np.int64))
        self._phases.grow(len(keys))
        self._loop.grow(self._plan.keys(comm, keys))

    def take(self, comm: Communicator, reports: list[CommReport], asked: Due | None) -> Part:
        """What all ranks of a communicator have measured; and everything else that its runners say. ``asked`` is what
        they were to decide."""
        for report in reports:
            if comm.agreement.leader in report.ranks and asked is not None and len(report.decided) == len(asked.row):
                self._loop.decide(comm.rows[asked.row], report.decided)
            self._offer(comm, report)
            if comm.agreement.leader in report.ranks and report.staged is not None:
                comm.propose(DecisionTable.from_bytes(report.staged))
            comm.max_channels = max(comm.max_channels, report.max_channels)
            self._loop.offers.most_channels[comm.rows] = comm.max_channels
            comm.unused += report.unmatched + sum(news.unused for news in report.ranks.values())
            comm.dropped |= {rank: news.dropped for rank, news in report.ranks.items()}
            comm.hold_wait_s |= {rank: news.hold_wait_s for rank, news in report.ranks.items()}
            comm.coverage |= {rank: news.coverage for rank, news in report.ranks.items()}
        ranks = {rank: news for report in reports for rank, news in report.ranks.items()}
        turn_off(comm, comm.compare(ranks))
        comm.follow(ranks)
        comm.reward.hear(ranks, baseline=self.at_baseline(comm))
        collectives = comm.take([r.collectives for r in reports])
        if len(new := np.setdiff1d(collectives["key"], comm.keys)):
            self.add_keys(comm, new.tolist())
        return Part(
            comm=comm.example.comm,
            collectives=collectives,
            rows=comm.rows[comm.position(collectives["key"])],
            actions=comm.asked(collectives),
        )

    def _offer(self, comm: Communicator, report: CommReport) -> None:
        """NCCL's own cost tables, as one rank saw them: what it marks -1 is not available."""
        if new := [key for key in report.costs if key not in comm.keys]:
            self.add_keys(comm, new)
        heard = False
        for row, cost in zip(comm.rows[comm.position([*report.costs])], report.costs.values(), strict=True):
            if not self._loop.offers.known[row]:
                self._loop.offer(int(row), cost.reshape(-1))
                heard = True
        if heard:
            self.recognise(comm)
        for key, action in report.refused.items():
            (at,) = comm.position([key])
            if at >= 0:
                self._loop.forbid(int(comm.rows[at]), action)

    def recognise(self, comm: Communicator) -> None:
        """Says what to expect on the cluster that NCCL's own costs are like, where nobody says which one it is, or they
        contradict who does."""
        if not self._plan.recognises:
            return
        loop, of, member = self._loop, comm.rows, comm.example
        keys, said = loop.keys, self._plan.model
        like = taken_for(said, member.ranks, member.nodes, keys.collective[of], keys.nbytes[of], keys.cost[of])
        if (like and like.cluster.name) == (comm.like and comm.like.cluster.name):
            return
        comm.like = like
        if like is not None:
            log.log(
                logging.INFO if said is None else logging.WARNING,
                "communicator %016x: NCCL's own costs are like those on %s (off by %.0f %%)%s: its model says what to "
                "expect",
                member.comm,
                like.cluster.name,
                100 * like.distance,
                "" if said is None else f", and not like those on {said.name}, which the experiment says this is",
            )
        context = encode_context(self._plan.about(member, like))
        loop.expect(of, self._plan.expected(comm, keys.collective[of], keys.nbytes[of]), context)

    def at_baseline(self, comm: Communicator) -> bool:
        """What runs on a communicator is NCCL's own choice."""
        running = comm.rows[self._phases.runs(comm.rows)]
        return bool((self._loop.phase[running] == Phase.BASELINE).all())
