"""What PPO is beside a job and on the model alike."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from dynamiccl_ray.actors.streams import ACTION_SPACE, OBSERVATION_SPACE
from dynamiccl_ray.settings import Ppo
from dynamiccl_ray.trainers.common.module import ConfigurationModule

Schedule = list[list[float]]
"""Rounds and values, linear in between."""


def module_spec(model: dict[str, Any]) -> RLModuleSpec:
    """The policy; ``model`` as ``ConfigurationModule`` takes it."""
    return RLModuleSpec(
        module_class=ConfigurationModule,
        observation_space=OBSERVATION_SPACE,
        action_space=ACTION_SPACE,
        model_config=model,
    )


def configure(
    config: PPOConfig, ppo: Ppo, *, lr: float | Schedule, entropy: Schedule, model: dict[str, Any], seed: int
) -> PPOConfig:
    """Adds module, loss and seed to ``config``; ``model`` is what the module wants beside ``ppo.hidden``."""
    return (
        config.rl_module(rl_module_spec=module_spec({"hidden": ppo.hidden, **model}))
        .training(
            lr=lr,
            gamma=ppo.gamma,
            lambda_=ppo.lambda_,
            num_epochs=ppo.epochs,
            minibatch_size=None,
            shuffle_batch_per_epoch=False,
            clip_param=ppo.clip,
            grad_clip=ppo.grad_clip,
            grad_clip_by="global_norm",
            vf_clip_param=1e6,
            vf_loss_coeff=0.5,
            use_kl_loss=False,
            entropy_coeff=entropy,
        )
        .debugging(seed=seed, log_level="ERROR")
    )
