"""Where a curriculum's rounds are sampled: in this process, or by Ray actors while the learner updates.

A round is begun before the update that it comes after, wherever it is sampled, with the weights from before. So a run
in one process and one with a runner beside it end with the same weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig

from dynamiccl_ray.actors.episodes import Episodes
from dynamiccl_ray.actors.fabric_runner import FabricRunner


class RoundSampling(ABC):
    """One round at a time: ``begin``, then ``finish``."""

    @abstractmethod
    def begin(self, state: dict[str, Any]) -> None:
        """Tells all runners where they are, and the weights, which they copy; see FabricRunner for the state."""

    @abstractmethod
    def finish(self) -> list[Episodes]:
        """The round that was begun, in the order of the runners. Raises what a runner raised."""

    def close(self) -> None:  # noqa: B027 - nothing to do for most
        """Ends the runners."""


class LocalSampling(RoundSampling):
    """One runner in this process."""

    def __init__(self, config: PPOConfig) -> None:
        self._runner = FabricRunner(config=config)

    def begin(self, state: dict[str, Any]) -> None:
        self._runner.set_state(state)

    def finish(self) -> list[Episodes]:
        return self._runner.sample()


class RemoteSampling(RoundSampling):
    """``config.num_env_runners`` actors, each with its share of a round."""

    def __init__(self, config: PPOConfig) -> None:
        actor = ray.remote(num_cpus=config.num_cpus_per_env_runner)(FabricRunner)
        count = config.num_env_runners
        self._runners = [
            actor.remote(config=config, worker_index=1 + index, num_workers=count) for index in range(count)
        ]
        self._sampled: list[Any] = []

    def begin(self, state: dict[str, Any]) -> None:
        # Calls on one actor run in order.
        given = ray.put(state)
        for runner in self._runners:
            runner.set_state.remote(given)
        self._sampled = [runner.sample.remote() for runner in self._runners]

    def finish(self) -> list[Episodes]:
        return [piece for pieces in ray.get(self._sampled) for piece in pieces]

    def close(self) -> None:
        for runner in self._runners:
            ray.kill(runner)
