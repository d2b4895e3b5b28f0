"""PPO that learns only while the run is in a learning phase."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.ppo import PPO
from ray.rllib.utils.metrics import (
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
)

from dynamiccl_ray.actors.episodes import Experience
from dynamiccl_ray.actors.streams import experience
from dynamiccl_ray.trainers.online.placing import shares

# A restarting runner is asked again after every round; asking must not hold up the others.
RESTART_PROBE_S = 0.5
SYNC_LIMIT_S = 10.0


class TriggeredPPO(PPO):  # type: ignore[misc]
    """One ``train()`` is one round: runners sample on the live job; PPO updates if they brought learning episodes,
    and the new weights go out. Baseline and exploit rounds bring none, so no update runs in them."""

    def setup(self, config: Any) -> None:
        super().setup(config)
        self.learned: list[Experience] = []
        """What was learned from, for whoever takes it away."""

    def training_step(self) -> None:
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            # Calls on one runner run in order, so new weights are in place before its next round begins. A runner
            # that died is left out, restarted after this step by RLlib, and claims its ranks again.
            group = self.env_runner_group
            runners = group.healthy_env_runner_ids()
            if not runners:  # RLlib would take that for all
                return
            results = group.foreach_env_runner(
                ["sample"] * len(runners), kwargs=shares(runners), remote_worker_ids=runners, local_env_runner=False
            )
        episodes = [episode for result in results for episode in result]
        if not episodes:
            return
        self.learned += map(experience, episodes)
        phase_rounds = self.config.env_config["phase_rounds"]()
        minibatch_size = self.config.minibatch_size
        if minibatch_size is None and self.config.num_learners > 1:
            # All at once, as with one learner; RLlib needs the number to have all learners make as many steps.
            minibatch_size = max(1, sum(len(e) for e in episodes) // self.config.num_learners)
        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            results = self.learner_group.update(
                episodes=episodes,
                timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: phase_rounds},
                num_epochs=self.config.num_epochs,
                minibatch_size=minibatch_size,
                shuffle_batch_per_epoch=self.config.shuffle_batch_per_epoch,
            )
            self.metrics.aggregate(results, key=LEARNER_RESULTS)
        with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
            self.env_runner_group.sync_weights(
                from_worker_or_learner_group=self.learner_group, inference_only=True, timeout_seconds=SYNC_LIMIT_S
            )

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """Brings back runners that Ray has restarted: with the learner's weights, and nothing else. Their ranks are
        where the shared memory says they are."""
        restored: list[int] = env_runner_group.probe_unhealthy_env_runners(timeout_seconds=RESTART_PROBE_S)
        if restored:
            env_runner_group.sync_weights(
                from_worker_or_learner_group=self.learner_group,
                to_worker_indices=restored,
                inference_only=True,
                timeout_seconds=SYNC_LIMIT_S,
            )
        return restored
