"""PPO's configuration for an experiment, shared by the Ray and the serial mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.rllib.algorithms.ppo import PPOConfig

from dynamiccl_ray.actors.messages import Coordination
from dynamiccl_ray.actors.rank_runner import RankEnv, RankRunner
from dynamiccl_ray.actors.streams import ACTION_SPACE, OBSERVATION_SPACE
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.trainers.common.ppo import configure
from dynamiccl_ray.trainers.common.scheduled_ppo import ScheduledPPOLearner


def ppo_config(
    experiment: Online,
    *,
    coordination: Callable[[], Coordination],
    runners: int,
    on_node: Callable[[], int] | None = None,
    algo_class: Any = None,
    resources: dict[str, float] | None = None,
) -> PPOConfig:
    """RLlib's PPO over RankRunners. ``runners`` 0 means one in this process, and the learner there, too; ``on_node``
    says, in a runner's process, how many of them its node has (all of them without); ``resources`` is what Ray must
    set aside for each, which decides on which nodes they run.

    Entropy falls with the rounds of a learning phase: the ``timesteps`` that are given to the learner count rounds
    since the phase began, so that every trigger raises it again.
    """
    ppo = experiment.ppo
    config = (
        PPOConfig(algo_class=algo_class)
        .environment(
            observation_space=OBSERVATION_SPACE,
            action_space=ACTION_SPACE,
            env_config=RankEnv(
                coordination=coordination, experiment=experiment, on_node=on_node or (lambda: max(1, runners))
            ),
        )
        .env_runners(
            env_runner_cls=RankRunner,
            num_env_runners=runners,
            num_cpus_per_env_runner=0,
            custom_resources_per_env_runner=resources or {},
            create_local_env_runner=runners == 0,
        )
        .learners(num_learners=ppo.learners if runners else 0, learner_class=ScheduledPPOLearner)
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
            "max_seq_len": experiment.epochs.per_round,
        },
        seed=experiment.seed,
    )
