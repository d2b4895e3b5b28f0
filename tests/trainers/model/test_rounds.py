"""The streams of a round: whose stages, which surprises, and that validation learns from neither."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynamiccl_ray.actors.fabric_runner import Share
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.config.curriculum import Curriculum
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.simulation.sampling import told_of
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.trainers.model import rounds as module
from dynamiccl_ray.trainers.model.rounds import Rounds

CLUSTERS = ("rtx4090-pcie", "dgx-a100-hdr", "cloud-tcp")
Made = tuple[list[Scenario], dict[str, Any]]


def _stage(cluster: str, surprise: float = 0.5) -> dict[str, Any]:
    return {
        "name": cluster, "places": [{"cluster": cluster, "nodes": [2]}], "surprise": surprise,
        "least_phases": 2, "most_phases": 2,
    }  # fmt: skip


def _curriculum(**changes: Any) -> Curriculum:
    settings = {
        "name": "x",
        "stages": [_stage(CLUSTERS[0]), _stage(CLUSTERS[1], 0.0), _stage(CLUSTERS[2])],
        "held_out": [{"cluster": "l40s-pcie", "nodes": [1]}],
        "streams": {"pool": 1, "scenarios": 4, "keys": 3, "shifted": 0.1},
        "validation": {"scenarios": 2, "collectives": 40},
    }
    return Curriculum.model_validate(settings | changes)


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is what a simulation would be made of."""
    monkeypatch.setattr(module, "Simulation", lambda scenarios, **settings: (scenarios, settings))


def _made(rounds: Rounds, *share: int) -> Made:
    made: Any = rounds(Share(*share))
    return made[0], made[1]


def _times(made: Made) -> list[bytes]:
    return [scenario.times_us.tobytes() for scenario in made[0]]


def test_some_jobs_do_not_say_where_they_run_and_some_are_wrong_but_none_that_is_validated() -> None:
    stage = _stage(CLUSTERS[0], 0.0) | {"undescribed": 0.3, "mistaken": 0.3}
    stage["places"] = [{"cluster": cluster, "nodes": [2]} for cluster in CLUSTERS]
    rounds = Rounds(_curriculum(stages=[stage], streams={"pool": 60, "scenarios": 4, "keys": 3}))
    every = [s for number in range(60) for s in _made(rounds, number, 0)[0]]
    said = [None if s.prior is None else _said_by(s) for s in every]
    silent = sum(of is None for of in said) / len(said)
    wrong = sum(of is not None and of != s.cluster for s, of in zip(every, said, strict=True)) / len(said)
    assert 0.15 < silent < 0.45
    assert 0.1 < wrong < 0.4
    assert all(_said_by(s) == s.cluster for s in rounds.validation(0))


def _said_by(scenario: Scenario) -> str:
    """Whose model expects what a scenario's job expects."""
    for name in CLUSTERS:
        other = told_of(scenario, find_cluster(name)).prior
        if np.array_equal(np.asarray(scenario.prior), np.asarray(other), equal_nan=True):
            return name
    raise AssertionError("no place's")


def test_half_of_a_round_is_from_its_stage_and_half_from_all_so_far() -> None:
    rounds = Rounds(_curriculum())
    seen = [s.cluster for number in range(30) for s in _made(rounds, number, 1)[0]]
    assert set(seen) == set(CLUSTERS[:2])
    # A quarter on average, with a standard deviation of 4%.
    assert 0.12 < seen.count(CLUSTERS[0]) / len(seen) < 0.38
    assert {s.cluster for s in _made(rounds, 0, 0)[0]} == {CLUSTERS[0]}


def test_surprises_are_new_in_every_place_of_every_round_and_as_large_as_the_stage_says() -> None:
    rounds = Rounds(_curriculum())
    first, second = (_times(_made(rounds, number, 0)) for number in (0, 1))
    # The pool has one scenario.
    assert len({*first, *second}) == 8
    assert _times(_made(Rounds(_curriculum()), 0, 0)) == first
    unsurprised = {
        t.tobytes() for n in range(5) for s in _made(rounds, n, 1)[0] if s.cluster == CLUSTERS[1] for t in [s.times_us]
    }
    assert len(unsurprised) == 1


def test_shares_are_parts_of_the_round_with_noise_of_their_own() -> None:
    rounds, reward = Rounds(_curriculum(reward={"switch": 0.5})), _curriculum(reward={"switch": 0.5}).reward
    whole, parts = _made(rounds, 3, 0), [_made(rounds, 3, 0, index, 2) for index in range(2)]
    assert _times(whole) == [time for part in parts for time in _times(part)]
    assert parts[0][1]["seed"] != parts[1][1]["seed"]
    assert parts[0][1] == {
        "control": Control(), "shifted": 0.1, "seed": parts[0][1]["seed"], "reward": reward,
    }  # fmt: skip


def test_the_curriculums_seed_decides() -> None:
    one, other = (_made(Rounds(_curriculum(seed=seed)), 0, 0)[0] for seed in (0, 1))
    assert not any(np.array_equal(a.nbytes, b.nbytes) for a, b in zip(one, other, strict=True))


def test_validation_is_of_the_stage_unseen_and_shifts_while_it_is_played() -> None:
    rounds = Rounds(_curriculum(streams={"pool": 8, "scenarios": 4, "keys": 3}))
    for stage, cluster in enumerate(CLUSTERS):
        validated = rounds.validation(stage)
        assert {s.cluster for s in validated} == {cluster}
        assert len(validated) == 2
        # A quarter of the 40 collectives that are played.
        assert all(s.starts[-1] < 10 for s in validated)
        trained = {s.nbytes.tobytes() for n in range(10) for s in _made(rounds, n, stage)[0]}
        assert not trained & {s.nbytes.tobytes() for s in validated}
    assert rounds.validation(0) is rounds.validation(0)
    sizes = [
        rounds.validation(stage)[0].weight.tobytes() + rounds.validation(stage)[0].nbytes.tobytes()
        for stage in range(3)
    ]
    assert len(set(sizes)) == 3, "a stage's draws are its own"
