"""Scenarios: what may be asked for, what it costs, and how phases follow each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl_ray.actions import (
    N_ACTIONS,
    N_CHANNELS,
    N_CHUNKS,
    OWN_ACTION,
    Action,
    action_of,
    action_parts,
    flat_action,
)
from dynamiccl_ray.agent.observation import Context, Topology
from dynamiccl_ray.fabric import measured as tables
from dynamiccl_ray.fabric.clusters import p5en_all_reduce
from dynamiccl_ray.fabric.describe import topology_of
from dynamiccl_ray.fabric.dynamics import Dynamics, SlowRanks
from dynamiccl_ray.fabric.load import IDLE, Load
from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.fabric.pricing import expected
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, OWN_PAIR, Collective, Protocol, pair_index
from dynamiccl_ray.simulation.sampling import Sampling, random_load, sample_scenarios, surprised, told_of
from dynamiccl_ray.simulation.scenario import Scenario, measured, modelled

SIZES = 1 << np.arange(12, 28, 3)
P5EN = Topology(ranks=64, nodes=8, intra="nvlink", inter="efa", tier_max=3, nvls=True)


def _two_phases() -> Scenario:
    return modelled(
        find_cluster("dgx-a100-hdr"),
        4,
        collective=Collective.ALL_REDUCE,
        nbytes=SIZES,
        loads=[IDLE, Load(inter_bandwidth=0.25)],
        starts=[0, 100],
    )


def test_flat_actions_number_the_heads() -> None:
    flat = np.arange(N_ACTIONS)
    assert np.array_equal(flat_action(*action_parts(flat)), flat)
    assert action_of(OWN_ACTION) == Action()
    assert action_of(int(flat_action(5, 3, 2))) == Action(pair=5, channels=3, chunk=2)


def test_times_are_those_of_the_physics() -> None:
    scenario = _two_phases()
    physics = Physics(find_cluster("dgx-a100-hdr"), 4)
    for phase, load in enumerate((IDLE, Load(inter_bandwidth=0.25))):
        expected = physics.time_us(Collective.ALL_REDUCE, SIZES, load)
        mine = scenario.times_us[phase, ..., 0]
        same = np.isfinite(mine)
        np.testing.assert_allclose(mine[same], expected[same], rtol=1e-6)
    choice = physics.belief.choose(Collective.ALL_REDUCE, SIZES)
    assert np.array_equal(scenario.own_pair, pair_index(choice.algorithm, choice.protocol))
    assert scenario.times_us.dtype == np.float32
    assert scenario.context.topology.ranks == 32
    assert scenario.tier == 2


def test_the_mask_is_what_the_plugin_would_write() -> None:
    scenario = _two_phases()
    there = np.isfinite(scenario.times_us)
    seen = Physics(find_cluster("dgx-a100-hdr"), 4).belief.choose(Collective.ALL_REDUCE, SIZES).channels.max()
    assert not there[..., np.array(CHANNEL_VALUES) > seen, :].any()
    assert there[..., np.array(CHANNEL_VALUES) == seen, :].any()
    # Half of LL's buffer is 64 KiB.
    low_latency = pair_index(1, Protocol.LL)
    assert there[:, :, low_latency, 0, CHUNK_VALUES.index(65536)].all()
    assert not there[:, :, low_latency, :, CHUNK_VALUES.index(131072) :].any()
    own = there[:, :, OWN_PAIR]
    assert own[..., 0, 0].all()
    assert own.sum() == own[..., 0, 0].size


def test_the_oracle_is_the_least_valid_time() -> None:
    scenario = _two_phases()
    assert np.array_equal(scenario.oracle_us, np.nanmin(scenario.flat_us, -1))
    assert (scenario.oracle_us <= scenario.default_us).all()
    assert (scenario.oracle[0] != scenario.oracle[1]).any()


def test_phases_follow_their_starts() -> None:
    assert _two_phases().phase_at([0, 99, 100, 5000]).tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"starts are \[0, 0\]"):
        replace(_two_phases(), starts=np.array([0, 0]))
    with pytest.raises(ValueError, match="NCCL's own choice has no time"):
        replace(_two_phases(), times_us=np.full_like(_two_phases().times_us, np.nan))


def test_costs_are_those_that_the_plugin_shows() -> None:
    scenario = _two_phases()
    own = scenario.cost[np.arange(len(SIZES)), scenario.own_pair]
    np.testing.assert_allclose(own, 0)
    assert (scenario.cost >= 0).all()
    assert np.isfinite(scenario.cost).all()


@pytest.mark.parametrize("nodes", [8, 16])
def test_a_measured_scenario_has_the_measured_oracle(nodes: int) -> None:
    base = p5en_all_reduce(nodes)
    slower = tables.NetworkPhase(name="half", surface=tables.scaled(base, 0.5))
    fabric = tables.PhasedSurface(base=base, later=(slower,))
    sizes = tables.playable_keys(base)
    scenario = measured(fabric, sizes, topology=P5EN, starts=[0, 50])
    times, sigma = fabric.tables(sizes)
    for phase in range(2):
        best_us, pair, channels = tables.oracle(times[phase])
        np.testing.assert_allclose(scenario.oracle_us[phase], best_us, rtol=1e-6)
        assert np.array_equal(scenario.oracle[phase], flat_action(pair, channels, 0))
        np.testing.assert_allclose(scenario.default_us[phase], times[phase, :, 0, 0], rtol=1e-6)
    # As the emulated NCCL plays it: every action of every size has noise of its own.
    own = scenario.sigma.reshape(*sigma.shape[1:], N_CHUNKS)[..., 0]
    assert np.array_equal(own[np.isfinite(sigma[0])], sigma[0][np.isfinite(sigma[0])])
    assert np.median(own[0][own[0] > 0]) > 5 * np.median(own[-1][own[-1] > 0])
    assert np.array_equal(scenario.valid.sum(-1), np.isfinite(times[0]).sum((1, 2)))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_sampled_scenarios_are_sound(seed: int) -> None:
    places = [(find_cluster(name), nodes) for name, nodes in (("cloud-tcp", 2), ("l40s-pcie", 1), ("torus-2d", 16))]
    sampling = Sampling(keys=5, horizon=50)
    scenarios = sample_scenarios(np.random.default_rng(seed), places, 3, sampling)
    for s in scenarios:
        assert s.times_us.shape[1] == 5
        assert 1 <= len(s.starts) <= sampling.most_phases
        assert s.starts[-1] < sampling.horizon
        assert (s.oracle_us > 0).all()
        assert s.valid.sum(-1).min() > 1
    again = sample_scenarios(np.random.default_rng(seed), places, 3, sampling)
    assert all(np.array_equal(a.times_us, b.times_us, equal_nan=True) for a, b in zip(scenarios, again, strict=True))


def test_surprises_have_the_spread_that_they_say_and_own_choices_stay_what_they_are() -> None:
    # Of 256 KiB, where the tilt is nil, and of twelve octaves more; in two phases.
    loads = (IDLE, Load(inter_bandwidth=0.5))
    scenario = modelled(
        find_cluster("dgx-a100-hdr"), 2, collective=4, nbytes=[1 << 18, 1 << 30], loads=loads, starts=[0, 9]
    )
    rng, surprise = np.random.default_rng(0), 0.4
    factors = []
    for _ in range(300):
        logs = np.log(surprised(scenario, rng, surprise).times_us / scenario.times_us)
        np.testing.assert_allclose(logs[0], logs[1], atol=1e-4)
        own = logs[0, np.arange(2), scenario.own_pair, 0, 0]
        np.testing.assert_allclose(logs[0, :, OWN_PAIR, 0, 0], own, atol=1e-4)
        factors.append(logs[0, :, 1:])
    log = np.stack(factors)
    pair, channels, chunk = (int(i[0]) for i in np.nonzero(np.isfinite(log[0, 0, :, 1:, 1:])))
    small, large = log[:, 0, pair], log[:, 1, pair]
    parts = {
        "pair": small[:, 0, 0] / np.sqrt(1 + 2 / 16),
        "size": large[:, 0, 0] - small[:, 0, 0],
        "channels": 4 * (small[:, channels + 1, 0] - small[:, 0, 0]) / np.sqrt(2),
        "chunk": 4 * (small[:, 0, chunk + 1] - small[:, 0, 0]) / np.sqrt(2),
    }
    assert {name: float(part.std()) for name, part in parts.items()} == pytest.approx(
        dict.fromkeys(parts, surprise), rel=0.15
    )
    assert np.array_equal(surprised(scenario, rng, 0.0).times_us, scenario.times_us, equal_nan=True)


def test_a_job_may_say_which_cluster_it_runs_on_and_be_wrong() -> None:
    place = find_cluster("dgx-h100-ndr")
    (scenario,) = sample_scenarios(np.random.default_rng(0), [(place, 4)], 1, Sampling(keys=4))
    said = expected(place, 4, scenario.collective, scenario.nbytes)
    assert scenario.prior is not None
    assert np.array_equal(scenario.prior, said, equal_nan=True)
    # Its own rates and latencies differ from the preset's.
    off = np.log(scenario.times_us[0, ..., 0] / scenario.default_us[0][:, None, None]) - said[..., :N_CHANNELS]
    assert 0.001 < np.nanstd(off) < 0.5
    nothing = told_of(scenario, None)
    assert nothing.prior is None
    assert nothing.context == Context(topology=Topology(ranks=32, nodes=4)), "of what else it is, neither"
    other = find_cluster("cloud-tcp")
    wrong = told_of(scenario, other)
    assert wrong.prior is not None
    assert np.nanstd(wrong.prior - said) > 0.1
    assert wrong.context.topology == topology_of(other, 4, 32)
    assert wrong.context.workload == scenario.context.workload
    inside = place.model_copy(update={"inter": None})
    assert told_of(scenario, inside).prior is None, "it can say nothing of several nodes"
    (alone,) = sample_scenarios(np.random.default_rng(0), [(find_cluster("dgx-a100-hdr"), 1)], 1)
    single = find_cluster("cloud-tcp").part(1)
    assert told_of(scenario, single).prior is not None
    assert told_of(alone, single).prior is None, "one GPU has no collectives"


def test_keys_of_one_job_vary_by_different_amounts() -> None:
    place = [(find_cluster("dgx-h100-ndr"), 4)]
    even, uneven = (
        sample_scenarios(np.random.default_rng(0), place, 8, Sampling(keys=16, uneven=by)) for by in (0.0, 0.5)
    )
    assert all(np.ptp(scenario.sigma) == 0 for scenario in even)
    spread = np.concatenate([np.log(scenario.sigma / of.sigma) for scenario, of in zip(uneven, even, strict=True)])
    assert spread.std() == pytest.approx(0.5, rel=0.2)
    assert all(np.array_equal(a.times_us, b.times_us, equal_nan=True) for a, b in zip(uneven, even, strict=True))


def test_sampling_needs_a_place() -> None:
    with pytest.raises(ValueError, match="places is empty"):
        sample_scenarios(np.random.default_rng(0), [], 1)


def test_one_node_has_no_loss() -> None:
    rng = np.random.default_rng(0)
    loads = [random_load(rng, 1) for _ in range(50)]
    assert all(load.loss == 0 and load.inter_bandwidth == 1 for load in loads)
    assert any(load.intra_bandwidth != 1 for load in loads)


def test_phases_take_their_load_from_the_dynamics_where_there_are_any() -> None:
    place = [(find_cluster("dgx-h100-ndr"), 8)]
    still = Sampling(keys=4, most_phases=6, sigma=(0.01, 0.01))
    slow = replace(still, dynamics=Dynamics(slow_ranks=SlowRanks(mean_gap=2, mean_length=1e6, most=3)))
    scenarios = sample_scenarios(np.random.default_rng(3), place, 12, slow)
    again = sample_scenarios(np.random.default_rng(3), place, 12, slow)
    shifted = [s for s in scenarios if len(s.starts) > 1]
    assert shifted
    for s in shifted:
        # A slow rank that never recovers slows every later phase, and nothing else does.
        assert np.all(s.default_us[1:] >= s.default_us[0])
        assert np.any(s.default_us[1:] > 1.05 * s.default_us[0])
    assert all(np.array_equal(a.times_us, b.times_us, equal_nan=True) for a, b in zip(scenarios, again, strict=True))
