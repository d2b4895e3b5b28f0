"""The sets of scenarios: of the stage's places and kinds, the same for a seed, never what training drew."""

from __future__ import annotations

import numpy as np
import pytest

from dynamiccl_ray.config.curriculum import Curriculum
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.simulation.splits import (
    NOISE,
    SHIFTS,
    evaluation_splits,
    measured_scenario,
    sampling_of,
    stage_scenarios,
)

CURRICULUM = Curriculum.model_validate(
    {
        "name": "tiny",
        "stages": [
            {"name": "near", "places": [{"cluster": "dgx-v100", "nodes": [1]}]},
            {
                "name": "far",
                "places": [{"cluster": "dgx-a100-hdr", "nodes": [2, 4]}],
                "compression": [["quantization", 0.5]],
                "parallelism": ["fsdp"],
                "most_phases": 3,
                "spread": 0.3,
            },
        ],
        "held_out": [{"cluster": "cloud-tcp", "nodes": [2]}],
        "streams": {"keys": 5, "rooted": 0.2},
    }
)


def test_a_stage_says_what_its_scenarios_are() -> None:
    sampling = sampling_of(CURRICULUM.stages[1], CURRICULUM, 50)
    assert (sampling.keys, sampling.rooted, sampling.most_phases, sampling.horizon) == (5, 0.2, 3, 50)
    assert (sampling.spread, sampling.parallelism, sampling.compression) == (0.3, ("fsdp",), (("quantization", 0.5),))
    for scenario in stage_scenarios(CURRICULUM.stages[1], CURRICULUM, 0, 6, 50):
        assert scenario.cluster == "dgx-a100-hdr"
        assert scenario.nodes in (2, 4)
        assert scenario.context.workload.compression == "quantization"
        assert len(scenario.nbytes) == 5
        assert scenario.starts[-1] < 50


def test_the_seed_decides() -> None:
    first, again, other = (stage_scenarios(CURRICULUM.stages[0], CURRICULUM, seed, 2) for seed in (1, 1, 2))
    assert all((a.nbytes == b.nbytes).all() for a, b in zip(first, again, strict=True))
    assert not all((a.nbytes == b.nbytes).all() for a, b in zip(first, other, strict=True))


def test_the_splits_of_an_evaluation() -> None:
    splits = evaluation_splits(CURRICULUM, 3, 40, measured_nodes=(8,))
    noisy = [f"noise: {name}" for name in NOISE]
    modelled = ["training: near", "training: far", "held out: cloud-tcp", "random clusters"]
    assert list(splits) == [*modelled, *noisy, "measured p5en, 8 nodes"]
    assert len({scenario.cluster for scenario in splits["random clusters"]}) == 12
    assert all(len(scenario.starts) == SHIFTS + 1 for scenario in splits["random clusters"])
    assert [len(of) for of in splits.values()] == [3, 3, 2, 12, *[1] * len(noisy), 1]
    for name, (sigma, wander) in NOISE.items():
        (scenario,) = splits[f"noise: {name}"]
        assert (len(scenario.starts), scenario.wander) == (1, wander)
        assert (scenario.sigma == sigma).all()
    assert {s.cluster for s in splits["held out: cloud-tcp"]} == {"cloud-tcp"}
    assert {s.context.llm.parallelism for s in splits["held out: cloud-tcp"]} == {"fsdp"}
    assert {len(s.starts) for s in splits["held out: cloud-tcp"]} == {1 + SHIFTS}
    trained = stage_scenarios(CURRICULUM.stages[0], CURRICULUM, CURRICULUM.seed, 3)
    assert not np.array_equal(trained[0].nbytes, splits["training: near"][0].nbytes)


def test_measured_tables_have_nccls_own_choice_and_no_choice_of_chunk() -> None:
    scenario = measured_scenario(8)
    assert scenario.context.topology.inter == "efa"
    assert scenario.context.topology.ranks == 64
    assert np.isnan(scenario.times_us[..., 1:]).all()
    with pytest.raises(ConfigError, match="7"):
        measured_scenario(7)
