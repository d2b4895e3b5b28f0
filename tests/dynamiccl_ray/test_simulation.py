"""The training environment: its rewards are the scenario's, its masks hold, and its knowledge is the online loop's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tiny_scenario import tcp, tiny

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, Action, flat_action
from dynamiccl_ray.book import KeyBook, Samples
from dynamiccl_ray.fabric.load import Load
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS, OWN_PAIR, Collective
from dynamiccl_ray.knowledge import Floats, Int64, Keys, Knowledge
from dynamiccl_ray.observation import Context, Topology, part
from dynamiccl_ray.reward import COSTS, Reward
from dynamiccl_ray.simulation import Simulation
from dynamiccl_ray.stream_rewards import StreamRewards

TIME_ALONE = Reward().without(COSTS)
TIMES = [[[10, 8, 20], [30, 40, 25]]]
BUSY = Load(inter_bandwidth=0.25)


def _simulation(seed: int = 3) -> Simulation:
    scenarios = [tcp(BUSY), tcp(Load(inter_latency=4)), tiny(TIMES, starts=[0], sigma=0.02)]
    return Simulation(scenarios, epochs=6, collectives=8, seed=seed)


def _random(simulation: Simulation, rng: np.random.Generator) -> Int64:
    """(B, 3) valid actions."""
    keys = simulation.keys
    rows = np.arange(len(keys))
    pair = np.array([rng.choice(np.flatnonzero(row)) for row in keys.channels.any(-1)])
    channels = [rng.choice(np.flatnonzero(row)) for row in keys.channels[rows, pair]]
    chunk = [rng.choice(np.flatnonzero(row)) for row in keys.chunks[rows, pair]]
    return np.stack([pair, np.array(channels), np.array(chunk)], -1)


def _play(simulation: Simulation, seed: int = 0) -> tuple[Floats, Floats]:
    """Observations (T + 1, B, SIZE) and rewards (T, B) of one episode of random actions."""
    rng = np.random.default_rng(seed)
    observations, rewards = [simulation.reset()], []
    for _ in range(simulation.epochs):
        obs, reward = simulation.step(_random(simulation, rng))
        observations.append(obs)
        rewards.append(reward)
    return np.stack(observations), np.stack(rewards)


def test_without_noise_the_reward_is_the_log_of_the_speedup() -> None:
    simulation = Simulation([tiny(TIMES, starts=[0])], epochs=3, collectives=8, seed=0, reward=TIME_ALONE)
    simulation.reset()
    _, reward = simulation.step(np.array([[1, 0, 0], [2, 0, 0]]))
    assert reward.tolist() == pytest.approx([np.log(10 / 8), np.log(30 / 25)])
    _, reward = simulation.step(np.array([[2, 0, 0], [0, 0, 0]]))
    assert reward.tolist() == pytest.approx([np.log(10 / 20), 0])
    ours, default, best = simulation.clean_us(np.array([[1, 0, 0], [1, 0, 0]]))
    assert (ours.tolist(), default.tolist(), best.tolist()) == (
        pytest.approx([8, 40]),
        pytest.approx([10, 30]),
        pytest.approx([8, 25]),
    )
    clipped = Simulation([tiny([[[1, 1000]]], starts=[0])], epochs=1, collectives=8, seed=0, reward=TIME_ALONE)
    clipped.reset()
    assert clipped.step(np.array([[1, 0, 0]]))[1].tolist() == [-TIME_ALONE.limit]


def test_the_reward_is_the_sum_of_what_the_model_knows() -> None:
    # Two keys of weights 1 and 2 that take 10 and 30 us; four rings' worth of nodes on tier 4, 8 SMs.
    scenario = dataclasses.replace(
        tiny(TIMES, starts=[0]),
        context=Context(topology=Topology(ranks=64, nodes=8, tier_max=4)),
        own_pair=np.array([4, 1]),
        sm_share=np.full((2, N_PAIRS, N_CHANNELS), 0.125, np.float32),
    )
    weights = Reward(switch=0.5)
    simulation = Simulation([scenario], epochs=4, collectives=8, seed=0, reward=weights)
    simulation.reset()

    def step(pairs: list[int]) -> dict[str, list[float]]:
        _, reward = simulation.step(np.array([[pair, 0, 0] for pair in pairs]))
        assert reward == pytest.approx(np.sum(list(simulation.terms.values()), 0))
        return {name: part.tolist() for name, part in simulation.terms.items()}

    # NCCL's own: a ring (pair 4) and a tree (pair 1, 3 of 7 crossings); nothing new, nothing changed.
    parts = step([0, 0])
    assert parts == {
        "primary": pytest.approx([0, 0], abs=1e-6),
        "iteration": pytest.approx([0, 0], abs=1e-6),
        "switch": [0, 0],
        "congestion": pytest.approx([0, 0], abs=1e-6),
        "probe": [0, 0],
        "sm": pytest.approx([-0.02 * 0.125] * 2),
        "tier": pytest.approx([-0.005, -0.005 * 3 / 7]),
    }
    # 8 and 25 us: 8 + 2 * 25 of 10 + 2 * 30.
    parts = step([1, 2])
    assert parts["iteration"] == pytest.approx([-0.1 * (58 / 70 - 1)] * 2)
    assert parts["switch"] == [-0.5, -0.5]
    assert parts["probe"] == pytest.approx([-0.005, -0.005])
    # The same again for the first key; the second goes back, to 30 us when it has shown 25.
    parts = step([1, 0])
    assert parts["switch"] == [0, -0.5]
    assert parts["probe"] == [0, 0]
    assert parts["congestion"] == pytest.approx([0, -0.05 * np.log(30 / 25)], abs=1e-6)
    assert not parts.keys() & {"convergence", "fault"}, "the model has no source for them"
    simulation.reset()
    assert step([1, 0])["probe"] == pytest.approx([-0.005, 0]), "an episode begins knowing NCCL's own choice alone"


def test_streams_have_their_own_actions_and_scenarios_their_own_iterations() -> None:
    share = np.full((2, N_PAIRS, N_CHANNELS), 0.125, np.float32)
    share[1, 2, 0] = 0.5
    first = dataclasses.replace(tiny(TIMES, starts=[0]), sm_share=share)
    simulation = Simulation(
        [first, tiny([[[10, 5]]], starts=[0])], epochs=4, collectives=8, seed=0, reward=Reward(switch=0.5)
    )
    simulation.reset()
    simulation.step(np.array([[1, 0, 0], [2, 0, 0], [1, 0, 0]]))
    # 58 of 70 us, and 5 of 10.
    assert simulation.terms["iteration"] == pytest.approx([0.1 * 12 / 70] * 2 + [0.05])
    assert simulation.terms["sm"].tolist() == pytest.approx([-0.02 * 0.125, -0.02 * 0.5, 0])
    simulation.step(np.array([[1, 0, 0], [2, 0, 0], [1, 0, 0]]))
    assert simulation.terms["switch"].tolist() == [0, 0, 0]
    simulation.reset()
    simulation.step(np.array([[1, 0, 0], [0, 0, 0], [0, 0, 0]]))
    assert simulation.terms["switch"].tolist() == [-0.5, 0, 0], "an episode begins with NCCL's own choice in force"


def test_the_sms_of_an_action_are_those_of_its_channels() -> None:
    scenario = tcp()
    rewards = StreamRewards(Reward(sm=1.0), [scenario])
    start = np.zeros(6, np.float32)
    rewards.begin(start)
    # Some pair with four channels.
    sm = rewards.terms(np.full(6, int(flat_action(5, CHANNEL_VALUES.index(4), 0))), start, start)["sm"]
    assert sm == pytest.approx(np.full(6, -4 / find_cluster("cloud-tcp").sms))


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


def test_what_a_shift_does_to_the_reward() -> None:
    """NCCL's own choice is measured anew in between: going back to it is no switch, and congestion starts from it."""
    scenario = tiny([[[10, 8]], [[40, 32]]], starts=[0, 100])
    seen = set()
    simulation = Simulation([scenario] * 40, epochs=4, collectives=8, seed=1, reward=Reward(switch=0.5))
    simulation.reset()
    for _ in range(4):
        before = simulation._phase.copy()
        simulation.step(np.array([[1, 0, 0]] * 40))
        shifted = simulation._phase != before
        in_force = simulation._rewards._last
        assert (in_force[shifted] == 0).all()
        assert (in_force[~shifted] != 0).all()
        assert simulation.terms["congestion"] == pytest.approx(np.zeros(40), abs=1e-6)
        seen |= set(shifted.tolist())
    assert seen == {True, False}


