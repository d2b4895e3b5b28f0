"""Episodes that a policy has drawn from made-up observations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dynamiccl_ray.actors.episodes import Experience
from dynamiccl_ray.agent import observation, policy
from dynamiccl_ray.arrays import Float32, Int64
from dynamiccl_ray.trainers.online.recorder import Recorder

Reward = Callable[[Int64], Float32]


def episodes(net: policy.PolicyNetwork, reward: Reward, *, count: int = 24, decisions: int = 8) -> list[Experience]:
    """Every second one is shorter. ``reward`` is of heads (T, 3), (T,)."""
    out = []
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for number in range(count):
        length = decisions - number % 2
        obs = rng.normal(0, 0.1, (1 + length, observation.SIZE)).astype(np.float32)
        for name in ("valid_channels", "valid_chunks"):
            observation.part(obs, name)[:] = 1
        observation.part(obs, "pairs")[..., 0] = 1
        observation.part(obs, "heat")[:] = 0
        x = torch.from_numpy(obs[None, :-1])
        with torch.no_grad():
            state = {name: h.unsqueeze(0) for name, h in net.initial_state().items()}
            features, _ = net.features(x, state)
            heads, log_probs = (y[0].numpy() for y in policy.sample(net, x, features, generator))
        out.append(
            Experience(
                comm=7,
                key=number,
                ordinal=0,
                observations=obs,
                heads=heads,
                log_probs=log_probs,
                rewards=reward(heads),
            )
        )
    return out


def recorded(directory: Path, of: list[Experience]) -> Path:
    """What a run that learned from these leaves."""
    directory.mkdir()
    with Recorder(directory, "run", 0) as recorder:
        recorder.learned(of)
    return directory
