"""RLlib's PPO learner, restored where it was."""

from __future__ import annotations

import copy
from typing import Any

import torch
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import COMPONENT_OPTIMIZER
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from dynamiccl_ray.cores import one_core

_AT = "schedules_at"


class ScheduledPPOLearner(PPOTorchLearner):  # type: ignore[misc]
    """PPO's learner whose schedules go on from a checkpoint; RLlib leaves them at their beginning.

    The learners of a group hold their schedules each, and each is restored.
    """

    def build(self) -> None:
        one_core()
        self._at: int | None = None
        super().build()

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        # RLlib's own Adam, all parameters in one call: they are so small that calls are what it costs.
        parameters = self.get_parameters(self.module[module_id])
        self.register_optimizer(
            module_id=module_id,
            optimizer=torch.optim.Adam(parameters, fused=True),
            params=parameters,
            lr_or_lr_schedule=config.lr,
        )

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
        self._at = timesteps[NUM_ENV_STEPS_SAMPLED_LIFETIME]

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().get_state(*args, **kwargs), _AT: self._at}

    def set_state(self, state: dict[str, Any]) -> None:
        if COMPONENT_OPTIMIZER in state:
            # A checkpoint: RLlib would keep its own weights where they have seen more updates than the state's, and
            # update the optimiser's averages in the state's own memory, which is all learners' where Ray brought it.
            self._weights_seq_no = 0
            state = {**state, COMPONENT_OPTIMIZER: copy.deepcopy(state[COMPONENT_OPTIMIZER])}
        super().set_state(state)
        if state.get(_AT) is not None:
            self.after_gradient_based_update(timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: state[_AT]})
