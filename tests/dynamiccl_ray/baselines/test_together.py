"""Jobs that are played together decide as each does alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from dynamiccl_ray.agent import policy
from dynamiccl_ray.baselines.bandit import Bandit
from dynamiccl_ray.baselines.choosers import Elimination, LastTable, Thompson
from dynamiccl_ray.baselines.in_loop import Together
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.baselines.method import Factory
from dynamiccl_ray.baselines.run import run, run_together
from dynamiccl_ray.config.control import Control, Explore
from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.config.experiment import DEFAULT_POLICY
from dynamiccl_ray.control.columns import nothing_expected
from dynamiccl_ray.simulation.sampling import told_of
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.splits import HELD_OUT, evaluation_splits

CURRICULUM: Final = Path(__file__).parents[3] / "experiments" / "curricula" / "default.yaml"
STEPS: Final = 160
# A budget that is spent, and that each job has for itself.
CONTROL: Final = Control(explore=Explore(max_regret=0.01))


@pytest.fixture(scope="module")
def jobs() -> list[Scenario]:
    """That say their cluster, nothing at all, and another; each changes while it is played."""
    splits = evaluation_splits(load_curriculum(CURRICULUM), 2, STEPS, ())
    right, silent, wrong = [of[0] for name, of in splits.items() if name.startswith(HELD_OUT)][:3]
    silent = replace(silent, prior=nothing_expected(len(silent.nbytes)), said=None)
    return [right, silent, told_of(wrong, right.said)]


@pytest.mark.parametrize(
    "factory",
    [
        learned(policy.load(DEFAULT_POLICY), CONTROL),
        partial(Thompson, control=CONTROL),
        partial(Elimination, control=CONTROL),
        partial(LastTable, control=CONTROL),
        Bandit,
    ],
    ids=["policy", "thompson", "elimination", "last-table", "bandit"],
)
def test_what_is_decided_together_is_what_each_decides_alone(jobs: list[Scenario], factory: Factory) -> None:
    seeds = [0, 1, 2]
    for scenario, seed, trace in zip(jobs, seeds, run_together(jobs, factory, STEPS, seeds), strict=True):
        alone = run(scenario, factory, STEPS, seed)
        assert trace.scenario is scenario
        assert trace.seed == seed
        assert trace.offline_us == alone.offline_us
        assert np.array_equal(trace.actions, alone.actions)
        assert np.array_equal(trace.time_us, alone.time_us)


def test_each_job_counts_its_own_checks_and_alarms(jobs: list[Scenario]) -> None:
    def played(of: list[Scenario]) -> list[tuple[int, int]]:
        methods = [Thompson(job, np.random.default_rng(i), Control()) for i, job in enumerate(of)]
        together = Together(methods)
        for step in range(3 * STEPS):
            chosen = together.choose(step)
            us = []
            for method, job in zip(methods, of, strict=True):
                mine = chosen[method.first : method.first + method.n_keys]
                us.append(job.flat_us[0, method.rows, mine].astype(np.float64))
            slower = np.concatenate([[2.0] * len(us[0]), *([1.0] * len(x) for x in us[1:])])
            together.observe(chosen, np.concatenate(us) * (slower if step >= 2 * STEPS else 1.0))
        return [(method.checks, method.alarms) for method in methods]

    (first, *others) = played(jobs)
    assert sum(first) > 0
    assert others == [(0, 0), (0, 0)]
