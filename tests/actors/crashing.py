"""A coordinator that dies at the worst moment. In a module of its own because Ray's workers import it."""

from __future__ import annotations

import os
import signal
from typing import Any

from dynamiccl_ray.actors.coordinator_actor import CoordinatorActor
from dynamiccl_ray.actors.remote import KvStore
from dynamiccl_ray.control.agreement import Answer, Decision


def pid_of(runner: Any) -> int:
    return os.getpid()


class Crashing(CoordinatorActor):
    """Dies by SIGKILL once, at a promise of version 6 or later."""

    before_commit = True

    async def promise(
        self, runner: str, comm: int, version: int, answers: list[Answer], table: bytes | None
    ) -> Decision | None:
        store, mark = KvStore(), f"{self._core.plan.run}/crashed"
        due = version >= 6 and store.get(mark) is None
        if due and self.before_commit and self._core.comms[comm].agreement.answered:
            store.put(mark, str(version).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        decision = self._core.promise(runner, comm, version, answers, table)
        if due and not self.before_commit and decision is not None and decision.switch_at is not None:
            store.put(mark, str(version).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().promise(runner, comm, version, answers, table)


class CrashesBeforeCommit(Crashing):
    before_commit = True


class CrashesAfterCommit(Crashing):
    before_commit = False
