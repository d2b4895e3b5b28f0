"""RLlib's source of offline data, for sequences of decisions and a recurrent policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.offline.offline_data import OfflineData
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from dynamiccl_ray.agent.policy import PolicyNetwork
from dynamiccl_ray.arrays import Float32
from dynamiccl_ray.trainers.model.stacking import estimate
from dynamiccl_ray.trainers.offline.recorded import read_recorded

AT_ONCE: Final = 128
"""Episodes that go through the network in one piece where no batch is trained on."""


class RecordedData(OfflineData):  # type: ignore[misc]
    """What runs have recorded in the directories ``config.input_``; a sample is all of it, in an order of its own.

    RLlib's own hands files to Ray Data, for which there would have to be a cluster. It takes a row for an episode of
    one step, or for one that is serialised, and unpickles what a stranger may have written.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.iter_batches_kwargs: dict[str, Any] = {}
        self.recorded = read_recorded([Path(path) for path in config.input_])
        self._samples = 0

    @property
    def net(self) -> PolicyNetwork:
        """The learner's, as it is now."""
        net: PolicyNetwork = self.learner_handles[0].module[DEFAULT_MODULE_ID].unwrapped().net
        return net

    def sample(self, num_samples: int, **_: Any) -> MultiAgentBatch:
        """A training batch of E sequences; the learner cuts minibatches of ``num_samples`` steps between them, one
        sequence at least.

        Advantages are by the values that the learner's policy has now.
        """
        of, net = self.recorded, self.net
        values = _values(net, of.observations)
        gamma = self.config.gamma
        # Behind its end an episode has nothing left to win or to lose.
        rewards = np.where(of.valid, of.rewards, values[:, :-1] - gamma * values[:, 1:]).astype(np.float32)
        advantages = estimate(rewards, values, gamma, self.config.lambda_)
        targets = advantages + values[:, :-1]
        at_hand = advantages[of.valid]
        normal = (advantages - at_hand.mean()) / max(1e-4, float(at_hand.std()))
        count, length = of.valid.shape
        batch = {
            Columns.OBS: of.observations[:, :-1],
            Columns.ACTIONS: of.actions,
            Columns.ACTION_LOGP: of.log_probs,
            Columns.LOSS_MASK: of.valid,
            # As in StackEpisodes.
            Columns.ACTION_DIST_INPUTS: np.zeros((count, length, 1), np.float32),
            # By these RLlib counts how many sequences make a minibatch: of the longest, one.
            Columns.SEQ_LENS: np.full(count, min(length, num_samples - 1)),
            Postprocessing.ADVANTAGES: normal,
            Postprocessing.VALUE_TARGETS: targets,
        }
        order = np.random.default_rng((self.config.seed, self._samples)).permutation(count)
        self._samples += 1
        columns: dict[str, Any] = {name: torch.from_numpy(column[order]) for name, column in batch.items()}
        columns[Columns.STATE_IN] = initial(net, count)
        return MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch(columns, _zero_padded=True)}, env_steps=len(of))


def initial(net: PolicyNetwork, count: int) -> dict[str, torch.Tensor]:
    """The recurrent state in which each of so many sequences begins."""
    return {name: h.unsqueeze(0).repeat(count, 1, 1) for name, h in net.initial_state().items()}


def _values(net: PolicyNetwork, observations: Float32) -> Float32:
    """(E, T) values of sequences of observations (E, T, SIZE)."""
    out = []
    with torch.no_grad():
        for obs in torch.split(torch.from_numpy(observations), AT_ONCE):
            out.append(net.values(net.features(obs, initial(net, len(obs)))[0]))
    return np.asarray(torch.cat(out).numpy())
