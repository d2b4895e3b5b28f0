"""Which nodes of a Ray cluster have runners of a run: those that hold ranks of its job, as soon as they do."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dynamiccl_ray.actors.rank_runner import RankRunner
from dynamiccl_ray.errors import reason
from dynamiccl_ray.plugin_bridge.segments import look_for

log = logging.getLogger("dynamiccl.online")

SLOT: Final = "dynamiccl"
"""Nodes of a cluster that run training processes are started with this Ray resource. Runs only look for it and take
nothing of it, so that those of several jobs serve the same nodes."""
# Between two questions to a node whether the job has come to it.
ASK_AGAIN_S: Final = 2.0
ANSWER_S: Final = 10.0
START_S: Final = 120.0


def serve_where() -> tuple[str, ...]:
    """Ids of the nodes that may be served: those with slots, or else the node of this process."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    slots = tuple(node["NodeID"] for node in alive if node["Resources"].get(SLOT, 0) > 0)
    return slots or (ray.get_runtime_context().get_node_id(),)


def has_slots() -> bool:
    """Whether some node of the cluster is one to serve."""
    return bool(ray.cluster_resources().get(SLOT, 0))


def on_node(node: str) -> dict[str, Any]:
    """Options of a task or an actor that belongs to a node and to no other, and takes no core of it."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def ask(node: str, job: str) -> Any:
    """A reference to whether a process of ``job`` lives on a node, and the ids of all jobs there."""
    return ray.remote(look_for).options(max_retries=0, **on_node(node)).remote(job)


def ask_all(job: str) -> tuple[bool, set[str]]:
    """The same of all nodes that may be served. Those that do not answer are left out."""
    asked = [ask(node, job) for node in serve_where()]
    lives, jobs = False, set[str]()
    for reference in ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)[0]:
        here, all_here = _answer(reference) or (False, set())
        lives |= here
        jobs |= all_here
    return lives, jobs


def _answer(reference: Any) -> tuple[bool, set[str]] | None:
    """None from a node that is gone, or cannot answer."""
    try:
        answer: tuple[bool, set[str]] = ray.get(reference, timeout=ANSWER_S)
        return answer
    except (RayError, GetTimeoutError) as e:
        log.warning("a node does not say whether it has ranks: %s", reason(e))
        return None


@dataclass(kw_only=True)
class _Runner:
    node: str
    actor: Any
    up: Any
    """A reference that is there when the actor has started."""
    number: int | None = None
    """RLlib's, once it has been told of it."""


class Placing:
    """The runners of ``algorithm``, ``per_node`` on every node that holds a rank of ``job``.

    RLlib places its runners where Ray has room. Ours belong to a node, come when the job does and go with the node:
    they are started here, and RLlib is told of those that are up.
    """

    def __init__(self, algorithm: Any, job: str, per_node: int) -> None:
        self._algorithm: Final = algorithm
        self._job: Final = job
        self._per_node: Final = per_node
        self._config: Final = algorithm.config
        self._asked: Final[dict[str, tuple[float, Any]]] = {}
        self._runners: Final[list[_Runner]] = []
        self._started = 0

    def look(self) -> None:
        """Starts runners where the job has come to and forgets those of nodes that are gone. Waits for those that
        start only where there is no other one."""
        nodes = serve_where()
        for runner in [runner for runner in self._runners if runner.node not in nodes]:
            self._forget(runner)
        self._ask(nodes)
        if self.nobody:
            # At the start of a run the answers are worth a wait: the job is usually there.
            self._wait([reference for _, reference in self._asked.values() if reference is not None], ANSWER_S)
        for node, (_, reference) in list(self._asked.items()):
            if reference is not None and ray.wait([reference], timeout=0)[0]:
                here, _ = _answer(reference) or (False, set())
                self._asked[node] = time.monotonic(), None
                if here:
                    self._start(node)
        if self.nobody:
            self._wait([runner.up for runner in self._runners], START_S)
        self._admit()

    @property
    def nobody(self) -> bool:
        """No runner is up."""
        return not any(runner.number is not None for runner in self._runners)

    def close(self) -> None:
        """Ends those that RLlib does not know."""
        for runner in self._runners:
            if runner.number is None:
                ray.kill(runner.actor)

    def _ask(self, nodes: tuple[str, ...]) -> None:
        for gone in self._asked.keys() - set(nodes):
            del self._asked[gone]
        now, served = time.monotonic(), {runner.node for runner in self._runners}
        for node in nodes:
            at, reference = self._asked.get(node, (-ASK_AGAIN_S, None))
            if node not in served and reference is None and now - at >= ASK_AGAIN_S:
                self._asked[node] = now, ask(node, self._job)

    @staticmethod
    def _wait(references: list[Any], limit_s: float) -> None:
        if references:
            ray.wait(references, num_returns=len(references), timeout=limit_s)

    def _start(self, node: str) -> None:
        restarts = self._algorithm.config.max_num_env_runner_restarts
        for _ in range(self._per_node):
            self._started += 1
            actor = (
                ray.remote(RankRunner)
                .options(max_restarts=restarts, **on_node(node))
                .remote(config=self._config, worker_index=self._started)
            )
            self._runners.append(_Runner(node=node, actor=actor, up=actor.ping.remote()))

    def _admit(self) -> None:
        """All runners begin with the learner's weights: equal weights are part of equal decisions."""
        manager = self._algorithm.env_runner_group._worker_manager
        new = []
        for runner in [runner for runner in self._runners if runner.number is None]:
            if not ray.wait([runner.up], timeout=0)[0]:
                continue
            try:
                ray.get(runner.up)
            except RayError:
                # Its node is gone, or will be asked again.
                self._forget(runner)
                continue
            manager.add_actors([runner.actor])
            runner.number = manager.actor_ids()[-1]
            new.append(runner.number)
        if new:
            self._algorithm.env_runner_group.sync_weights(
                from_worker_or_learner_group=self._algorithm.learner_group,
                to_worker_indices=new,
                inference_only=True,
                timeout_seconds=60.0,
            )

    def _forget(self, runner: _Runner) -> None:
        self._runners.remove(runner)
        if runner.number is not None:
            self._algorithm.env_runner_group._worker_manager.remove_actor(runner.number)
        ray.kill(runner.actor)


def shares(numbers: list[int]) -> list[Mapping[str, tuple[int, int]]]:
    """What each of these runners is told for a round: it returns the keys that are its own of so many shares."""
    return [{"share": (i, len(numbers))} for i in range(len(numbers))]
