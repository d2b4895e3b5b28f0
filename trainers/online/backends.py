"""Two ways to run the loop: on Ray, and in one process. Both give a round at a time to ``run.py``."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.actors.coordinator_actor import CoordinatorActor
from dynamiccl_ray.actors.episodes import Experience
from dynamiccl_ray.actors.messages import CommReport, EpochContext, Member
from dynamiccl_ray.actors.overview import answer, status_of
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.rank_runner import RankRunner
from dynamiccl_ray.actors.runner import Bystander
from dynamiccl_ray.actors.status import Epoch, Status
from dynamiccl_ray.actors.streams import experience
from dynamiccl_ray.control.agreement import Answer, Decision, MemoryStore
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.heap import trim
from dynamiccl_ray.plugin_bridge.segments import jobs_here, look_for, segments
from dynamiccl_ray.trainers.common.cluster import require_room, start_ray
from dynamiccl_ray.trainers.online.learning import ppo_config

Checkpoint = dict[str, Any]


class Backend(Protocol):
    """A control plane that is up."""

    def round(self) -> Status:
        """Runs one round and returns the coordinator's status."""

    def observed(self) -> list[Epoch]:
        """Epochs that were closed since the last call, with their samples."""

    def learned(self) -> list[Experience]:
        """Episodes that the policy has learned from since the last call."""

    def checkpoint(self) -> Checkpoint:
        """Weights, optimiser and the coordinator's state."""

    def release(self, keep: bool) -> Status:
        """Tries once to give the ranks back to NCCL, ``keep`` but for what is exploited; the status then."""

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """What ``overview.answer`` says; from any thread."""

    def found(self) -> tuple[bool, set[str]]:
        """Whether a training process of the job lives where it looks for ranks, and the ids of all jobs there."""

    def close(self) -> None: ...


class DirectCoordination:
    """The coordinator in the same process, with a single runner: nobody ever has to wait."""

    def __init__(self, core: Coordinator) -> None:
        self._core = core
        self._lock = threading.Lock()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """From the thread of the desk."""
        with self._lock:
            return answer(self._core, question)

    def join(self, runner: str, members: list[Member], gone: frozenset[tuple[int, int]]) -> EpochContext:
        with self._lock:
            return self._core.join(runner, members, gone)

    def report(
        self,
        runner: str,
        epoch: int,
        comms: list[CommReport],
        entropy: float | None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> EpochContext:
        with self._lock:
            return self._core.report(runner, epoch, comms, entropy) or self._core.close_epoch()

    def others_done(self, epoch: int) -> Callable[[], bool]:
        return lambda: self._core.handed_in(epoch)

    def promise(
        self, runner: str, comm: int, version: int, answers: list[Answer], table: bytes | None, term: int
    ) -> Decision | None:
        decision = self._core.promise(runner, comm, version, answers, table, term)
        return decision or (self._core.abort(comm, version) if term == self._core.term else None)

    def settle(self, member: Member) -> Decision | None:
        return self._core.settle(member)


class SerialBackend:
    """Everything but the training processes in this process, without Ray: for debugging and for tests."""

    def __init__(
        self, plan: Plan, *, advance: Callable[[], None] | None = None, resume: Checkpoint | None = None
    ) -> None:
        store = MemoryStore()
        if resume is not None:
            store.put(f"{plan.run}/state", resume["coordinator"])
        self._store, self._plan = store, plan
        self._observed: list[Epoch] = []
        self._learned: list[Experience] = []
        self._core = Coordinator(plan, store, self._observed.append)
        direct = self._direct = DirectCoordination(self._core)
        config = ppo_config(plan.experiment, coordination=lambda: direct)
        if advance is not None:
            # RLlib copies its configuration deeply; a plain function stays the one it is.
            config.env_config["advance"] = lambda: advance()
        self._config = config
        self._runner = RankRunner(config=config)
        self._learner = config.build_learner(spaces=self._runner.get_spaces())
        if resume is not None:
            self._learner.set_state(resume["learner"])
        self._sync()

    def _sync(self) -> None:
        self._runner.set_state(self._learner.get_state(components=COMPONENT_RL_MODULE, inference_only=True))

    def round(self) -> Status:
        rounds = self._core.phases.rounds_in_phase
        episodes = self._runner.sample()
        if episodes:
            self._learned += map(experience, episodes)
            self._learner.update(
                episodes=episodes,
                timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: rounds},
                num_epochs=self._config.num_epochs,
                minibatch_size=self._config.minibatch_size,
                shuffle_batch_per_epoch=self._config.shuffle_batch_per_epoch,
            )
            self._sync()
        return status_of(self._core)

    def observed(self) -> list[Epoch]:
        return [self._observed.pop(0) for _ in range(len(self._observed))]

    def learned(self) -> list[Experience]:
        learned, self._learned = self._learned, []
        return learned

    def checkpoint(self) -> Checkpoint:
        self._core.save()
        return {
            "learner": self._learner.get_state(),
            "coordinator": self._store.get(f"{self._plan.run}/state"),
        }

    def release(self, keep: bool) -> Status:
        self._core.release(keep=keep)
        self._runner.release()
        return status_of(self._core)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        return self._direct.ask(question)

    def found(self) -> tuple[bool, set[str]]:
        return look_for(self._plan.experiment.job)

    def close(self) -> None:
        self._runner.stop()