def test_the_masks_are_those_of_the_scenario_and_every_combination_has_a_time() -> None:
    scenario, simulation = tcp(BUSY), Simulation([tcp(BUSY)], epochs=6, collectives=8, seed=0)
    observations, rewards = _play(simulation)
    valid = scenario.valid.reshape(-1, N_PAIRS, N_CHANNELS, N_CHUNKS)
    assert (part(observations[0], "valid_channels") > 0).tolist() == valid.any(-1).tolist()
    assert (part(observations[0], "valid_chunks") > 0).tolist() == valid.any(2).tolist()
    # Channels and chunks are masked apart: that forbids nothing and allows nothing that has no time.
    apart = valid.any(-1)[..., None] & valid.any(2)[..., None, :]
    assert (apart == valid).all()
    assert np.isfinite(rewards).all()


def test_the_same_seed_is_the_same_episode() -> None:
    first, again, other = (_play(_simulation(seed)) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not (first[1] == other[1]).all()


def test_a_second_episode_leaves_the_actions_of_the_first_alone() -> None:
    simulation = _simulation()
    simulation.reset()
    actions = _random(simulation, np.random.default_rng(0))
    before = actions.copy()
    simulation.step(actions)
    simulation.reset()
    assert (actions == before).all()


def test_the_teacher_is_within_a_fifth_of_a_per_cent_and_leaves_alone_what_is_good_enough() -> None:
    simulation = _simulation()
    simulation.reset()
    teacher = simulation.teacher()
    ours, default, best = simulation.clean_us(teacher)
    assert (ours <= best * 1.00202).all()
    good_enough = default <= best * 1.002
    assert (teacher[good_enough] == 0).all()


def _book(keys: list[int]) -> KeyBook:
    everything = np.ones((N_PAIRS, N_CHANNELS), np.bool_)
    book = KeyBook(
        arl0=1e6,
        guardrail_margin=0.02,
        guardrail_samples=8,
        valid=everything,
        valid_chunks=np.ones((N_PAIRS, N_CHUNKS), np.bool_),
    )
    for key in keys:
        book.row(key)
    return book


def test_the_noise_of_a_key_is_that_within_epochs_and_not_what_actions_differ_by() -> None:
    name = key_of(int(Collective.ALL_REDUCE), 1 << 20, False)
    book, rng, zero = _book([name]), np.random.default_rng(0), np.zeros(8, np.int64)
    for epoch in range(100):
        times = np.exp(3 + epoch % 2 + rng.normal(0, 0.1, 8))
        samples = Samples(
            key=np.full(8, name), nbytes=zero + (1 << 20), dseq=np.arange(8), time_us=times, skew=np.zeros(8),
            pair=zero, channels=zero,
        )  # fmt: skip
        book.add(samples, {name: Action(pair=1 + epoch % 2)}, watch=False)
    assert book.noise[0] == pytest.approx(0.1, rel=0.1)


def test_knowledge_is_that_of_the_online_loop_through_a_shift() -> None:
    rng = np.random.default_rng(0)
    names = [key_of(int(Collective.ALL_REDUCE), 1 << k, False) for k in (12, 16, 20)]
    n = len(names)
    book = _book(names)
    knowledge = Knowledge(
        Keys(
            group=np.zeros(n, np.int64),
            collective=np.full(n, 4),
            nbytes=np.array([1 << 12, 1 << 16, 1 << 20]),
            cost=np.zeros((n, N_PAIRS), np.float32),
            valid=np.ones((n, N_PAIRS, N_CHANNELS, N_CHUNKS), np.bool_),
        )
    )
    everywhere = np.ones(n, np.bool_)

    def epoch(actions: Int64) -> Floats:
        """8 collectives of each key into the book; their mean log times."""
        log_us = rng.normal(3, 0.5, n) + rng.normal(0, 0.02, (8, n))
        samples = Samples(
            key=np.tile(names, 8),
            nbytes=np.tile(knowledge.keys.nbytes, 8),
            dseq=np.arange(8 * n),
            time_us=np.exp(log_us).ravel(),
            skew=np.zeros(8 * n),
            pair=np.zeros(8 * n, np.int64),
            channels=np.zeros(8 * n, np.int64),
        )
        chosen = {
            key: Action(pair=p, channels=c, chunk=h) for key, (p, c, h) in zip(names, actions.tolist(), strict=True)
        }
        book.add(samples, chosen, watch=False)
        knowledge.noise = book.noise
        return np.asarray(log_us.mean(0), np.float32)

    def compare() -> None:
        seen, online = knowledge.view(), book.view({}, 0.0)
        for field in ("evidence", "samples", "channels", "chunks", "excess", "last_time", "congestion"):
            np.testing.assert_allclose(getattr(seen, field), getattr(online, field), atol=2e-5, err_msg=field)

    own = np.zeros((n, 3), np.int64)
    knowledge.begin(everywhere, epoch(own), 8)
    compare()
    tried = np.array([[1, 0, 0], [4, 2, 1], [6, 0, 3]])
    for actions in (tried, tried[::-1], tried):
        knowledge.record(actions, epoch(actions), 8, cooling=0.7)
    compare()
    noise = book.noise
    book.shift()
    baseline = epoch(own)
    book.settle()
    # What is left of old evidence was decided by the noise that was known then.
    knowledge.noise = noise
    knowledge.shift(everywhere, baseline, 8, heat=1.0)
    knowledge.noise = book.noise
    compare()
    # What is left of old evidence is outweighed by one epoch, and NCCL's own is only what was measured anew.
    assert 0 < knowledge.view().samples[:, 1:].max() < 1
    assert (knowledge.view().samples[:, OWN_PAIR, 0] == 8).all()
    knowledge.record(tried, epoch(tried), 8, cooling=0.7)
    compare()
