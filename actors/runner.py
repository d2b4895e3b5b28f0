"""What both kinds of runners share: the module that they decide with, and how its weights arrive."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import ray
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner

from dynamiccl_ray.actors.streams import ACTION_SPACE, OBSERVATION_SPACE
from dynamiccl_ray.cores import one_core

Spaces = dict[str, tuple[gym.Space[Any], gym.Space[Any]]]
SPACES: Spaces = dict.fromkeys((INPUT_ENV_SPACES, DEFAULT_MODULE_ID), (OBSERVATION_SPACE, ACTION_SPACE))


class PolicyRunner(EnvRunner):  # type: ignore[misc]
    """An EnvRunner around ``module``, without an environment of its own."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        # Noise is drawn from seeds of our own. Given one, RLlib has torch import its compiler: a second and 66 MB each.
        config = config.copy(copy_frozen=False)
        config.seed = None
        super().__init__(config=config, **kwargs)
        one_core()
        self.module = config.rl_module_spec.build()
        self.module.eval()

    @property
    def share(self) -> tuple[int, int]:
        """Which one of how many runners this is: RLlib counts remote ones from 1."""
        return max(0, (self.worker_index or 1) - 1), max(1, self.num_workers)

    def get_spaces(self) -> Spaces:
        return SPACES

    def assert_healthy(self) -> None:
        assert self.module is not None

    def get_state(self, components: Any = None, *, not_components: Any = None, **_: Any) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        if COMPONENT_RL_MODULE in state:
            weights = state[COMPONENT_RL_MODULE]
            if isinstance(weights, ray.ObjectRef):
                weights = ray.get(weights)
            self.module.set_state(weights.get(DEFAULT_MODULE_ID, weights))

    def get_metrics(self) -> Any:
        return self.metrics.reduce()


class Bystander(PolicyRunner):
    """Where a run is driven from: RLlib wants a runner there as long as no other one is up. It serves nobody."""

    def sample(self, **_: Any) -> list[Any]:
        return []
