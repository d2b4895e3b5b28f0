"""PPO's configuration for an experiment, shared by the Ray and the serial mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.rllib.algorithms.ppo import PPOConfig

from dynamiccl_ray.actors.messages import Coordination
from dynamiccl_ray.actors.rank_runner import RankEnv, RankRunner
from dynamiccl_ray.actors.runner import PolicyRunner
from dynamiccl_ray.actors.streams import ACTION_SPACE, OBSERVATION_SPACE
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.trainers.common.ppo import configure
from dynamiccl_ray.trainers.common.scheduled_ppo import ScheduledPPOLearner


def ppo_config(
    experiment: Online,
    *,
    coordination: Callable[[], Coordination],
    per_node: int = 1,
    learners: int = 0,
    local: type[PolicyRunner] = RankRunner,
    algo_class: Any = None,
) -> PPOConfig:
    """RLlib's PPO over RankRunners, of which ``per_node`` share the processes of a node. ``learners`` are actors; 0
    means in this process. ``local`` is the runner in this process; ``placing.py`` starts those elsewhere.

    Entropy falls with the rounds of a learning phase: the ``timesteps`` that are given to the learner count rounds
    since the phase began, so that every trigger raises it again.
    """
    ppo = experiment.ppo
    config = (
        PPOConfig(algo_class=algo_class)
        .environment(
            observation_space=OBSERVATION_SPACE,
            action_space=ACTION_SPACE,
            env_config=RankEnv(coordination=coordination, experiment=experiment, per_node=per_node),
        )
        .env_runners(env_runner_cls=local, num_env_runners=0)
        .learners(num_learners=learners, learner_class=ScheduledPPOLearner)
        .fault_tolerance(restart_failed_env_runners=True)
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0)
    )
    return configure(
        config,
        ppo,
        lr=ppo.lr,
        entropy=[[0, ppo.entropy], [ppo.entropy_rounds, ppo.entropy_end]],
        model={
            "policy": None if experiment.policy is None else str(experiment.policy),
            "max_seq_len": experiment.control.learning.sequence,
        },
        seed=experiment.seed,
    )
