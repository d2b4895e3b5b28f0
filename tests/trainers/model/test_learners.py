"""Learners of a live job: restored where they were, and more than one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from small import small_experiment

from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.runner import SPACES
from dynamiccl_ray.actors.streams import _Decision, _Stream
from dynamiccl_ray.agent.observation import SIZE
from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING, agreement_violations
from dynamiccl_ray.plugin_bridge.played import play
from dynamiccl_ray.trainers.common.cluster import start_ray
from dynamiccl_ray.trainers.online.backends import RayBackend
from dynamiccl_ray.trainers.online.learning import ppo_config


def test_a_restored_learner_has_the_entropy_coefficient_that_it_was_saved_with(job: str) -> None:
    def entropy(learner: Any) -> float:
        return float(learner.entropy_coeff_schedulers_per_module[DEFAULT_MODULE_ID].get_current_value())

    experiment = small_experiment(job, ppo={"entropy": 0.1, "entropy_end": 0.0, "entropy_rounds": 10})
    config = ppo_config(experiment, coordination=lambda: None)  # type: ignore[arg-type, return-value]
    learner, restored = (config.build_learner(spaces=SPACES) for _ in range(2))
    learner.after_gradient_based_update(timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: 4})
    assert entropy(learner) == np.float32(0.06)
    assert entropy(restored) == np.float32(0.1)
    restored.set_state(learner.get_state())
    assert entropy(restored) == entropy(learner)


def test_what_an_update_computes_does_not_grow_with_the_epochs_of_a_round(job: str, monkeypatch: Any) -> None:
    """RLlib pads every episode to the longest that there may be: 32 decisions, however long a round is."""
    experiment = small_experiment(job, epochs={"per_round": 10_000}, ppo={"epochs": 1})
    learner = ppo_config(experiment, coordination=lambda: None).build_learner(spaces=SPACES)  # type: ignore[arg-type, return-value]
    net, shapes = learner.module[DEFAULT_MODULE_ID].net, []
    features = net.features
    monkeypatch.setattr(net, "features", lambda obs, state: (shapes.append(obs.shape[:2]), features(obs, state))[1])
    stream = _Stream(of={"comm": 0, "key": 0, "ordinal": 0}, observations=[np.zeros(SIZE, np.float32)])
    initial = {name: h.numpy() for name, h in net.initial_state().items()}
    for ordinal in range(3):
        stream.open = _Decision(ordinal, np.zeros(3, np.int64), -1.0, initial)
        assert stream.judge(ordinal + 1, 0.1, np.zeros(SIZE, np.float32))
    learner.update(episodes=[stream.episode()], timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: 0}, num_epochs=1)
    assert set(shapes) == {(1, 32)}


def test_two_learners_update_from_a_live_job_and_stay_one_policy(tmp_path: Path, job: str) -> None:
    experiment = small_experiment(
        job, fabric={"rate_hz": 500}, ppo={"learners": 2}, stop={"rounds": 1_000_000}, ray={"runners_per_node": 1}
    )
    fabric = play(experiment.fabric, seed=0)  # type: ignore[arg-type]
    plan = Plan(run=job, experiment=experiment, cluster=fabric.cluster, played=fabric.processes, valid=fabric.valid)
    emulated = fabric.job(job, tmp_path)
    start_ray(2)
    try:
        with emulated:
            emulated.start()
            emulated.await_ranks()
            backend = RayBackend(plan)

            def weights() -> list[dict[str, Any]]:
                group = backend._algorithm.learner_group
                copies = group.foreach_learner(lambda learner: learner.get_state()["rl_module"][DEFAULT_MODULE_ID])
                return [copy.get() for copy in copies]

            before = weights()
            while (status := backend.round()).round < 2 or status.switches < 8:
                pass
            after = weights()
            learned = backend.learned()
            assert backend.learned() == []
            backend.close()
            emulated.set_credit(FREE_RUNNING)
            emulated.stop()
            assert agreement_violations(emulated.logs()) == 0
    finally:
        ray.shutdown()
    assert len(after) == 2
    # What is recorded of it is here, in the process that drives.
    assert sum(len(of.rewards) for of in learned) > 32
    assert all(of.observations.shape == (1 + len(of.rewards), SIZE) for of in learned)
    for name in after[0]:
        assert np.array_equal(after[0][name], after[1][name]), name
    assert any(not np.array_equal(before[0][name], after[0][name]) for name in after[0])
