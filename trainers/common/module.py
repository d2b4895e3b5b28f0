"""The policy network as RLlib sees it: an RLModule and its action distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.models.torch.torch_distributions import TorchDistribution
from torch import Tensor

from dynamiccl_ray.actors.episodes import TEACHER
from dynamiccl_ray.agent import policy


class ActionDistribution(TorchDistribution):  # type: ignore[misc]
    """The autoregressive joint of ``dynamiccl_ray.agent.policy`` under RLlib's interface."""

    def __init__(self, *, logits: Tensor) -> None:
        super().__init__(logits=logits)
        self.logits = logits

    def _get_torch_distribution(self, logits: Tensor) -> None:
        return None  # the joint has no torch counterpart; every method below is exact

    def sample(self, *, sample_shape: Any = None, **_: Any) -> Tensor:
        noise = -torch.log(-torch.log(torch.rand_like(self.logits).clamp_(1e-20)).clamp_(1e-20))
        return policy.greedy(self.logits + noise)

    def rsample(self, **_: Any) -> Tensor:
        raise TypeError("a discrete action has no reparametrised sample")

    def logp(self, value: Tensor, **_: Any) -> Tensor:
        return policy.log_prob(self.logits, value)

    def entropy(self) -> Tensor:
        return policy.entropy(self.logits)

    def kl(self, other: ActionDistribution, **_: Any) -> Tensor:
        raise TypeError("PPO runs without its KL term here: set use_kl_loss=False")

    def to_deterministic(self) -> Any:
        raise TypeError("use dynamiccl_ray.policy.greedy")

    @staticmethod
    def required_input_dim(space: Any, **_: Any) -> int:
        return policy.ACTION_LOGITS

    @classmethod
    def from_logits(cls, logits: Tensor, **_: Any) -> ActionDistribution:
        return cls(logits=logits)


class ChosenDistribution(ActionDistribution):
    """The same joint, where channels and chunk are known only for the pairs of the actions that are asked about.

    Updates need no more: most of an update's time would go into what follows pairs that nobody chose.
    """

    def logp(self, value: Tensor, **_: Any) -> Tensor:
        return policy.chosen_log_prob(self.logits, value)

    def entropy(self) -> Tensor:
        """Exact over pairs; of what follows, that of the chosen pair, which is right on average."""
        return policy.chosen_entropy(self.logits)

    def sample(self, **_: Any) -> Tensor:
        raise TypeError("only ActionDistribution knows enough to draw from")

    @staticmethod
    def required_input_dim(space: Any, **_: Any) -> int:
        return sum(policy.ACTION_HEADS)


class ConfigurationModule(TorchRLModule, ValueFunctionAPI):  # type: ignore[misc]
    """Agent-2. Model config: ``hidden`` units, ``experts`` and ``max_seq_len``, epochs of a training sequence; or
    ``policy``, the file of a trained one to start from, whose sizes then hold."""

    def setup(self) -> None:
        trained = self.model_config.get("policy")
        if trained is not None:
            self.net = policy.load(Path(trained))
        else:
            self.net = policy.PolicyNetwork(self.model_config.get("hidden", 64), self.model_config.get("experts", 4))
        self.action_dist_cls = ActionDistribution

    def get_initial_state(self) -> dict[str, Any]:
        return {k: v.numpy() for k, v in self.net.initial_state().items()}

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        features, state = self.net.features(batch[Columns.OBS], batch[Columns.STATE_IN])
        return {
            Columns.ACTION_DIST_INPUTS: self.net.logits(batch[Columns.OBS], features),
            Columns.STATE_OUT: state,
            Columns.EMBEDDINGS: features,
        }

    def _forward_train(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        """For the batch's actions alone, and for the teacher's where there is one."""
        obs = batch[Columns.OBS]
        features, state = self.net.features(obs, batch[Columns.STATE_IN])
        pair, x = self.net.pairs(obs, features)
        actions = [batch[name] for name in (Columns.ACTIONS, TEACHER) if name in batch]
        channels, chunks = self.net.given(obs, x, torch.stack([a[..., 0].long() for a in actions], -1))
        inputs = [torch.cat([pair, channels[..., i, :], chunks[..., i, :]], -1) for i in range(len(actions))]
        return {
            Columns.ACTION_DIST_INPUTS: inputs[0],
            TEACHER: inputs[-1],
            Columns.STATE_OUT: state,
            Columns.EMBEDDINGS: features,
        }

    def get_train_action_dist_cls(self) -> type[ActionDistribution]:
        return ChosenDistribution

    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        if embeddings is None:
            embeddings, _ = self.net.features(batch[Columns.OBS], batch[Columns.STATE_IN])
        return self.net.values(embeddings)
