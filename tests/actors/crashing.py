"""A coordinator that dies at the worst moment. In a module of its own because Ray's workers import it."""

from __future__ import annotations

import os
import signal
from typing import Any

from dynamiccl_ray.actors.coordinator_actor import CoordinatorActor
from dynamiccl_ray.actors.registry import KvStore
from dynamiccl_ray.control.agreement import Answer, Decision


def pid_of(runner: Any) -> int:
    return os.getpid()


class Crashing(CoordinatorActor):
    """Sends a signal once, at a promise of version 6 or later: to itself, or to the process named in the store."""

    before_commit = True
    signal = signal.SIGKILL

    async def promise(
        self, runner: str, comm: int, version: int, answers: list[Answer], table: bytes | None, term: int
    ) -> Decision | None:
        store, run = KvStore(), self._core.plan.run
        due = version >= 6 and store.get(f"{run}/crashed") is None
        if due and self.before_commit and self._core.comms[comm].agreement.answered:
            self._crash(store, version)
        decision = self._core.promise(runner, comm, version, answers, table, term)
        if due and not self.before_commit and decision is not None and decision.switch_at is not None:
            self._crash(store, version)
        return await super().promise(runner, comm, version, answers, table, term)

    def _crash(self, store: KvStore, version: int) -> None:
        run = self._core.plan.run
        store.put(f"{run}/crashed", str(version).encode())
        victim = store.get(f"{run}/victim")
        os.kill(os.getpid() if victim is None else int(victim), self.signal)


class CrashesBeforeCommit(Crashing):
    before_commit = True


class CrashesAfterCommit(Crashing):
    before_commit = False


class StopsBeforeCommit(Crashing):
    signal = signal.SIGSTOP


class StopsAfterCommit(Crashing):
    before_commit = False
    signal = signal.SIGSTOP
