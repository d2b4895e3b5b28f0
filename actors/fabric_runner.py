"""Samples on the fabric model, without a job: hundreds of streams decided by one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch

from dynamiccl_ray.actors.episodes import Episodes
from dynamiccl_ray.actors.runner import PolicyRunner
from dynamiccl_ray.actors.streams import OBSERVATION_SPACE
from dynamiccl_ray.agent import policy
from dynamiccl_ray.agent.reward import means
from dynamiccl_ray.simulation.streams import Simulation

TEACHER = "teacher"
"""Column of a training batch: what a policy that knew every time would have chosen."""


@dataclass(frozen=True)
class Share:
    """A runner's share of a round's streams: the ``index``-th of ``of``."""

    number: int
    """Of the round, from the beginning of the curriculum."""
    stage: int
    index: int = 0
    of: int = 1


class FabricEnv(TypedDict):
    """``config.env_config`` of a ``FabricRunner``."""

    simulation: Callable[[Share], Simulation]
    """Called for the streams of a share."""
    seed: int


class FabricRunner(PolicyRunner):
    """``config.env_config`` is a ``FabricEnv``.

    One ``sample`` is one round: an episode of every stream of this runner's share, in as many pieces of one size as
    there are learners for each runner. What is drawn depends on the state alone, ``rounds`` and ``stage``, so that a
    runner goes on wherever it is told to.
    """

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        env: FabricEnv = config.env_config
        self._simulation, self._seed = env["simulation"], env["seed"]
        self._pieces = -(-max(1, config.num_learners) // self.share[1])
        self.rounds, self.stage = 0, 0

    def get_state(self, components: Any = None, *, not_components: Any = None, **_: Any) -> dict[str, Any]:
        return {"rounds": self.rounds, "stage": self.stage}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.rounds, self.stage = state.get("rounds", self.rounds), state.get("stage", self.stage)

    def stop(self) -> None:
        """Nothing is held."""

    def sample(self, **_: Any) -> list[Episodes]:
        index, of = self.share
        simulation = self._simulation(Share(self.rounds, self.stage, index, of))
        entropy = np.random.SeedSequence((self._seed, index, self.rounds)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(entropy[0]))
        self.rounds += 1
        net: policy.PolicyNetwork = self.module.net
        n, epochs = len(simulation), simulation.epochs
        state = {k: v.unsqueeze(0).expand(n, *v.shape) for k, v in net.initial_state().items()}
        obs = np.empty((n, epochs + 1, OBSERVATION_SPACE.shape[0]), np.float32)
        actions, log_p = np.empty((n, epochs, 3), np.int64), np.empty((n, epochs), np.float32)
        teacher, rewards = np.empty((n, epochs, 3), np.int64), np.empty((n, epochs), np.float32)
        values = np.empty((n, epochs + 1), np.float32)
        obs[:, 0] = simulation.reset()
        terms: dict[str, float] = {}
        for t in range(epochs + 1):
            with torch.no_grad():
                x = torch.from_numpy(obs[:, t]).unsqueeze(1)
                features, state = net.features(x, state)
                values[:, t] = net.values(features)[:, 0].numpy()
                if t == epochs:
                    break
                drawn, log_prob = policy.sample(net, x, features, generator)
            teacher[:, t] = simulation.teacher()
            actions[:, t], log_p[:, t] = drawn[:, 0].numpy(), log_prob[:, 0].numpy()
            obs[:, t + 1], rewards[:, t] = simulation.step(actions[:, t])
            for name, mean in means(simulation.terms).items():
                terms[name] = terms.get(name, 0.0) + mean / epochs
        round_ = Episodes(
            observations=obs,
            actions=actions,
            log_probs=log_p,
            teacher=teacher,
            rewards=rewards,
            values=values,
            reward_terms=terms,
        )
        return round_.split(self._pieces)
