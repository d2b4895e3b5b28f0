"""The coordinator behind asyncio: where a runner's call waits for the other runners."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from dynamiccl_ray.actors.coordinator import Coordinator, log
from dynamiccl_ray.actors.messages import CommReport, EpochContext, Member
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.status import Epoch, Status
from dynamiccl_ray.control.agreement import Answer, Decision, Store


class CoordinatorActor:
    """An asyncio front: calls wait here for the other runners, never for longer than the limits below.

    Made a Ray actor by ``ray.remote``; restarts re-read the store.
    """

    # From the first report of an epoch to the last; who is later rejoins at the next round.
    REPORT_WAIT_S = 5.0
    # From the first promise of a version to the last; then ABORT.
    PROMISE_WAIT_S = 2.0

    def __init__(self, plan: Plan, store: Store) -> None:
        logging.basicConfig(format="%(name)s: %(message)s")
        self._core = Coordinator(plan, store, self._observe)
        self._news = asyncio.Condition()
        self._observed: list[Epoch] = []

    def _observe(self, epoch: Epoch) -> None:
        self._observed.append(epoch)

    async def join(self, runner: str, members: list[Member]) -> EpochContext:
        return self._core.join(runner, members)

    async def report(self, runner: str, epoch: int, comms: list[CommReport], entropy: float | None) -> EpochContext:
        context = self._core.report(runner, epoch, comms, entropy)
        if context is None:
            await self._wait(lambda: self._core.phases.epoch > epoch, self.REPORT_WAIT_S)
            if self._core.phases.epoch == epoch:
                for late in self._core.missing_reports():
                    log.warning("runner %s did not report epoch %d in time", late, epoch)
                    self._core.leave(late)
                self._core.close_epoch(cut=True)
            context = self._core.context
        await self._tell()
        return context

    async def promise(
        self, runner: str, comm: int, version: int, answers: list[Answer], table: bytes | None
    ) -> Decision | None:
        decision = self._core.promise(runner, comm, version, answers, table)
        if decision is None and self._core.knows(runner):
            await self._wait(lambda: self._core.open_version(comm) != version, self.PROMISE_WAIT_S)
            decision = self._core.abort(comm, version)
        await self._tell()
        return decision

    async def settle(self, member: Member) -> Decision | None:
        return self._core.settle(member)

    async def status(self) -> Status:
        return self._core.status()

    async def observed(self) -> list[Epoch]:
        """The epochs closed since the last call, with their samples."""
        observed, self._observed = self._observed, []
        return observed

    async def stop(self) -> None:
        """The next context tells every runner that the run is over."""
        self._core.stopping = True

    async def _wait(self, done: Callable[[], bool], limit_s: float) -> None:
        async with self._news:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait_for(done), limit_s)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()
