"""The coordinator behind asyncio: where a runner's call waits for the other runners."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from dynamiccl_ray.actors.coordinator import Coordinator, log
from dynamiccl_ray.actors.messages import CommReport, EpochContext, Member
from dynamiccl_ray.actors.metrics import Metrics
from dynamiccl_ray.actors.overview import answer, status_of
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.status import Epoch, Status
from dynamiccl_ray.actors.watchdog import STOPPED_S, Watchdog
from dynamiccl_ray.control.agreement import Answer, Decision, Store
from dynamiccl_ray.heap import trim


class CoordinatorActor:
    """An asyncio front: calls wait here for the other runners, never for longer than the limits below.

    Made a Ray actor by ``ray.remote``; restarts re-read the store.
    """

    # From the first report of an epoch to the last; who is later rejoins at the next round.
    REPORT_WAIT_S = 5.0
    # A runner may wait so long to hear that another one is done; longer, and it ends its epoch by itself.
    EPOCH_WAIT_S = 60.0
    # From the first promise of a version to the last; then ABORT.
    PROMISE_WAIT_S = 1.0
    # From the last promise on, a runner may still wait for this process; silent for so long, it is killed and starts
    # anew.
    WATCHED_S = 3.0

    def __init__(self, plan: Plan, store: Store) -> None:
        logging.basicConfig(format="%(name)s: %(message)s")
        self._core = Coordinator(plan, store, self._observe)
        self._news = asyncio.Condition()
        self._observed: list[Epoch] = []
        self._metrics = Metrics()
        self._watchdog = Watchdog(self.WATCHED_S, STOPPED_S)
        self._watched_until = 0.0
        self._watching: asyncio.Task[None] | None = None

    def _observe(self, epoch: Epoch) -> None:
        self._observed.append(epoch)
        self._metrics.hear(epoch, self._core.comms[epoch.comm], self._core.experiment.job)

    async def join(self, runner: str, members: list[Member], gone: frozenset[tuple[int, int]]) -> EpochContext:
        return self._core.join(runner, members, gone)

    async def report(self, runner: str, epoch: int, comms: list[CommReport], entropy: float | None) -> EpochContext:
        context = self._core.report(runner, epoch, comms, entropy)
        if context is None:
            await self._tell()  # who waits for others to be done
            await self._wait(lambda: self._core.phases.epoch > epoch, self.REPORT_WAIT_S)
            if self._core.phases.epoch == epoch:
                for late in self._core.missing_reports():
                    log.warning("runner %s did not report epoch %d in time", late, epoch)
                    self._core.leave(late)
                self._core.close_epoch(cut=True)
            context = self._core.context
        self._metrics.tell(self._core)
        await self._tell()
        return context

    async def others_done(self, epoch: int) -> None:
        """Answers once some runner has handed the epoch in."""
        await self._wait(lambda: self._core.handed_in(epoch), self.EPOCH_WAIT_S)

    async def promise(
        self, runner: str, comm: int, version: int, answers: list[Answer], table: bytes | None, term: int
    ) -> Decision | None:
        self._watch()
        decision = self._core.promise(runner, comm, version, answers, table, term)
        if decision is None and self._core.knows(runner) and term == self._core.term:
            await self._wait(lambda: self._core.open_version(comm) != version, self.PROMISE_WAIT_S)
            # Not of another term: what was opened under this one is forgotten then.
            decision = self._core.abort(comm, version) if term == self._core.term else None
        await self._tell()
        return decision

    async def settle(self, member: Member) -> Decision | None:
        return self._core.settle(member)

    def _watch(self) -> None:
        """Whoever promised waits for this process: from now on it shows that it is alive."""
        self._watchdog.beat()
        self._watched_until = time.monotonic() + self.WATCHED_S
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        while time.monotonic() < self._watched_until:
            self._watchdog.beat()
            await asyncio.sleep(self.WATCHED_S / 10)
        self._watchdog.disarm()
        self._watching = None

    async def release(self, keep: bool) -> None:
        """The next context gives the ranks back to NCCL; see ``Coordinator.release``."""
        self._core.release(keep=keep)

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """What ``overview.answer`` says; an order ends the epoch that is under way."""
        said = answer(self._core, question)
        await self._tell()
        return said

    async def save(self) -> None:
        """What the store holds is what is known now."""
        self._core.save()

    async def status(self) -> Status:
        return status_of(self._core)

    async def observed(self) -> list[Epoch]:
        """The epochs closed since the last call, with their samples."""
        trim()  # asked between two rounds, when no rank waits for this process
        observed, self._observed = self._observed, []
        return observed

    async def _wait(self, done: Callable[[], bool], limit_s: float) -> None:
        async with self._news:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait_for(done), limit_s)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()
