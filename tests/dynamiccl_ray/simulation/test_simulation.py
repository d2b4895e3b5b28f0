"""The training environment: its rewards are the scenario's, its masks hold, and episodes begin as sequences do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from looped import random_choices
from tiny_scenario import tcp, tiny

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS
from dynamiccl_ray.agent.observation import Context, Topology, part
from dynamiccl_ray.agent.reward import COSTS, Reward
from dynamiccl_ray.arrays import Float32
from dynamiccl_ray.config.control import Control, Learning
from dynamiccl_ray.control.trigger import threshold
from dynamiccl_ray.fabric.load import Load
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS, OWN_PAIR
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.streams import Simulation

TIME_ALONE = Reward().without(COSTS)
TIMES = [[[10, 8, 20], [30, 40, 25]]]
BUSY = Load(inter_bandwidth=0.25)
BASELINE = Learning().baseline_samples
# Nothing that it measures makes it forbid or replace what is asked for.
OBEDIENT = Control.model_validate({"guardrail": {"margin": 100}})


def _of(*scenarios: Scenario, seed: int = 0, reward: Reward | None = None, **shares: float) -> Simulation:
    return Simulation(scenarios, control=OBEDIENT, seed=seed, reward=reward, **shares)


def _three(seed: int = 3) -> Simulation:
    scenarios = [tcp(BUSY), tcp(Load(inter_latency=4)), tiny(TIMES, starts=[0], sigma=0.02)]
    return Simulation(scenarios, control=Control(), seed=seed, shifted=0.3)


def _play(simulation: Simulation, decisions: int = 6, seed: int = 0) -> tuple[Float32, Float32]:
    """Observations (T + 1, B, SIZE) and rewards (T, B) of one episode of random actions."""
    rng = np.random.default_rng(seed)
    observations, rewards = [simulation.reset()], []
    for _ in range(decisions):
        observation, reward = simulation.step(random_choices(observations[-1], rng))
        observations.append(observation)
        rewards.append(reward)
    return np.stack(observations), np.stack(rewards)


def test_without_noise_the_reward_is_the_log_of_the_speedup() -> None:
    simulation = _of(tiny(TIMES, starts=[0]), reward=TIME_ALONE)
    simulation.reset()
    _, reward = simulation.step(np.array([[1, 0, 0], [2, 0, 0]]))
    assert reward.tolist() == pytest.approx([np.log(10 / 8), np.log(30 / 25)])
    ours, default, best = simulation.clean_us(np.array([[1, 0, 0], [1, 0, 0]]))
    assert (ours.tolist(), default.tolist(), best.tolist()) == (
        pytest.approx([8, 40]),
        pytest.approx([10, 30]),
        pytest.approx([8, 25]),
    )
    clipped = _of(tiny([[[1, 1000]]], starts=[0]), reward=TIME_ALONE)
    clipped.reset()
    assert clipped.step(np.array([[1, 0, 0]]))[1].tolist() == [-TIME_ALONE.limit]


def test_what_is_known_to_be_behind_is_replaced_by_the_best_as_beside_a_job() -> None:
    simulation = _of(tiny([[[10, 8, 20]]], starts=[0]), reward=TIME_ALONE)
    simulation.reset()
    for pair, speedup in ((1, 10 / 8), (2, 10 / 20), (2, 10 / 8)):
        _, reward = simulation.step(np.array([[pair, 0, 0]]))
        assert reward.tolist() == pytest.approx([np.log(speedup)]), pair


def test_the_reward_is_the_sum_of_what_the_model_knows() -> None:
    # Two keys of weights 1 and 2 that take 10 and 30 us; four rings' worth of nodes on tier 4, 8 SMs.
    scenario = dataclasses.replace(
        tiny(TIMES, starts=[0]),
        context=Context(topology=Topology(ranks=64, nodes=8, tier_max=4)),
        own_pair=np.array([4, 1]),
        sm_share=np.full((2, N_PAIRS, N_CHANNELS), 0.125, np.float32),
    )
    simulation = _of(scenario, reward=Reward(switch=0.5))

    def step(pairs: list[int]) -> dict[str, list[float]]:
        _, reward = simulation.step(np.array([[pair, 0, 0] for pair in pairs]))
        assert reward == pytest.approx(np.sum(list(simulation.terms.values()), 0))
        return {name: part.tolist() for name, part in simulation.terms.items()}

    # NCCL's own: a ring (pair 4) and a tree (pair 1, 3 of 7 crossings); nothing new, nothing changed.
    simulation.reset()
    parts = step([0, 0])
    assert parts == {
        "primary": pytest.approx([0, 0], abs=1e-6),
        "iteration": pytest.approx([0, 0], abs=1e-6),
        "switch": [0, 0],
        "congestion": pytest.approx([0, 0], abs=1e-6),
        "probe": [0, 0],
        "found": [0, 0],
        "sm": pytest.approx([-0.02 * 0.125] * 2),
        "tier": pytest.approx([-0.005, -0.005 * 3 / 7]),
    }
    # 8 and 25 us: 8 + 2 * 25 of 10 + 2 * 30.
    parts = step([1, 2])
    assert parts["iteration"] == pytest.approx([-0.1 * (58 / 70 - 1)] * 2)
    assert parts["switch"] == [-0.5, -0.5]
    assert parts["probe"] == pytest.approx([-0.005, -0.005])
    assert parts["found"] == pytest.approx([16 * np.log(10 / 8), 16 * np.log(30 / 25)]), "both are the best known now"
    assert not parts.keys() & {"convergence", "fault"}, "the model has no source for them"
    # 20 us, when the first key has shown 8.
    parts = step([2, 2])
    assert parts["switch"] == [-0.5, 0]
    assert parts["congestion"] == pytest.approx([-0.05 * np.log(20 / 8), 0], abs=1e-6)
    assert parts["found"] == [0, 0], "8 us is still the best known, and 25 us is known already"
    simulation.reset()
    parts = step([1, 0])
    assert parts["probe"] == pytest.approx([-0.005, 0]), "an episode begins knowing NCCL's own choice alone"
    assert parts["switch"] == [-0.5, 0], "and with it in force"


def test_what_was_found_is_what_is_true_of_it_not_what_was_measured() -> None:
    """The second pair is slower, but by luck it is measured to be the fastest: the choice has become worse."""
    simulation = _of(tiny([[[10, 8, 9]]], starts=[0]), reward=Reward(found=4.0).without(set(COSTS) - {"found"}))
    simulation.reset()
    simulation.step(np.array([[1, 0, 0]]))
    simulation._log_us = simulation._log_us - np.log(2.0)  # luck: half the time from here on
    _, reward = simulation.step(np.array([[2, 0, 0]]))
    assert simulation.terms["found"].tolist() == pytest.approx([-4 * np.log(9 / 8)])
    assert reward.tolist() == pytest.approx([np.log(10 / 4.5) - 4 * np.log(9 / 8)])


def test_streams_have_their_own_actions_and_scenarios_their_own_iterations() -> None:
    share = np.full((2, N_PAIRS, N_CHANNELS), 0.125, np.float32)
    share[1, 2, 0] = 0.5
    first = dataclasses.replace(tiny(TIMES, starts=[0]), sm_share=share)
    simulation = _of(first, tiny([[[10, 5]]], starts=[0]))
    simulation.reset()
    simulation.step(np.array([[1, 0, 0], [2, 0, 0], [1, 0, 0]]))
    # 58 of 70 us, and 5 of 10.
    assert simulation.terms["iteration"] == pytest.approx([0.1 * 12 / 70] * 2 + [0.05])
    assert simulation.terms["sm"].tolist() == pytest.approx([-0.02 * 0.125, -0.02 * 0.5, 0])


def test_the_sms_of_an_action_are_those_of_its_channels() -> None:
    simulation = _of(tcp(), reward=Reward(sm=1.0))
    simulation.reset()
    # Some pair with four channels.
    simulation.step(np.array([[5, CHANNEL_VALUES.index(4), 0]] * 6))
    assert simulation.terms["sm"] == pytest.approx(np.full(6, -4 / find_cluster("cloud-tcp").sms))


def test_a_modelled_scenario_knows_the_sms_that_channels_take() -> None:
    scenario = tcp()
    assert scenario.sm_share is not None
    cluster = find_cluster("cloud-tcp")
    asked = scenario.sm_share[:, 1:, CHANNEL_VALUES.index(4)]
    assert asked == pytest.approx(np.full(asked.shape, 4 / cluster.sms))
    choice = cluster.nccl_belief(4).choose(scenario.collective, scenario.nbytes)
    assert scenario.sm_share[:, OWN_PAIR, 0] * cluster.sms == pytest.approx(choice.channels)
    own = scenario.sm_share[np.arange(len(choice.channels)), scenario.own_pair, 0]
    assert own * cluster.sms == pytest.approx(choice.channels)


def test_episodes_begin_at_the_baseline_or_after_a_shift() -> None:
    scenarios = [tiny([[[10, 8]], [[40, 32]]], starts=[0, 100]) for _ in range(60)]
    simulation = _of(*scenarios, seed=1, shifted=0.3)
    simulation.reset()
    loop, shifted = simulation.loop, simulation.loop.shifts > 0
    assert 0.15 < shifted.mean() < 0.45
    assert not loop.decisions.any()
    samples, hints = loop.evidence.samples.sum(-1), loop.evidence.by_channels.sum((1, 2))
    assert (samples == BASELINE).all(), "after a shift nothing but the baseline has been measured"
    assert (hints[shifted] > BASELINE).all(), "but there are hints"
    assert (hints[~shifted] == BASELINE).all()
    # The first phase takes 10 us and the second 40; what is seen after a shift is the new network.
    now = np.log(np.array([10.0, 40.0]))[simulation._phase]
    assert loop.evidence.baseline == pytest.approx(now)
    assert len(np.unique(simulation._phase[shifted])) == 2
    observed = part(simulation.step(np.zeros((60, 3), np.int64))[0], "cusum")
    assert observed.shape[0] == 60


def test_without_other_phases_nothing_has_shifted() -> None:
    simulation = _of(*[tiny(TIMES, starts=[0])] * 10, shifted=1.0)
    simulation.reset()
    assert not simulation.loop.shifts.any()
    simulation = Simulation(
        [tiny(TIMES, starts=[0])] * 10, control=Control(learning=Learning(draws=8)), seed=0, shifted=1.0
    )
    assert simulation.epochs == 8


def test_the_masks_are_those_of_the_scenario_and_every_combination_has_a_time() -> None:
    scenario, simulation = tcp(BUSY), _of(tcp(BUSY))
    observations, rewards = _play(simulation)
    valid = scenario.valid.reshape(-1, N_PAIRS, N_CHANNELS, N_CHUNKS)
    assert (part(observations[0], "valid_channels") > 0).tolist() == valid.any(-1).tolist()
    assert (part(observations[0], "valid_chunks") > 0).tolist() == valid.any(2).tolist()
    # Channels and chunks are masked apart: that forbids nothing and allows nothing that has no time.
    apart = valid.any(-1)[..., None] & valid.any(2)[..., None, :]
    assert (apart == valid).all()
    assert np.isfinite(rewards).all()


def test_the_same_seed_is_the_same_episode() -> None:
    first, again, other = (_play(_three(seed)) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not (first[1] == other[1]).all()


def test_scores_are_over_the_threshold_that_the_policy_that_ships_was_trained_with() -> None:
    """They are in what it sees, and ``make train`` is to give its weights again."""
    loop = _three().loop
    assert loop.cusum.h == threshold(1e100)
    assert not loop.cusum.watches


def test_a_second_episode_leaves_the_actions_of_the_first_alone() -> None:
    simulation = _three()
    actions = random_choices(simulation.reset(), np.random.default_rng(0))
    before = actions.copy()
    simulation.step(actions)
    simulation.reset()
    assert (actions == before).all()


def test_the_teacher_is_within_a_fifth_of_a_per_cent_and_leaves_alone_what_is_good_enough() -> None:
    simulation = _three()
    simulation.reset()
    teacher = simulation.teacher()
    ours, default, best = simulation.clean_us(teacher)
    assert (ours <= best * 1.00202).all()
    good_enough = default <= best * 1.002
    assert (teacher[good_enough] == 0).all()


def test_what_is_best_is_not_ruled_out_by_other_chunks_or_channels_beside_it() -> None:
    """However much is measured of what is worse, the teacher's choice stays open to the policy."""
    scenario = dataclasses.replace(tcp(), sigma=0.001)
    simulation = Simulation([scenario], control=Control(), seed=0)
    observation, rng = simulation.reset(), np.random.default_rng(0)
    simulation._busier = 8
    rows = np.arange(len(simulation))
    for _ in range(simulation.epochs):
        pair, channels, chunk = simulation.teacher().T
        assert (part(observation, "valid_channels")[rows, pair, channels] > 0).all()
        assert (part(observation, "valid_chunks")[rows, pair, chunk] > 0).all()
        # Of the best pair and channels, or of the best pair and chunk.
        drawn = random_choices(observation, rng)
        near = np.stack([pair, np.where(rng.random(len(rows)) < 0.5, channels, drawn[:, 1]), drawn[:, 2]], -1)
        valid = scenario.flat_us[0, rows, near[:, 0] * N_CHANNELS * N_CHUNKS + near[:, 1] * N_CHUNKS + near[:, 2]]
        observation, _ = simulation.step(np.where(np.isfinite(valid)[:, None], near, drawn))
