"""Rivals that choose in the policy's own loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tiny_scenario import tcp

from dynamiccl_ray.baselines.choosers import Elimination, LastTable, Thompson, Uniform
from dynamiccl_ray.baselines.run import Trace, run
from dynamiccl_ray.config.control import Learning
from dynamiccl_ray.control.columns import nothing_expected
from dynamiccl_ray.evaluation.measures import relative_regret
from dynamiccl_ray.fabric.load import Load
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.fabric.pricing import expected
from dynamiccl_ray.simulation.scenario import Scenario

STEPS = 200


def _drawn(trace: Trace) -> np.ndarray:
    """(draws, K) flat actions of the first learning phase."""
    learning = Learning()
    first = learning.baseline_samples
    return trace.actions[first : first + learning.draws * learning.draw_samples]


def _still() -> Scenario:
    whole = tcp(Load())
    prior = nothing_expected(len(whole.nbytes))  # and so nobody looks which cluster it may be
    return replace(whole, starts=whole.starts[:1], times_us=whole.times_us[:1], prior=prior)


def test_uniform_draws_all_that_may_be_chosen_and_thompson_what_may_be_the_best() -> None:
    scenario = _still()
    uniform, thompson = (run(scenario, of, STEPS, 0) for of in (Uniform, Thompson))
    kinds = [len(np.unique(_drawn(trace)[:, 0])) for trace in (uniform, thompson)]
    assert kinds[0] > 1.5 * kinds[1]
    assert relative_regret([[thompson]]) < relative_regret([[uniform]])


def test_a_model_of_the_right_cluster_helps_thompson_and_one_of_another_does_no_lasting_harm() -> None:
    scenario = _still()

    def regret(name: str | None) -> float:
        of = scenario.nodes, scenario.collective, scenario.nbytes
        told = replace(scenario, prior=scenario.prior if name is None else expected(find_cluster(name), *of))
        return float(np.mean([relative_regret([[run(told, Thompson, STEPS, seed)]]) for seed in range(4)]))

    right, none, wrong = regret(scenario.cluster), regret(None), regret("dgx-h100-ndr")
    assert right < none
    assert wrong < 2 * none


def test_elimination_draws_what_is_left_in_turn_and_no_more_of_what_is_behind() -> None:
    scenario = _still()
    drawn = _drawn(run(scenario, Elimination, STEPS, 0))[:, 0]
    assert len(np.unique(drawn[:32])) > 10, "everything may be the best at first"
    first, last = (scenario.flat_us[0, 0, of].mean() for of in np.array_split(drawn, 2))
    assert last < 0.9 * first
    elimination, uniform = (run(scenario, of, STEPS, 0) for of in (Elimination, Uniform))
    assert relative_regret([[elimination]]) < relative_regret([[uniform]])


def test_the_last_table_explores_hardly_and_is_hard_to_beat_where_nothing_has_changed() -> None:
    scenario = _still()
    trace = run(scenario, LastTable, STEPS, 0)
    drawn = _drawn(trace)
    # What would only repeat what is known goes to what nobody has tried, as for every chooser.
    assert np.mean([(of_key == of_key[0]).mean() for of_key in drawn.T]) > 0.7
    assert relative_regret([[trace]]) < relative_regret([[run(scenario, Thompson, STEPS, 0)]])
