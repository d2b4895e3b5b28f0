"""What a FabricRunner samples is what the update is computed from; a teacher is followed while it is listened to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from dynamiccl_ray.actors.episodes import Episodes
from dynamiccl_ray.actors.fabric_runner import FabricRunner, Share
from dynamiccl_ray.agent import policy
from dynamiccl_ray.config.curriculum import Curriculum
from dynamiccl_ray.simulation.splits import stage_scenarios
from dynamiccl_ray.simulation.streams import Simulation
from dynamiccl_ray.trainers.model.learning import curriculum_config
from dynamiccl_ray.trainers.model.rounds import Rounds

SETTINGS = {
    "name": "small",
    "stages": [{"name": "only", "places": [{"cluster": "rtx4090-pcie", "nodes": [2]}]}],
    "held_out": [{"cluster": "l40s-pcie", "nodes": [1]}],
    "streams": {"scenarios": 2, "keys": 6},
    "control": {"learning": {"draws": 10, "sequence": 5}},
    "ppo": {"hidden": 16, "experts": 2, "minibatches": 2, "lr": 1e-2, "entropy": 0.0, "entropy_end": 0.0},
}


@pytest.fixture
def curriculum() -> Curriculum:
    return Curriculum.model_validate(SETTINGS)


def _simulation(curriculum: Curriculum) -> Simulation:
    scenarios = stage_scenarios(curriculum.stages[0], curriculum, (0,), 2)
    return Simulation(scenarios, control=curriculum.control, seed=3)


def test_episodes_hold_what_happened(curriculum: Curriculum) -> None:
    torch.manual_seed(0)
    runner = FabricRunner(config=curriculum_config(curriculum, lambda *_: _simulation(curriculum)))
    (episodes,) = runner.sample()
    assert episodes.rewards.shape == (12, 5)
    assert len(episodes) == 60
    net = runner.module.net
    obs = torch.from_numpy(episodes.observations)
    state = {k: v.unsqueeze(0).repeat(12, 1, 1) for k, v in net.initial_state().items()}
    with torch.no_grad():
        features, _ = net.features(obs, state)
        logits = net.logits(obs[:, :-1], features[:, :-1])
        values = net.values(features).numpy()
    np.testing.assert_allclose(values, episodes.values, atol=1e-5)
    log_p = policy.log_prob(logits, torch.from_numpy(episodes.actions)).numpy()
    np.testing.assert_allclose(log_p, episodes.log_probs, atol=1e-4)


def test_rounds_differ_and_repeat(curriculum: Curriculum) -> None:
    def actions(rounds: int) -> np.ndarray:
        torch.manual_seed(0)
        runner = FabricRunner(config=curriculum_config(curriculum, lambda *_: _simulation(curriculum)))
        runner.set_state({"rounds": rounds})
        return runner.sample()[0].actions

    assert np.array_equal(actions(3), actions(3))
    assert not np.array_equal(actions(3), actions(4))


def test_runners_share_the_streams_of_a_round(curriculum: Curriculum) -> None:
    rounds = Rounds(curriculum)
    whole = rounds(Share(number=3, stage=0)).nbytes
    halves = [rounds(Share(number=3, stage=0, index=index, of=2)).nbytes for index in range(2)]
    assert np.array_equal(whole, np.concatenate(halves))
    assert not np.array_equal(whole, rounds(Share(number=4, stage=0)).nbytes)


def test_a_runner_samples_a_piece_for_every_learner_and_nothing_is_lost(curriculum: Curriculum) -> None:
    def sample(learners: int) -> list[Episodes]:
        config = curriculum_config(curriculum, Rounds(curriculum), learners=learners)
        torch.manual_seed(0)
        return FabricRunner(config=config).sample()

    (whole,), pieces = sample(0), sample(2)
    assert [len(piece) for piece in pieces] == [len(whole) // 2] * 2
    assert np.array_equal(whole.observations, Episodes.join(pieces).observations)
    assert np.array_equal(whole.rewards, Episodes.join(pieces).rewards)


@pytest.mark.timeout(120)
def test_the_teacher_is_learned_from(curriculum: Curriculum) -> None:
    torch.manual_seed(0)
    config = curriculum_config(curriculum, lambda *_: _simulation(curriculum))
    runner = FabricRunner(config=config)
    learner = config.build_learner(spaces=runner.get_spaces())

    def agreement() -> float:
        runner.set_state(learner.get_state(components=COMPONENT_RL_MODULE, inference_only=True))
        episodes = runner.sample()
        same = [e.actions == e.teacher for e in episodes]
        learner.update(
            episodes=episodes,
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: 0},
            num_epochs=4,
            minibatch_size=30,
            shuffle_batch_per_epoch=False,
        )
        return float(np.concatenate(same).all(-1).mean())

    first = agreement()
    for _ in range(50):
        last = agreement()
    assert first < 0.3
    assert last > 0.4
    assert DEFAULT_MODULE_ID in learner.module


def test_the_policy_is_saved_and_read(tmp_path: Path) -> None:
    net = policy.PolicyNetwork(16, 2)
    policy.save(net, tmp_path / "p.pt")
    assert all(
        torch.equal(a, b) for a, b in zip(net.parameters(), policy.load(tmp_path / "p.pt").parameters(), strict=True)
    )
