"""What runs beside a job, what a policy is judged by and what it learns in are one loop: step by step the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import small_experiment
from tiny_scenario import tcp

from dynamiccl_ray.actions import action_parts
from dynamiccl_ray.agent import policy
from dynamiccl_ray.baselines.learned import LearnedPolicy
from dynamiccl_ray.baselines.run import run
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.control.loop import Drift, Due, Loop, Measured, Phase
from dynamiccl_ray.fabric.load import Load
from dynamiccl_ray.simulation.sampling import recognised_of
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.splits import measured_scenario
from dynamiccl_ray.simulation.streams import Simulation
from dynamiccl_ray.trainers.online.run import run_online

LEARNING = {"draws": 24, "compares": 8, "sequence": 8}
SEED = 3


@dataclass
class Told:
    """One observation of a loop, and what followed from it."""

    loop: Loop
    samples: Measured
    alarms: list[int]
    """Rows."""
    phases: list[int]
    nbytes: list[int]
    """Of every row."""
    due: Due | None = None
    decided: list[int] = field(default_factory=list)
    """Actions of the keys that were due."""


def _listen(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """To the one loop that runs, in order. A rank's own share of a time is left out: no model of a fabric has it."""
    told: list[Told] = []
    observe, ask, decide = Loop.observe, Loop.due, Loop.decide

    def observing(loop: Loop, samples: Measured) -> list[Drift]:
        samples = replace(samples, skew=np.zeros(len(samples.row)))
        alarms = observe(loop, samples)
        if len(samples.row):
            told.append(
                Told(loop, samples, [alarm.row for alarm in alarms], loop.phase.tolist(), loop.keys.nbytes.tolist())
            )
        return alarms

    def asking(loop: Loop) -> Due:
        due = ask(loop)
        # One that is made of a checkpoint only says what it knows.
        if len(due.row) and told[-1].loop is loop:
            assert told[-1].due is None
            told[-1].due = due
        return due

    def deciding(loop: Loop, rows: Any, actions: Any) -> None:
        decide(loop, rows, actions)
        if len(rows):
            told[-1].decided = actions.tolist()

    monkeypatch.setattr(Loop, "observe", observing)
    monkeypatch.setattr(Loop, "due", asking)
    monkeypatch.setattr(Loop, "decide", deciding)
    return told


class _Seed:
    """What a method draws its seed from."""

    def integers(self, _: int) -> int:
        return SEED


def _replay(told: list[Told], scenario: Scenario, net: policy.PolicyNetwork, control: Control) -> None:
    """The times that one loop was told, told to an evaluated policy in as many parts."""
    judged = LearnedPolicy(scenario, _Seed(), net, control)  # type: ignore[arg-type]
    keys = len(scenario.nbytes)
    for part in told:
        # As whole numbers of nanoseconds, which is what ranks report.
        time_us = np.round(np.exp(part.samples.log_us) * 1e3) / 1e3
        assert np.array_equal(np.log(time_us), part.samples.log_us)
        order = np.lexsort((np.arange(len(time_us)), part.samples.row))
        by_key = time_us[order].reshape(keys, -1)
        judged._played._until = by_key.shape[1]
        for step in by_key.T:
            judged.observe(judged.loop.wanted, step)


def _same(a: Due, b: Due) -> None:
    for name in ("row", "salt", "ordinal", "shifts", "draw", "fixed", "takes", "behind", "observation"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    for name, column in vars(a.outcome).items():
        assert np.array_equal(column, getattr(b.outcome, name), equal_nan=True), name


def test_a_job_is_decided_as_the_evaluation_decides(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    policy.save(policy.PolicyNetwork(16), tmp_path / "policy.pt")
    experiment = small_experiment(
        job,
        seed=SEED,
        policy=str(tmp_path / "policy.pt"),
        # What is compared are decisions of one policy.
        ppo={"lr": 1e-30},
        control={"learning": LEARNING},
        fabric={"nodes": 8, "cluster": "p5en-h200-efa", "events": [{"link_bandwidth": 0.25, "exploit_rounds": 12}]},
        stop={"rounds": None, "exploit_rounds_after_last_event": 6},
    )
    told = _listen(monkeypatch)
    run_online(experiment, tmp_path / "run", serial=True)
    beside = told.copy()
    told.clear()
    scenario = _in_order(measured_scenario(8), beside[-1].nbytes)
    _replay(beside, scenario, policy.load(tmp_path / "policy.pt"), experiment.control)
    assert len(told) == len(beside)
    told[-1].decided = beside[-1].decided  # the run may have ended before it was
    for a, b in zip(beside, told, strict=True):
        assert (sorted(a.alarms), a.phases, a.decided) == (sorted(b.alarms), b.phases, b.decided)
        assert (a.due is None) == (b.due is None)
        if a.due is not None and b.due is not None:
            _same(a.due, b.due)
    # All of it was there to be compared.
    assert sum(int(part.due.draw.sum()) for part in beside if part.due is not None) > 24 * len(scenario.nbytes)
    assert any(part.alarms for part in beside)
    assert {phase for part in beside for phase in part.phases} == set(Phase)


def _in_order(scenario: Scenario, nbytes: list[int]) -> Scenario:
    """With its keys in this order."""
    of = [scenario.nbytes.tolist().index(size) for size in nbytes]
    names = ("collective", "nbytes", "weight", "cost", "own_pair", "sigma", "prior")
    by_key = {name: getattr(scenario, name)[of] for name in names}
    return replace(scenario, **by_key, times_us=scenario.times_us[:, of])


@pytest.mark.parametrize("first", [0, 1])
def test_a_policy_learns_in_what_it_is_judged_by(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise: there each draws its own. Without heat: training has none, and no part of the policy sees it. The
    model's times are single-precision, and so are their logs.
    """
    control = Control.model_validate({"learning": LEARNING | {"sequence": 24, "heat": 0}})
    whole = recognised_of(tcp(Load(inter_bandwidth=0.5)))
    scenario = replace(
        whole, sigma=np.zeros(()), times_us=whole.times_us[first : first + 1], starts=np.zeros(1, np.int64)
    )
    torch.manual_seed(0)
    net = policy.PolicyNetwork(16)
    told = _listen(monkeypatch)
    samples = control.learning.baseline_samples + LEARNING["draws"] * control.learning.draw_samples
    run(scenario, lambda of, _: LearnedPolicy(of, _Seed(), net, control), samples, 0)  # type: ignore[arg-type]
    judged = [part for part in told if part.due is not None and part.due.draw.any()]
    # The last draw measures NCCL's own choice again; in an episode nothing changes.
    assert len(judged) == LEARNING["draws"] - 1
    simulation = Simulation([scenario], control=control, seed=0)
    observation = simulation.reset()
    simulation._busier = 1
    for part in judged:
        assert part.due is not None
        assert part.due.draw.all()
        assert np.allclose(observation, part.due.observation, atol=1e-5)
        behind = np.zeros(len(part.decided), np.bool_)
        behind[part.due.behind[:, 0]] = True
        drawn = np.array(part.decided)
        observation, _ = simulation.step(np.stack(action_parts(drawn), -1))
        assert simulation.loop.wanted.tolist() == part.decided
    assert behind.any(), "what is behind the best is replaced in both"
