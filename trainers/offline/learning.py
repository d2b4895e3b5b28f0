"""What RLlib's MARWIL and PPO are on recorded episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.marwil import MARWIL, MARWILConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig

from dynamiccl_ray.actors.streams import ACTION_SPACE, OBSERVATION_SPACE
from dynamiccl_ray.settings import Ppo
from dynamiccl_ray.trainers.common.ppo import configure, module_spec
from dynamiccl_ray.trainers.common.scheduled_ppo import ScheduledPPOLearner
from dynamiccl_ray.trainers.offline import Method
from dynamiccl_ray.trainers.offline.data import RecordedData

PASSES: Final = 10
"""Over all that was recorded."""
_SETTINGS: Final = Ppo(lr=1e-3, epochs=1, entropy=0.001)
# Decisions of a minibatch.
_MINIBATCH: Final = 512
# Of MARWIL; 0 is behaviour cloning.
_BETA: Final[Mapping[Method, float]] = {Method.BC: 0.0, Method.MARWIL: 1.0}
# The mean square of the advantages, by which they are divided, and how fast it follows them: RLlib's 100 and 1e-8 would
# never come near those of log times.
_SQUARE: Final = 0.1
_SQUARE_RATE: Final = 0.01


class _WithoutDirectory:
    """An algorithm that writes nothing; Tune would make a directory under the home directory."""

    _logdir: str | None

    def _setup_logdir(self) -> None:
        self._logdir = None


class OfflineMARWIL(_WithoutDirectory, MARWIL):  # type: ignore[misc]
    """RLlib's."""


class OfflinePPO(_WithoutDirectory, PPO):  # type: ignore[misc]
    """PPO whose episodes are those that were recorded, as often as it is asked to train."""

    training_step = MARWIL.training_step


class OfflinePPOConfig(PPOConfig):  # type: ignore[misc]
    """No runner samples."""

    @property
    def is_online(self) -> bool:
        return False


def offline_config(method: Method, runs: Sequence[Path], start: Path, seed: int) -> AlgorithmConfig:
    """RLlib's configuration: ``train`` is one pass over the episodes of ``runs``. ``start`` is the policy to start
    from."""
    model = {"policy": str(start)}
    if method is Method.PPO:
        entropy = [[0, _SETTINGS.entropy], [1, _SETTINGS.entropy_end]]
        config: Any = configure(
            OfflinePPOConfig(algo_class=OfflinePPO), _SETTINGS, lr=_SETTINGS.lr, entropy=entropy, model=model, seed=seed
        ).learners(learner_class=ScheduledPPOLearner)
    else:
        config = (
            MARWILConfig(algo_class=OfflineMARWIL)
            .rl_module(rl_module_spec=module_spec(model))
            .training(
                beta=_BETA[method],
                moving_average_sqd_adv_norm_start=_SQUARE,
                moving_average_sqd_adv_norm_update_rate=_SQUARE_RATE,
                lr=_SETTINGS.lr,
                gamma=_SETTINGS.gamma,
                grad_clip=_SETTINGS.grad_clip,
                grad_clip_by="global_norm",
            )
            .debugging(seed=seed, log_level="ERROR")
        )
    return (
        config.environment(observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE)
        .offline_data(
            input_=[str(path) for path in runs], offline_data_class=RecordedData, dataset_num_iters_per_learner=1
        )
        .training(train_batch_size_per_learner=_MINIBATCH)
        .evaluation(off_policy_estimation_methods={})
        .debugging(log_sys_usage=False)
    )
