"""What computes in our processes takes one core."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from threadpoolctl import threadpool_info, threadpool_limits

from dynamiccl_ray.actors.fabric_runner import FabricRunner
from dynamiccl_ray.actors.runner import SPACES
from dynamiccl_ray.agent.policy import PolicyNetwork
from dynamiccl_ray.baselines.bandit import Bandit
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.config.curriculum import Curriculum
from dynamiccl_ray.evaluation.measures import Procedure
from dynamiccl_ray.evaluation.players import players
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.simulation.scenario import Scenario, modelled
from dynamiccl_ray.trainers.model.learning import curriculum_config
from dynamiccl_ray.trainers.model.rounds import Rounds


def _threads() -> set[int]:
    """Of PyTorch and of NumPy's BLAS. SciPy's wheels bring one of their own, which nothing here calls."""
    blas = [x for x in threadpool_info() if x["user_api"] == "blas" and "scipy.libs" not in x["filepath"]]
    return {torch.get_num_threads(), *(x["num_threads"] for x in blas)}


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As on a machine with two cores where nobody says otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with threadpool_limits(2, "blas"):
        assert _threads() == {2}
        yield
    torch.set_num_threads(before)


def _decides() -> None:
    learned(PolicyNetwork(8), Control())


def _samples() -> None:
    FabricRunner(config=_ppo())


def _learns() -> None:
    _ppo().build_learner_group(spaces=SPACES)


def _ppo() -> PPOConfig:
    curriculum = Curriculum.model_validate(
        {
            "name": "small",
            "stages": [{"name": "only", "places": [{"cluster": "rtx4090-pcie", "nodes": [2]}]}],
            "held_out": [{"cluster": "l40s-pcie", "nodes": [1]}],
            "ppo": {"hidden": 16, "experts": 2},
        }
    )
    return curriculum_config(curriculum, Rounds(curriculum))


@pytest.mark.parametrize("begin", [_decides, _samples, _learns])
def test_what_computes_takes_one_core(two_threads: None, begin: Callable[[], None]) -> None:
    begin()
    assert _threads() == {1}


class _OneCore(Bandit):
    """Says in which process it is played."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        super().__init__(scenario, rng)
        assert _threads() == {1}


def test_what_plays_elsewhere_takes_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    job = modelled(find_cluster("cloud-tcp"), 2, collective=int(Collective.ALL_REDUCE), nbytes=(1 << 20,))
    with players(2) as play_all:
        found = play_all([job], {"one": _OneCore}, Procedure(learn=4, warmup=1, measured=1, runs=1))
    ((trace,),) = found["one"]
    assert len(trace.actions) == 6
