"""The evaluation: its numbers by hand, its ends, and what it returns."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_scenario import tcp, tiny

from dynamiccl_ray.actions import flat_action
from dynamiccl_ray.baselines.fixed import NcclDefault, Oracle
from dynamiccl_ray.baselines.method import Float64, Int64, Method
from dynamiccl_ray.baselines.registry import BASELINES
from dynamiccl_ray.baselines.run import run
from dynamiccl_ray.evaluation.measures import (
    Procedure,
    collectives_to_best,
    evaluate,
    gap_closed,
    job_regrets,
    key_rows,
    mean_interval,
    play,
    relative_regret,
    steps_to_adapt,
)
from dynamiccl_ray.fabric.load import Load
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.report.evaluation_plots import decision_map, regret_curves, speedup_by_size
from dynamiccl_ray.simulation.scenario import Scenario

TIMES = [[[10, 8, 20], [30, 40, 25]]]
SHORT = Procedure(learn=20, warmup=2, measured=30, runs=3)


class Half(Method):
    """The best for key 0, NCCL's own for key 1."""

    def choose(self, step: int) -> Int64:
        return flat_action([1, 0], 0, 0)


class LateBy(Method):
    """The oracle, but ``STEPS`` after each shift of a scenario with shifts every 100."""

    STEPS = 30

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        super().__init__(scenario, rng)
        self._oracle = scenario.oracle
        self._phase_at = scenario.phase_at

    def choose(self, step: int) -> Int64:
        return np.asarray(self._oracle[self._phase_at(max(0, step - self.STEPS))])


class Never(LateBy):
    STEPS = 100


def test_the_ends_of_the_gap() -> None:
    scenario = tcp(Load(inter_bandwidth=0.25), every=30)
    assert gap_closed([play(scenario, NcclDefault, SHORT)], SHORT) == 0
    assert gap_closed([play(scenario, Oracle, SHORT)], SHORT) == 1


def test_gap_and_regret_by_hand() -> None:
    runs = [play(tiny(TIMES, starts=[0]), Half, SHORT)]
    # NCCL: 10 + 2 * 30; this: 8 + 2 * 30; best: 8 + 2 * 25.
    assert gap_closed(runs, SHORT) == pytest.approx(2 / 12)
    assert relative_regret(runs) == pytest.approx(10 / 58)
    no_gap = tiny([[[10, 12]]], starts=[0])
    assert gap_closed([play(no_gap, NcclDefault, SHORT)], SHORT) is None
    # A scenario without a gap takes nothing from the others.
    assert gap_closed([*runs, play(no_gap, NcclDefault, SHORT)], SHORT) == pytest.approx(2 / 12)


def test_the_interval_of_the_regret_is_over_scenarios_and_each_has_noise_of_its_own() -> None:
    one = tiny(TIMES, starts=[0], sigma=0.1)
    other = tiny([[[10, 9.9, 20], [30, 40, 29.9]]], starts=[0], sigma=0.1)
    runs = [play(scenario, Half, SHORT) for scenario in (one, other, one, other)]
    low, high = mean_interval(job_regrets(runs))
    least, most = (relative_regret([of]) for of in (runs[1], runs[0]))
    assert least <= low < relative_regret(runs) < high <= most
    assert mean_interval(job_regrets(runs[:1])) == [relative_regret(runs[:1])] * 2
    drawn = [of[0].noise.normal.ravel() for of in runs]
    assert np.array_equal(drawn[0], drawn[2])
    assert abs(np.corrcoef(drawn[0], drawn[1])[0, 1]) < 0.3


def test_key_statistics() -> None:
    rows = key_rows(play(tiny(TIMES, starts=[0], sigma=0.1), Half, SHORT), SHORT)
    assert [row["bytes"] for row in rows] == [1024, 2048]
    assert rows[0]["speedup"] == pytest.approx(1.25)
    # Under the same noise the ratio has none.
    assert rows[0]["low"] == pytest.approx(1.25)
    assert rows[1]["speedup"] == rows[1]["low"] == rows[1]["high"] == 1
    assert 7 < rows[0]["mean_us"] < 9
    assert 0.4 < rows[0]["std_us"] < 1.2
    assert rows[0]["mean_us"] + rows[0]["std_us"] < rows[0]["p99_us"] < 13
    assert rows[1]["oracle_us"] == pytest.approx(rows[1]["default_us"] * 25 / 30)
    assert (rows[0]["collective"], rows[0]["tier"], rows[0]["nodes"]) == ("all_reduce", 1, 2)


def test_the_interval_covers_what_varies() -> None:
    class Wavering(Method):
        def choose(self, step: int) -> Int64:
            return flat_action([step % 2, 0], 0, 0)

    row = key_rows(play(tiny(TIMES, starts=[0]), Wavering, SHORT), SHORT)[0]
    assert row["low"] < row["speedup"] < row["high"]
    assert row["speedup"] == pytest.approx(10 / 9)


