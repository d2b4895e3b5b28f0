"""The baselines: they respect the mask, pay for what they try, learn, and go stale where they should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_scenario import tcp, tiny

from dynamiccl_ray.actions import flat_action
from dynamiccl_ray.baselines.bandit import Bandit
from dynamiccl_ray.baselines.coordinate_descent import CoordinateDescent
from dynamiccl_ray.baselines.fixed import BestStaticPair, CsvTable, NcclDefault, Oracle
from dynamiccl_ray.baselines.in_loop import InLoop
from dynamiccl_ray.baselines.method import SWEEP_REPEATS, Factory, Int64, Method
from dynamiccl_ray.baselines.probing import ExhaustiveProbing
from dynamiccl_ray.baselines.registry import BASELINES, beside
from dynamiccl_ray.baselines.run import Trace, run
from dynamiccl_ray.config.control import Control, Learning
from dynamiccl_ray.fabric.load import Load
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.simulation.sampling import Sampling, sample_scenarios

# NCCL's own choice, then the pairs 1 and 2.
TIMES = [[[10, 8, 20], [30, 40, 25]]]
BUSY = Load(inter_bandwidth=0.25)


def _excess(trace: Trace, start: int, end: int) -> float:
    """Geometric mean of the time over the oracle's, without noise."""
    ratio = trace.clean_us[start:end] / trace.scenario.oracle_us[trace.phases[start:end]]
    return float(np.exp(np.log(ratio).mean()))


def test_the_oracle_has_no_regret_and_nccl_has_its_gap() -> None:
    scenario = tiny(TIMES, starts=[0])
    assert run(scenario, Oracle, 5, 0).regret_us.tolist() == [0] * 5
    # (10 - 8) once and (30 - 25) twice.
    assert run(scenario, NcclDefault, 5, 0).regret_us.tolist() == [12] * 5


def test_regret_by_hand_over_a_shift() -> None:
    class Alternating(Method):
        def choose(self, step: int) -> Int64:
            return flat_action([step % 3, 0], 0, 0)

    scenario = tiny([*TIMES, [[10, 30, 9], [20, 40, 25]]], starts=[0, 3])
    trace = run(scenario, Alternating, 6, 0)
    # Key 0 takes its actions in turn, key 1 always NCCL's own, which is worth 5 twice at first and best afterwards.
    assert trace.regret_us.tolist() == [2 + 10, 0 + 10, 12 + 10, 1, 21, 0]
    assert trace.cumulative_regret_us.tolist() == [12, 22, 44, 45, 66, 66]
    assert trace.phases.tolist() == [0, 0, 0, 1, 1, 1]
    assert trace.time_us[:, 0].tolist() == [10, 8, 20, 10, 30, 9]


def test_sweeps_are_charged_in_full() -> None:
    scenario = tiny(TIMES, starts=[0])
    swept = SWEEP_REPEATS * np.sum(TIMES)
    table = run(scenario, CsvTable, 2, 0)
    assert table.cumulative_regret_us.tolist() == [swept, swept]
    static = run(scenario, BestStaticPair, 2, 0)
    # Weighted: NCCL's own 10 + 2 * 30, pair 1 8 + 2 * 40, pair 2 20 + 2 * 25; all of one collective.
    assert np.array_equal(static.actions, np.broadcast_to(flat_action([0, 0], 0, 0), (2, 2)))
    assert static.offline_us == swept
    assert run(scenario, Bandit, 2, 0).offline_us == 0


def test_a_static_pair_must_exist_for_every_key_of_its_collective() -> None:
    scenario = tiny([[[10, 1, 9], [10, np.nan, 9]]], starts=[0])
    assert np.array_equal(run(scenario, BestStaticPair, 1, 0).actions[0], flat_action([2, 2], 0, 0))


def test_probing_takes_each_candidate_in_turn_and_keeps_the_best() -> None:
    trace = run(tiny(TIMES, starts=[0]), ExhaustiveProbing, 12, 0)
    pairs = trace.actions // int(flat_action(1, 0, 0))
    assert pairs[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 1, 1, 1]
    assert pairs[:, 1].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("factory", "steps", "near"), [(CoordinateDescent, 900, 1.03), (ExhaustiveProbing, 700, 1.03), (Bandit, 900, 1.05)]
)
def test_each_learner_ends_near_the_oracle(factory: Factory, steps: int, near: float) -> None:
    scenario = tcp()
    assert _excess(run(scenario, NcclDefault, 1, 0), 0, 1) > 1.07
    for seed in range(3):
        assert _excess(run(scenario, factory, steps, seed), steps - 100, steps) < near


def test_a_table_goes_stale_and_learners_recover() -> None:
    scenario = tcp(BUSY)
    ends = {
        factory: _excess(run(scenario, factory, 1300, 0), 1200, 1300)
        for factory in (CsvTable, CoordinateDescent, ExhaustiveProbing, Bandit)
    }
    assert ends[CsvTable] > 1.1
    assert ends[CoordinateDescent] > 1.1
    assert ends[ExhaustiveProbing] < 1.05
    assert ends[Bandit] < 1.05


def test_probing_does_not_notice_an_improvement() -> None:
    """Which is how STAR-MPI monitors: it starts again only where performance deteriorates."""
    trace = run(tcp(BUSY, Load()), ExhaustiveProbing, 1800, 0)
    assert len(np.unique(trace.actions[1300:], axis=0)) == 1


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(BASELINES)))
def test_no_method_ever_leaves_the_mask(seed: int, name: str) -> None:
    places = [(find_cluster("gb200-nvl72"), 2), (find_cluster("switchml-ethernet"), 8), (find_cluster("dgx-v100"), 1)]
    scenario = sample_scenarios(np.random.default_rng(seed), places, 1, Sampling(keys=6, horizon=300))[0]
    trace = run(scenario, BASELINES[name], 300, seed)
    assert scenario.valid[np.arange(6), trace.actions].all()


def test_a_masked_action_is_refused() -> None:
    class Careless(Method):
        def choose(self, step: int) -> Int64:
            return flat_action([0, 9], 0, 0)

    with pytest.raises(ValueError, match=r"Careless chose 'collnet_direct/simple' for key 1 \(2KiB\)"):
        run(tiny(TIMES, starts=[0]), Careless, 1, 0)


def test_a_seed_gives_the_same_run_and_every_method_the_same_noise() -> None:
    scenario = tcp(BUSY, every=40)
    traces = {name: run(scenario, factory, 80, 3) for name, factory in BASELINES.items()}
    for name, factory in BASELINES.items():
        assert np.array_equal(run(scenario, factory, 80, 3).actions, traces[name].actions)
        assert np.array_equal(traces[name].noise.normal, traces["nccl"].noise.normal)
    other = run(scenario, Bandit, 80, 4)
    assert not np.array_equal(other.noise.normal, traces["bandit"].noise.normal)
    assert not np.array_equal(other.actions, traces["bandit"].actions)


def test_what_shares_the_loop_with_a_policy_has_its_settings() -> None:
    control = Control(learning=Learning(draws=4))
    rivals = beside(control)
    assert rivals.keys() == BASELINES.keys()
    for name in ("thompson", "uniform", "elimination"):
        method = rivals[name](tcp(), np.random.default_rng(0))
        assert isinstance(method, InLoop)
        assert method.loop.control is control
