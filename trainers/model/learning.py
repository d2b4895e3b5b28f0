"""PPO's configuration for a curriculum on the fabric model."""

from __future__ import annotations

from collections.abc import Callable

from ray.rllib.algorithms.ppo import PPOConfig

from dynamiccl_ray.actors.fabric_runner import FabricEnv, FabricRunner, Share
from dynamiccl_ray.actors.streams import ACTION_SPACE, OBSERVATION_SPACE
from dynamiccl_ray.config.curriculum import Curriculum
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.simulation.streams import Simulation
from dynamiccl_ray.trainers.common.ppo import configure
from dynamiccl_ray.trainers.model.stacking import StackEpisodes
from dynamiccl_ray.trainers.model.taught_ppo import TaughtPPOLearner


def curriculum_config(
    curriculum: Curriculum, simulation: Callable[[Share], Simulation], *, runners: int = 0, learners: int = 0
) -> PPOConfig:
    """RLlib's PPO over FabricRunners. The ``timesteps`` that schedules run over are rounds.

    Raises ConfigError where ``runners`` and ``learners`` cannot all have as many streams: RLlib would cut episodes; and
    where a learner has fewer than minibatches.
    """
    ppo, streams = curriculum.ppo, curriculum.streams
    parts = sorted((max(1, runners), max(1, learners)))
    if parts[1] % parts[0] or streams.scenarios % parts[1]:
        raise ConfigError(
            f"{runners} runners and {learners} learners cannot share {streams.scenarios} scenarios a round evenly; one "
            "number must divide the other, and both must divide streams.scenarios"
        )
    if ppo.minibatches > curriculum.sequences // max(1, learners):
        raise ConfigError(
            f"{learners} learners cannot share {curriculum.sequences} sequences a round (streams.scenarios times "
            f"streams.keys): each needs one for each of ppo.minibatches, {ppo.minibatches}; lower one of the two"
        )
    config = (
        PPOConfig()
        .environment(
            observation_space=OBSERVATION_SPACE,
            action_space=ACTION_SPACE,
            env_config=FabricEnv(simulation=simulation, seed=curriculum.seed),
        )
        .env_runners(env_runner_cls=FabricRunner, num_env_runners=runners)
        .learners(
            num_learners=learners,
            learner_class=TaughtPPOLearner,
            learner_config_dict={"teacher": [[0, ppo.teacher], [ppo.rounds * 2 // 3, ppo.teacher_end]]},
            learner_connector=lambda *spaces: StackEpisodes(*spaces, gamma=ppo.gamma, lambda_=ppo.lambda_),
            add_default_connectors_to_learner_pipeline=False,
        )
    )
    return configure(
        config,
        ppo,
        lr=[[0, ppo.lr], [ppo.rounds // 3, ppo.lr], [ppo.rounds, ppo.lr_end]],
        entropy=[[0, ppo.entropy], [ppo.rounds, ppo.entropy_end]],
        model={"experts": ppo.experts, "max_seq_len": curriculum.control.learning.sequence},
        seed=curriculum.seed,
    )
