"""Samples on the fabric model, without a job: hundreds of streams decided by one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from actors.streams import ACTION_SPACE, OBSERVATION_SPACE
from dynamiccl_ray import policy
from dynamiccl_ray.reward import means
from dynamiccl_ray.simulation import Simulation

TEACHER = "teacher"
"""Column of an episode: what a policy that knew every time would have chosen."""


class FabricRunner(EnvRunner):  # type: ignore[misc]
    """``config.env_config``: ``simulation`` (called with the runner's index and a round's number, for that round's
    streams) and ``seed``. One ``sample`` is one round: an episode of every stream."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        # The network is so small that threads wait for each other longer than they compute.
        torch.set_num_threads(1)
        env = config.env_config
        self._simulation: Callable[[int, int], Simulation] = env["simulation"]
        self._seed: int = env["seed"]
        self.module = config.rl_module_spec.build()
        self.module.eval()
        self.rounds = 0
        self.reward_terms: dict[str, float] = {}
        """Mean of each term of the reward over the last round; also in the metrics, below ``reward``."""

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        spaces = (OBSERVATION_SPACE, ACTION_SPACE)
        return {INPUT_ENV_SPACES: spaces, DEFAULT_MODULE_ID: spaces}

    def assert_healthy(self) -> None:
        assert self.module is not None

    def get_state(self, components: Any = None, *, not_components: Any = None, **_: Any) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def set_state(self, state: dict[str, Any]) -> None:
        self.rounds = state.get("rounds", self.rounds)
        if COMPONENT_RL_MODULE in state:
            weights = state[COMPONENT_RL_MODULE]
            if isinstance(weights, ray.ObjectRef):
                weights = ray.get(weights)
            self.module.set_state(weights.get(DEFAULT_MODULE_ID, weights))

    def get_metrics(self) -> Any:
        return self.metrics.reduce()

    def stop(self) -> None:
        """Nothing is held."""

    def sample(self, **_: Any) -> list[SingleAgentEpisode]:
        index = self.worker_index or 0
        simulation = self._simulation(index, self.rounds)
        # Draws depend on the round alone, so that a restored runner goes on with the same ones.
        generator = torch.Generator().manual_seed(hash((self._seed, index, self.rounds)) & 0x7FFFFFFF)
        self.rounds += 1
        net: policy.PolicyNetwork = self.module.net
        n, epochs = len(simulation), simulation.epochs
        state = {k: v.unsqueeze(0).expand(n, *v.shape) for k, v in net.initial_state().items()}
        obs = np.empty((n, epochs + 1, OBSERVATION_SPACE.shape[0]), np.float32)
        actions, log_p = np.empty((n, epochs, 3), np.int64), np.empty((n, epochs), np.float32)
        teacher, rewards = np.empty((n, epochs, 3), np.int64), np.empty((n, epochs), np.float32)
        obs[:, 0] = simulation.reset()
        terms: dict[str, float] = {}
        for t in range(epochs):
            with torch.no_grad():
                x = torch.from_numpy(obs[:, t]).unsqueeze(1)
                features, state = net.features(x, state)
                drawn, log_prob = policy.sample(net, x, features, generator)
            teacher[:, t] = simulation.teacher()
            actions[:, t], log_p[:, t] = drawn[:, 0].numpy(), log_prob[:, 0].numpy()
            obs[:, t + 1], rewards[:, t] = simulation.step(actions[:, t])
            for name, mean in means(simulation.terms).items():
                terms[name] = terms.get(name, 0.0) + mean / epochs
        self.reward_terms = terms
        for name, mean in terms.items():
            self.metrics.log_value(("reward", name), mean, window=1)
        return [
            SingleAgentEpisode(
                observations=obs[i],
                actions=actions[i],
                rewards=rewards[i],
                infos=[{}] * (epochs + 1),
                truncated=True,
                extra_model_outputs={Columns.ACTION_LOGP: log_p[i], TEACHER: teacher[i]},
                observation_space=OBSERVATION_SPACE,
                action_space=ACTION_SPACE,
                len_lookback_buffer=0,
            )
            for i in range(n)
        ]