# A runner may be in the middle of an epoch.
_RELEASE_CALL_S = 10.0
# Between two looks for ranks where there are none.
_NOBODY_S = 0.2


class RayBackend:
    """Runners, coordinator and learner as Ray actors; joins a running cluster, or starts a local one.

    Ranks are served by ``runners_per_node`` runners on every node that holds some, among those with slots (Ray resource
    ``dynamiccl``); on a cluster without slots, on this node.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        resume: Checkpoint | None = None,
        coordinator: type[CoordinatorActor] = CoordinatorActor,
    ) -> None:
        import ray

        self._ray = ray
        learners = plan.experiment.ppo.learners
        with contextlib.ExitStack() as undo:
            if not ray.is_initialized():
                start_ray(learners)
                undo.callback(ray.shutdown)
            require_room(learners)
            self._begin(plan, resume, coordinator, undo)
            self._undo = undo.pop_all()

    def _begin(
        self,
        plan: Plan,
        resume: Checkpoint | None,
        coordinator: type[CoordinatorActor],
        undo: contextlib.ExitStack,
    ) -> None:
        """What is started is on ``undo``."""
        ray = self._ray
        from dynamiccl_ray.actors import registry, remote
        from dynamiccl_ray.trainers.online import placing
        from dynamiccl_ray.trainers.online.triggered_ppo import TriggeredPPO

        self._plan = plan
        if not placing.has_slots() and not any(segments(plan.experiment.job)):
            found = others(jobs_here())
            raise RunError(
                f"no ranks of job {plan.experiment.job!r} on this node ({found}), and no Ray node with the resource "
                f'{placing.SLOT!r}: is the training running with `eval "$(dynamiccl plugin env --job NAME)"`? See '
                f"`dynamiccl doctor`; for a cluster, start its Ray nodes with --resources='{{\"{placing.SLOT}\": 1}}'"
            )
        self._store = registry.KvStore()
        if resume is not None:
            self._store.put(f"{plan.run}/state", resume["coordinator"])
        self._coordinator = remote.start_coordinator(plan, coordinator)
        undo.callback(ray.kill, self._coordinator)
        self._status: Status = ray.get(self._coordinator.status.remote())
        config = ppo_config(
            plan.experiment,
            coordination=remote.remote_coordination(plan.run),
            per_node=plan.experiment.ray.runners_per_node,
            learners=plan.experiment.ppo.learners,
            local=Bystander,
            algo_class=TriggeredPPO,
        )
        config.env_config["phase_rounds"] = functools.partial(_phase_rounds, plan.run)
        self._algorithm = config.build_algo()
        undo.callback(self._algorithm.stop)
        if resume is not None:
            self._algorithm.learner_group.set_state({COMPONENT_LEARNER: resume["learner"]})
        self._placing = placing.Placing(self._algorithm, plan.experiment.job, plan.experiment.ray.runners_per_node)
        undo.callback(self._placing.close)
        self._placing.look()

    def round(self) -> Status:
        self._placing.look()
        if self._placing.nobody:
            time.sleep(_NOBODY_S)
        else:
            self._algorithm.train()
        self._status = self._ray.get(self._coordinator.status.remote())
        return self._status

    def observed(self) -> list[Epoch]:
        trim()  # what the last ones took
        observed: list[Epoch] = self._ray.get(self._coordinator.observed.remote())
        return observed

    def learned(self) -> list[Experience]:
        learned: list[Experience] = self._algorithm.learned
        self._algorithm.learned = []
        return learned

    def checkpoint(self) -> Checkpoint:
        self._ray.get(self._coordinator.save.remote())
        return {
            "learner": self._algorithm.learner_group.get_state()[COMPONENT_LEARNER],
            "coordinator": self._store.get(f"{self._plan.run}/state"),
        }

    def release(self, keep: bool) -> Status:
        ray = self._ray
        ray.get(self._coordinator.release.remote(keep), timeout=_RELEASE_CALL_S)
        self._algorithm.env_runner_group.foreach_env_runner(
            "release", local_env_runner=False, timeout_seconds=_RELEASE_CALL_S
        )
        self._status = ray.get(self._coordinator.status.remote(), timeout=_RELEASE_CALL_S)
        return self._status

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        from dynamiccl_ray.actors.registry import asked

        return asked(self._coordinator, question)

    def found(self) -> tuple[bool, set[str]]:
        from dynamiccl_ray.trainers.online import placing

        return placing.ask_all(self._plan.experiment.job)

    def close(self) -> None:
        self._undo.close()


def others(jobs: set[str]) -> str:
    """The job ids that are there, in words."""
    return f"there are jobs {', '.join(sorted(jobs))}" if jobs else "there are ranks of no job"


def _phase_rounds(run: str) -> int:
    import ray

    from dynamiccl_ray.actors.registry import find_coordinator

    return int(ray.get(find_coordinator(run).status.remote()).rounds_in_phase)
