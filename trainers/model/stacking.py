"""From episodes of one length to a training batch in one step each: join, estimate advantages.

RLlib's own pieces take episodes apart and put them together item by item, which costs more than the update itself when
there are thousands of short ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing

from dynamiccl_ray.actors.episodes import TEACHER, Episodes

Floats = NDArray[np.float32]


class StackEpisodes(ConnectorV2):  # type: ignore[misc]
    """Learner connector for FabricRunner's episodes, recurrent from their first step."""

    def __init__(self, *spaces: Any, gamma: float, lambda_: float) -> None:
        super().__init__(*spaces)
        self._gamma, self._lambda = gamma, lambda_

    def __call__(
        self, *, rl_module: Any, episodes: list[Episodes], batch: dict[str, Any], shared_data: dict[str, Any], **_: Any
    ) -> dict[str, Any]:
        net = rl_module[DEFAULT_MODULE_ID].unwrapped().net
        whole = Episodes.join(episodes)
        rewards, count = whole.rewards, len(whole.rewards)
        initial = {k: v.unsqueeze(0).repeat(count, 1, 1) for k, v in net.initial_state().items()}
        advantages = estimate(rewards, whole.values, self._gamma, self._lambda)
        targets = advantages + whole.values[:, :-1]
        normal = (advantages - advantages.mean()) / max(1e-4, float(advantages.std()))
        batch[DEFAULT_MODULE_ID] = {
            Columns.OBS: torch.from_numpy(whole.observations[:, :-1]),
            Columns.ACTIONS: torch.from_numpy(whole.actions),
            TEACHER: torch.from_numpy(whole.teacher),
            Columns.ACTION_LOGP: torch.from_numpy(whole.log_probs),
            # PPO wraps these in a distribution that only its KL term, which is off, would look at.
            Columns.ACTION_DIST_INPUTS: torch.zeros(*rewards.shape, 1),
            Columns.STATE_IN: initial,
            Columns.SEQ_LENS: torch.full((count,), rewards.shape[1]),
            Postprocessing.ADVANTAGES: torch.from_numpy(normal),
            Postprocessing.VALUE_TARGETS: torch.from_numpy(targets),
        }
        # Minibatches are cut between episodes, never within.
        shared_data[f"_zero_padded_for_mid={DEFAULT_MODULE_ID}"] = True
        return batch


def estimate(rewards: Floats, values: Floats, gamma: float, lambda_: float) -> Floats:
    """Generalised advantages (E, T) of rewards (E, T) and values (E, T + 1), cut off rather than ended at T.

    Schulman et al. 2016, arXiv:1506.02438, equation 16.
    """
    delta = rewards + gamma * values[:, 1:] - values[:, :-1]
    out = np.empty_like(rewards)
    running = np.zeros(len(rewards), np.float32)
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = delta[:, t] + np.float32(gamma * lambda_) * running
        out[:, t] = running
    return out
