"""PPO's configuration for a curriculum on the fabric model."""

from __future__ import annotations

from collections.abc import Callable

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from actors.fabric_runner import FabricRunner
from actors.streams import ACTION_SPACE, OBSERVATION_SPACE
from dynamiccl_ray.curriculum import Curriculum
from dynamiccl_ray.simulation import Simulation
from trainers.module import ConfigurationModule
from trainers.stacking import StackEpisodes
from trainers.taught_ppo import TaughtPPOLearner


def curriculum_config(curriculum: Curriculum, simulation: Callable[[int, int], Simulation]) -> PPOConfig:
    """RLlib's PPO over FabricRunners. The ``timesteps`` that schedules run over are rounds."""
    learning, streams = curriculum.learning, curriculum.streams
    return (
        PPOConfig()
        .environment(
            observation_space=OBSERVATION_SPACE,
            action_space=ACTION_SPACE,
            # A plain function: RLlib copies its configuration deeply, and a bound method would take the run with it.
            env_config={"simulation": lambda index, number: simulation(index, number), "seed": curriculum.seed},
        )
        .env_runners(env_runner_cls=FabricRunner, num_env_runners=0)
        .learners(
            num_learners=0,
            learner_class=TaughtPPOLearner,
            learner_config_dict={"teacher": [[0, learning.teacher], [learning.rounds * 2 // 3, learning.teacher_end]]},
            learner_connector=lambda *spaces: StackEpisodes(*spaces, gamma=learning.gamma, lambda_=learning.lambda_),
            add_default_connectors_to_learner_pipeline=False,
        )
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=ConfigurationModule,
                observation_space=OBSERVATION_SPACE,
                action_space=ACTION_SPACE,
                model_config={"hidden": learning.hidden, "experts": learning.experts, "max_seq_len": streams.epochs},
            )
        )
        .training(
            lr=[[0, learning.lr], [learning.rounds // 3, learning.lr], [learning.rounds, learning.lr_end]],
            gamma=learning.gamma,
            lambda_=learning.lambda_,
            num_epochs=learning.epochs,
            minibatch_size=None,
            clip_param=learning.clip,
            grad_clip=learning.grad_clip,
            grad_clip_by="global_norm",
            vf_clip_param=1e6,
            vf_loss_coeff=0.5,
            use_kl_loss=False,
            entropy_coeff=[[0, learning.entropy], [learning.rounds, learning.entropy_end]],
        )
        .debugging(seed=curriculum.seed, log_level="ERROR")
    )