def test_steps_to_adapt() -> None:
    times = [[[10, 8, 20]], [[10, 20, 5]], [[10, 4, 20]]]
    scenario = tiny(times, starts=[0, 100, 200])
    # The window may hold late steps that cost no more than a tenth of the gap: after the first shift a late step
    # loses 15 us and 0.5 us are allowed, none of 20; after the second 16 us and 0.6 us, none either.
    assert steps_to_adapt(run(scenario, LateBy, 300, 0)) == [30, 30]
    assert steps_to_adapt(run(scenario, Never, 300, 0)) == [None, None]
    assert steps_to_adapt(run(scenario, Oracle, 300, 0)) == [0, 0]
    assert steps_to_adapt(run(scenario, NcclDefault, 300, 0)) == [None, None]
    # The second shift is not in this run.
    assert steps_to_adapt(run(scenario, LateBy, 150, 0)) == [30]


def test_collectives_to_the_best() -> None:
    scenario = tiny([[[10, 8, 20]], [[10, 20, 5]], [[10, 4, 20]]], starts=[0, 100, 200])
    # Of a method that is late after each shift the first phase is good from its beginning.
    late = [run(scenario, LateBy, 300, 0)]
    assert collectives_to_best([late]) == {"median": 30, "low": 30, "high": 30, "reached": 1}
    assert collectives_to_best([[run(scenario, Oracle, 300, 0)]])["median"] == 0
    never = collectives_to_best([[run(scenario, NcclDefault, 300, 0)]])
    assert never == {"median": None, "low": None, "high": None, "reached": 0}
    # Scenarios are drawn, not phases: of a good and a hopeless one either may be all that there is.
    both = collectives_to_best([late, [run(scenario, NcclDefault, 300, 0)]])
    assert both == {"median": 30, "low": 30, "high": None, "reached": 0.5}
    # One per cent is near enough, more is not.
    near = [[run(tiny([[[10, ratio * 10, 20]]], starts=[0]), NcclDefault, 50, 0)] for ratio in (1 / 1.009, 1 / 1.011)]
    assert [collectives_to_best([one])["reached"] for one in near] == [1, 0]


def test_evaluate_returns_json() -> None:
    scenarios = [tcp(Load(inter_latency=3.0), every=25), tiny(TIMES, starts=[0], sigma=0.05)]
    result = evaluate({"both": scenarios, "tiny": scenarios[1:]}, {**BASELINES, "late": LateBy}, "nccl", SHORT, seed=4)
    assert json.loads(json.dumps(result)) == result
    assert result["seeds"] == [4, 5, 6]
    both, small = result["splits"]
    assert (both["name"], small["name"]) == ("both", "tiny")
    assert set(both["regret"]) == {*BASELINES, "late"}
    assert both["gap_closed"] == 0
    assert both["worst_key_vs_default"] == both["p99_key_vs_default"] == 1
    assert both["regret"]["oracle"] == 0
    assert small["geomean_vs_oracle"] == pytest.approx(np.sqrt(10 / 8 * 30 / 25))
    assert small["adapted"] is None
    oracle = evaluate({"tiny": scenarios[1:]}, BASELINES, "oracle", SHORT)["splits"][0]
    assert (oracle["gap_closed"], oracle["geomean_vs_oracle"]) == (1, 1)


def test_evaluate_refuses_what_it_cannot_measure() -> None:
    with pytest.raises(ValueError, match="subject is 'ppo'; it must be one of the methods: nccl, static pair"):
        evaluate({}, BASELINES, "ppo", SHORT)
    with pytest.raises(ValueError, match="split 'empty' has no scenarios"):
        evaluate({"empty": []}, BASELINES, "nccl", SHORT)


def test_a_method_sees_what_it_did() -> None:
    seen: list[tuple[Int64, Float64]] = []

    class Watching(Half):
        def observe(self, actions: Int64, time_us: Float64) -> None:
            seen.append((actions, time_us))

    trace = run(tiny(TIMES, starts=[0], sigma=0.2), Watching, 4, 0)
    np.testing.assert_allclose(np.stack([time for _, time in seen]), trace.time_us)


def test_figures_are_drawn() -> None:
    scenario = tcp(Load(inter_bandwidth=0.25), every=25)
    runs = {name: play(scenario, factory, SHORT) for name, factory in {**BASELINES, "learned": LateBy}.items()}
    rows = {name: key_rows(traces, SHORT) for name, traces in runs.items()}
    traces = runs["bandit"][:1]
    for figure in (
        regret_curves(runs, "TCP"),
        speedup_by_size(rows),
        decision_map(traces, "bandit", Collective.ALL_REDUCE, 20),
    ):
        assert figure.startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no trace has broadcast; there are all_gather, all_reduce"):
        decision_map(traces, "bandit", Collective.BROADCAST, 20)
