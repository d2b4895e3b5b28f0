"""``dynamiccl bench train``: environment steps a second, learner included, beside RLlib's stock runner."""

from __future__ import annotations

import os
import time
from typing import Any, Final

import gymnasium as gym
import numpy as np
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from actors.fabric_runner import FabricRunner
from actors.streams import ACTION_SPACE, OBSERVATION_SPACE
from dynamiccl_ray.curriculum import Curriculum
from dynamiccl_ray.simulation import Simulation
from dynamiccl_ray.splits import stage_scenarios
from trainers.fabric_learning import curriculum_config

_ROUNDS: Final = 6
_STOCK_STEPS: Final = 768
_STOCK_ENVS: Final = 8


class StreamEnvironment(gym.Env):  # type: ignore[type-arg]
    """One stream of a simulation, as gymnasium wants it: what the stock runner steps one by one."""

    observation_space, action_space = OBSERVATION_SPACE, ACTION_SPACE

    def __init__(self, config: dict[str, Any]) -> None:
        self._simulation: Simulation = config["make"]()
        self._epoch = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._epoch = 0
        return self._simulation.reset()[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._epoch += 1
        obs, reward = self._simulation.step(np.asarray(action)[None])
        return obs[0], float(reward[0]), False, self._epoch >= self._simulation.epochs, {}


def bench_train(curriculum: Curriculum) -> dict[str, Any]:
    """Steps a second of both, sampling and updating in turns in this process, with the curriculum's PPO."""
    scenarios = stage_scenarios(curriculum.stages[0], curriculum, (curriculum.seed, 9), curriculum.streams.scenarios)
    streams = curriculum.streams

    def ours(_index: int, number: int) -> Simulation:
        return Simulation(scenarios, epochs=streams.epochs, collectives=streams.collectives, seed=number)

    def one() -> Simulation:
        whole = stage_scenarios(curriculum.stages[0], _single_key(curriculum), (curriculum.seed, 10), 1)
        return Simulation(whole, epochs=streams.epochs, collectives=streams.collectives, seed=0)

    config = curriculum_config(curriculum, ours)
    steps_per_s = _measure(config, FabricRunner(config=config), curriculum, _ROUNDS, {})
    stock_config = _stock(curriculum_config(curriculum, ours), one)
    stock = _measure(
        stock_config, SingleAgentEnvRunner(config=stock_config), curriculum, 2, {"num_timesteps": _STOCK_STEPS}
    )
    return {
        "steps_per_s": steps_per_s,
        "stock_steps_per_s": stock,
        "ratio": steps_per_s / stock,
        "streams": streams.scenarios * streams.keys,
        "cores": os.cpu_count(),
    }


def _single_key(curriculum: Curriculum) -> Curriculum:
    return curriculum.model_copy(update={"streams": curriculum.streams.model_copy(update={"keys": 1})})


def _stock(config: PPOConfig, make: Any) -> PPOConfig:
    """The same module and PPO with RLlib's own runner, connectors and learner."""
    config = config.copy(copy_frozen=False)
    config.environment(StreamEnvironment, env_config={"make": make})
    config.env_runners(env_runner_cls=SingleAgentEnvRunner, num_env_runners=0, num_envs_per_env_runner=_STOCK_ENVS)
    config.learners(
        learner_class=PPOTorchLearner, learner_connector=None, add_default_connectors_to_learner_pipeline=True
    )
    return config


def _measure(config: PPOConfig, runner: Any, curriculum: Curriculum, rounds: int, sampling: dict[str, Any]) -> float:
    """After one round that warms up."""
    learner = config.build_learner(spaces=runner.get_spaces())
    steps, began = 0, 0.0
    for number in range(rounds + 1):
        if number == 1:
            steps, began = 0, time.monotonic()
        episodes = runner.sample(**sampling)
        count = sum(len(e) for e in episodes)
        learner.update(
            episodes=episodes,
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: number},
            num_epochs=curriculum.learning.epochs,
            minibatch_size=max(1, count // curriculum.learning.minibatches),
            shuffle_batch_per_epoch=False,
        )
        runner.set_state(learner.get_state(components=COMPONENT_RL_MODULE, inference_only=True))
        steps += count
    return steps / (time.monotonic() - began)
