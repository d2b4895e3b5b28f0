"""``dynamiccl bench train``: environment steps a second, learner included, beside RLlib's stock runner."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final, TypedDict

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from dynamiccl_ray.actors.streams import ACTION_SPACE, OBSERVATION_SPACE
from dynamiccl_ray.agent import policy
from dynamiccl_ray.agent.policy import PolicyNetwork
from dynamiccl_ray.config.curriculum import Curriculum, Validation
from dynamiccl_ray.cores import one_core
from dynamiccl_ray.simulation.splits import stage_scenarios
from dynamiccl_ray.simulation.streams import Simulation
from dynamiccl_ray.trainers.common.cluster import start_ray
from dynamiccl_ray.trainers.model.curriculum import CurriculumTrainable
from dynamiccl_ray.trainers.model.learning import curriculum_config
from dynamiccl_ray.trainers.model.rounds import Rounds

MODES: Final = {"in_process": (0, 0), "one_runner": (1, 0), "two_runners_two_learners": (2, 2)}
"""Runners and learners in Ray actors of their own."""
_ROUNDS: Final = 12
_REPEATS: Final = 3
_STOCK_STEPS: Final = 768
_STOCK_ENVS: Final = 8
_STOCK_SEED: Final = 10
_KEYS: Final = 200
_DECISIONS: Final = 100


class StreamEnv(TypedDict):
    """``config.env_config`` of a ``StreamEnvironment``."""

    make: Callable[[], Simulation]


class StreamEnvironment(gym.Env):  # type: ignore[type-arg]
    """One stream of a simulation, as gymnasium wants it: what the stock runner steps one by one."""

    observation_space, action_space = OBSERVATION_SPACE, ACTION_SPACE

    def __init__(self, config: StreamEnv) -> None:
        self._simulation = config["make"]()
        self._epoch = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._epoch = 0
        return self._simulation.reset()[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._epoch += 1
        obs, reward = self._simulation.step(np.asarray(action)[None])
        return obs[0], float(reward[0]), False, self._epoch >= self._simulation.epochs, {}


def bench_train(curriculum: Curriculum) -> dict[str, Any]:
    """Steps a second of every mode and of RLlib's stock runner, with the curriculum's PPO, in turns and in one run.

    Each is measured ``_REPEATS`` times after one that warms it up; the fastest counts, because whatever else runs on
    the machine only ever slows down. ``mode`` is the fastest of ours, which ``steps_per_s`` and ``ratio`` are of.
    """
    import ray

    rounds = curriculum.model_copy(
        update={
            "stages": (curriculum.stages[0].model_copy(update={"promote": 1.0, "most_rounds": 1 << 30}),),
            "validation": Validation(scenarios=1, collectives=8, every_rounds=_ROUNDS),
        }
    )
    started = not ray.is_initialized()
    if started:
        start_ray(sum(runners + learners for runners, learners in MODES.values()))
    runs = {}
    try:
        with tempfile.TemporaryDirectory() as out:
            for name, (runners, learners) in MODES.items():
                settings = {"curriculum": rounds, "runners": runners, "learners": learners, "out": out}
                runs[name] = CurriculumTrainable(settings)
            stock = _Stock(curriculum)
            found: dict[str, list[float]] = {name: [] for name in (*runs, "stock")}
            for _ in range(1 + _REPEATS):
                for name, run in runs.items():
                    found[name].append(run.train()["steps_per_s"])
                found["stock"].append(stock.steps_per_s())
    finally:
        for run in runs.values():
            run.stop()
        if started:
            ray.shutdown()
    best = {name: max(rates[1:]) for name, rates in found.items()}
    mode = max(MODES, key=best.__getitem__)
    return {
        "steps_per_s": best[mode],
        "stock_steps_per_s": best["stock"],
        "ratio": best[mode] / best["stock"],
        "mode": mode,
        **{f"{name}_steps_per_s": best[name] for name in MODES},
        "decision_200_keys_ms": decision_ms(curriculum),
        "streams": curriculum.streams.scenarios * curriculum.streams.keys,
        "cores": os.cpu_count(),
    }


def decision_ms(curriculum: Curriculum, keys: int = _KEYS) -> dict[str, float]:
    """Milliseconds in which one core decides for so many keys of one communicator: ``observe`` encodes what is known,
    ``decide`` is the network. Medians of ``_DECISIONS``.
    """
    one = curriculum.model_copy(update={"streams": curriculum.streams.model_copy(update={"keys": keys})})
    (scenario,) = stage_scenarios(curriculum.stages[-1], one, (curriculum.seed, _STOCK_SEED), 1)
    simulation = Simulation([scenario], control=curriculum.control, seed=0)
    simulation.reset()
    net = PolicyNetwork(curriculum.ppo.hidden, curriculum.ppo.experts)
    state = {name: h.expand(keys, *h.shape) for name, h in net.initial_state().items()}
    one_core()
    took = []
    with torch.no_grad():
        for _ in range(_DECISIONS):
            began = time.perf_counter()
            obs = torch.from_numpy(simulation.loop.due().observation).unsqueeze(1)
            observed = time.perf_counter()
            features, _ = net.features(obs, state)
            policy.decide(net, obs, features)
            took.append((observed - began, time.perf_counter() - observed))
    return dict(zip(("observe", "decide"), (1e3 * np.median(took, 0)).tolist(), strict=True))


class _Stock:
    """The same module and PPO with RLlib's own runner, connectors and learner, in this process."""

    def __init__(self, curriculum: Curriculum) -> None:
        self._curriculum, self._number = curriculum, 0
        streams = curriculum.streams
        single = curriculum.model_copy(update={"streams": streams.model_copy(update={"keys": 1})})

        def one() -> Simulation:
            whole = stage_scenarios(curriculum.stages[0], single, (curriculum.seed, _STOCK_SEED), 1)
            return Simulation(whole, control=curriculum.control, seed=0)

        config = curriculum_config(curriculum, Rounds(curriculum)).copy(copy_frozen=False)
        config.environment(StreamEnvironment, env_config=StreamEnv(make=one))
        config.env_runners(env_runner_cls=SingleAgentEnvRunner, num_env_runners=0, num_envs_per_env_runner=_STOCK_ENVS)
        config.learners(
            learner_class=PPOTorchLearner, learner_connector=None, add_default_connectors_to_learner_pipeline=True
        )
        self._runner = SingleAgentEnvRunner(config=config)
        self._learner = config.build_learner(spaces=self._runner.get_spaces())

    def steps_per_s(self) -> float:
        """Of one round of sampling and updating."""
        began, ppo = time.monotonic(), self._curriculum.ppo
        episodes = self._runner.sample(num_timesteps=_STOCK_STEPS)
        steps = sum(len(e) for e in episodes)
        self._learner.update(
            episodes=episodes,
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self._number},
            num_epochs=ppo.epochs,
            minibatch_size=max(1, steps // ppo.minibatches),
            shuffle_batch_per_epoch=False,
        )
        self._runner.set_state(self._learner.get_state(components=COMPONENT_RL_MODULE, inference_only=True))
        self._number += 1
        return steps / (time.monotonic() - began)
