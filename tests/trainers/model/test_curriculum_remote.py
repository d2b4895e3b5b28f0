"""Runners and learners in Ray actors: repeatable and resumable like a run in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from test_curriculum import TINY

from dynamiccl_ray.trainers.common.cluster import start_ray
from dynamiccl_ray.trainers.model.curriculum import CurriculumTrainable


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start_ray(4)
    yield
    ray.shutdown()


def test_two_runners_and_two_learners_repeat_and_resume(tmp_path: Path) -> None:
    # Three rounds between validations, so that one is sampled while another is learned from.
    stages = [{**TINY["stages"][1], "most_rounds": 6}]  # type: ignore[index]
    curriculum = {**TINY, "stages": stages, "validation": {"scenarios": 3, "every_rounds": 3}}
    run = CurriculumTrainable({"curriculum": curriculum, "runners": 2, "learners": 2, "out": str(tmp_path)})
    try:
        before = run.net.state_dict()
        before = {name: value.clone() for name, value in before.items()}
        run.train()
        saved = run.save(str(tmp_path / "saved"))
        run.train()
        assert run.status()["steps"] == 6 * 4 * 4 * 4
        once = {name: value.clone() for name, value in run.net.state_dict().items()}
        assert any(not torch.equal(before[name], once[name]) for name in once)

        # Every learner holds the same weights.
        copies = run._group.foreach_learner(lambda learner: learner.get_state()["rl_module"])
        first, second = (copy.get()["default_policy"] for copy in copies)
        assert all(np.array_equal(first[name], second[name]) for name in first)

        run.restore(saved)
        run.train()
        again = run.net.state_dict()
        assert all(torch.equal(once[name], again[name]) for name in once)
    finally:
        run.stop()


def test_a_runner_beside_the_learner_changes_no_weight(tmp_path: Path) -> None:
    stages = [{**TINY["stages"][1], "most_rounds": 6}]  # type: ignore[index]
    curriculum = {**TINY, "stages": stages, "validation": {"scenarios": 3, "every_rounds": 3}}
    weights = []
    for runners in (0, 1):
        run = CurriculumTrainable({"curriculum": curriculum, "runners": runners, "out": str(tmp_path / str(runners))})
        try:
            run.train()
            weights.append({name: value.clone() for name, value in run.net.state_dict().items()})
        finally:
            run.stop()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
