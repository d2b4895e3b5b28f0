"""A validation is one run of each scenario by the very network, judged as an evaluation judges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_scenario import tiny
from torch import Tensor

from dynamiccl_ray.agent.policy import PolicyNetwork
from dynamiccl_ray.baselines.run import Trace
from dynamiccl_ray.config.control import Control, Learning
from dynamiccl_ray.config.curriculum import Validation
from dynamiccl_ray.evaluation.players import players
from dynamiccl_ray.trainers.model.validation import validate

# The second pair is best; where there is no gap, NCCL's own choice is.
GAP, NONE = tiny([[[10, 8]]], starts=[0]), tiny([[[10, 20]]], starts=[0])
SETTINGS = Validation(scenarios=2, collectives=40)


def alone(*given: Any) -> dict[str, list[list[Trace]]]:
    """In this process."""
    with players(1) as play_all:
        return play_all(*given)


class Asked(PolicyNetwork):
    """Counts how often it is."""

    times = 0

    def features(self, obs: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        self.times += 1
        return super().features(obs, state)


def test_a_network_that_measures_closes_the_gap() -> None:
    net = Asked(8)
    found = validate(net, [GAP], SETTINGS, Control(), alone)
    assert net.times > 40
    # One of a hundred measures NCCL's own choice again.
    best = {"gap_closed": 1, "geomean_vs_oracle": 1, "default_vs_oracle": 10 / 8, "p99_key_vs_default": 8 / 10}
    assert found == pytest.approx(best, rel=0.011)


def test_the_loop_is_as_the_curriculum_has_it() -> None:
    net = Asked(8)
    validate(net, [GAP], SETTINGS, Control(learning=Learning(draws=4)), alone)
    assert net.times == 4


def test_no_gap_is_closed() -> None:
    found = validate(PolicyNetwork(8), [NONE], SETTINGS, Control(), alone)
    assert found["gap_closed"] == 1
    assert found["p99_key_vs_default"] >= 1


def test_it_is_one_run_after_so_many_collectives() -> None:
    played: list[list[Trace]] = []

    def watched(*given: Any) -> dict[str, list[list[Trace]]]:
        found = alone(*given)
        played.extend(found["policy"])
        return found

    validate(PolicyNetwork(8), [GAP, NONE], SETTINGS, Control(), watched)
    assert [len(traces) for traces in played] == [1, 1]
    assert {len(trace.actions) for traces in played for trace in traces} == {40 + 10 + 100}
    assert all(np.isfinite(trace.time_us).all() for traces in played for trace in traces)
