"""The coordinator across processes: how it is started, and a client that never waits for ever."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dynamiccl_ray.actors.coordinator_actor import CoordinatorActor
from dynamiccl_ray.actors.messages import CommReport, Coordination, EpochContext, Member
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.registry import (
    NAMESPACE,
    KvStore,
    coordinator_name,
    find_coordinator,
    newest_run,
    remember_run,
)
from dynamiccl_ray.control.agreement import Answer, Decision
from dynamiccl_ray.errors import RunError

# How long a runner waits for an answer before it takes the coordinator for gone. Ray restarts it meanwhile.
REPORT_LIMIT_S = 60.0
PROMISE_LIMIT_S = CoordinatorActor.PROMISE_WAIT_S + 1.0
SETTLE_LIMIT_S = 1.0
# A run that was told to end takes so long to let go of its ranks.
HANDOVER_S = 5.0
MEANWHILE_S = 0.25


def _refuse_a_second(job: str) -> None:
    """Two runs of one job would each wait for ranks that the other serves. Raises RunError where one goes on."""
    deadline = time.monotonic() + HANDOVER_S
    while (run := newest_run(job)) is not None:
        try:
            find_coordinator(run)
        except ValueError:
            return
        if time.monotonic() > deadline:
            raise RunError(
                f"job {job!r} has a run on this Ray cluster already ({run}); end it first, with `ray job "
                "stop`, Ctrl-C or SIGTERM: it gives the ranks back"
            )
        time.sleep(0.1)


def start_coordinator(plan: Plan, actor: type[CoordinatorActor] = CoordinatorActor) -> Any:
    """Starts the coordinator of a run as a named actor that Ray restarts as often as needed.

    It lives on the node of this process, which drives the run: that node is the only one whose loss ends it. Elsewhere
    the loss of a node that trains would take the coordinator along, and Ray notices that only after many heartbeats.
    """
    _refuse_a_second(plan.experiment.job)
    remember_run(plan.experiment.job, plan.run)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return (
        ray.remote(actor)
        .options(
            name=coordinator_name(plan.run),
            namespace=NAMESPACE,
            num_cpus=0,
            scheduling_strategy=here,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=1000,
        )
        .remote(plan, KvStore())
    )


class RemoteCoordination:
    """A runner's view of the coordinator actor of ``run``.

    ``report`` may wait for a restart; nothing of training depends on it. ``promise`` and ``settle`` may not: ranks
    that promised wait for the outcome. They go from process to process, past Ray's GCS, and give up in time; what is
    not known then is asked for again.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._actor = find_coordinator(run)

    def join(self, runner: str, members: list[Member], gone: frozenset[tuple[int, int]]) -> EpochContext:
        return self._wait(self._actor.join.remote(runner, members, gone))

    def report(
        self,
        runner: str,
        epoch: int,
        comms: list[CommReport],
        entropy: float | None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> EpochContext:
        return self._wait(self._actor.report.remote(runner, epoch, comms, entropy), meanwhile)

    def others_done(self, epoch: int) -> Callable[[], bool]:
        return self._actor.others_done.remote(epoch).future().done  # type: ignore[no-any-return]

    def promise(
        self, runner: str, comm: int, version: int, answers: list[Answer], table: bytes | None, term: int
    ) -> Decision | None:
        return self._decision(self._actor.promise.remote(runner, comm, version, answers, table, term), PROMISE_LIMIT_S)

    def settle(self, member: Member) -> Decision | None:
        return self._decision(self._actor.settle.remote(member), SETTLE_LIMIT_S)

    @staticmethod
    def _decision(reference: Any, limit_s: float) -> Decision | None:
        try:
            decision: Decision | None = ray.get(reference, timeout=limit_s)
            return decision
        except (GetTimeoutError, RayActorError):
            return None

    def _wait(self, reference: Any, meanwhile: Callable[[], object] = lambda: None) -> EpochContext:
        deadline = time.monotonic() + REPORT_LIMIT_S
        try:
            while not ray.wait([reference], timeout=MEANWHILE_S)[0] and time.monotonic() < deadline:
                meanwhile()
            context: EpochContext = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
            return context
        except (GetTimeoutError, RayActorError) as e:
            raise RunError(f"the coordinator of run {self._run} has not answered for {REPORT_LIMIT_S:.0f} s") from e


def remote_coordination(run: str) -> Callable[[], Coordination]:
    """What to put into a runner's ``env_config``: called inside the runner's process."""
    return functools.partial(RemoteCoordination, run)
