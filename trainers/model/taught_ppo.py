"""PPO with a teacher that knows every time, and that is listened to less and less."""

from __future__ import annotations

from typing import Any

from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.rllib.utils.schedules.scheduler import Scheduler
from torch import Tensor

from dynamiccl_ray.actors.episodes import TEACHER
from dynamiccl_ray.agent import policy
from dynamiccl_ray.trainers.common.scheduled_ppo import ScheduledPPOLearner


class TaughtPPOLearner(ScheduledPPOLearner):
    """Adds ``teacher`` times the cross entropy to the teacher's actions, on the states that the policy itself visits.

    Of some thousand actions of a key most are worse than NCCL's own, so that PPO alone first learns to leave
    everything alone. The fabric model knows every time, and says so with a weight that falls, a schedule over
    ``learner_config_dict["teacher"]`` (kickstarting: Schmitt et al. 2018, arXiv:1803.03835).
    """

    def build(self) -> None:
        super().build()
        self._teacher = Scheduler(fixed_value_or_schedule=self.config.learner_config_dict["teacher"], framework="torch")

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: dict[str, Any], fwd_out: Any) -> Tensor:
        loss: Tensor = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        weight = self._teacher.get_current_value()
        if weight > 0:
            # What the guardrail has ruled out, by bad luck, is not to be chosen, and teaches nothing.
            said = policy.chosen_log_prob(fwd_out[TEACHER], batch[TEACHER])
            loss = loss - weight * said.masked_fill(said < policy.MASKED / 2, 0).mean()
        return loss

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
        self._teacher.update(timestep=timesteps[NUM_ENV_STEPS_SAMPLED_LIFETIME])
