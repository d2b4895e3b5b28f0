"""What a trial is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamiccl_ray.agent.policy import PolicyNetwork
from dynamiccl_ray.config.curriculum import Curriculum, Stage
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.keys import key_name
from dynamiccl_ray.trainers.sweep.scores import held_out_scenarios, mean_of, regrets, score_policy, score_run


def _summary() -> dict[str, Any]:
    rows = [
        {"comm": "ab", "key": key_name(3), "oracle_us": 10.0},
        {"comm": "ab", "key": key_name(4), "oracle_us": None},
    ]
    after = [{"comm": "ab", "key": key_name(3), "oracle_us": 20.0}]
    return {"events": [{"by_call": True, "at": 5, "name": "slow"}], "keys": rows, "after": [{"keys": after}]}


def test_a_regret_is_over_the_best_of_its_stretch() -> None:
    samples = {
        "time_us": np.array([11.0, 9.0, 30.0, 22.0]),
        "dseq": np.array([1, 2, 3, 5]),
        "epoch": np.zeros(4),
        "comm": np.full(4, 0xAB, np.uint64),
        "key": np.array([3, 3, 4, 3]),
    }
    # Nobody knows the best of the other key.
    assert regrets(_summary(), samples) == pytest.approx([0.1, -0.1, 0.1])


def test_a_run_that_ended_while_it_learned_has_no_score(tmp_path: Path) -> None:
    summary = _summary() | {"geomean_vs_oracle": {"default": 1.1, "learned_table": 1.0}}
    summary["after"][0]["geomean_vs_oracle"] = None
    with pytest.raises(RunError, match="after 'slow' the run ended while it still learned"):
        score_run(summary, tmp_path)


def test_a_policy_is_judged_in_the_loop_of_its_curriculum() -> None:
    stage = Stage.model_validate({"name": "only", "places": [{"cluster": "dgx-v100", "nodes": [1]}]})
    places = [{"cluster": "cloud-tcp", "nodes": [2]}]

    def judged(**learning: int) -> float:
        given = {"name": "x", "stages": [stage], "held_out": places, "streams": {"keys": 4}}
        few = {"validation": {"scenarios": 1, "collectives": 60}, "control": {"learning": learning}}
        curriculum = Curriculum.model_validate(given | few)
        torch.manual_seed(0)
        validated = {"gap_closed": 1.0, "geomean_vs_oracle": 1.0}
        scored = score_policy(PolicyNetwork(8), held_out_scenarios(curriculum), curriculum, validated)
        return float(scored["held_out_regret"])

    # A network that has learned nothing loses by every draw.
    assert judged(draws=60) > 1.2 * judged(draws=4)


def test_what_one_seed_does_not_know_has_no_mean() -> None:
    scores = [{"a": 1, "b": None, "curve": [[1, 2]]}, {"a": 2, "b": 3, "curve": []}]
    assert mean_of(scores) == {"a": 1.5, "b": None}
