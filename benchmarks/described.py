"""What it is worth to say which cluster a job runs on, and what it costs to say another: three choosers in one control
loop, the policy, Thompson sampling and uniform draws, on the held-out clusters.

    python benchmarks/described.py OUT.json [--scenarios 6] [--runs 1]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dynamiccl_ray.agent import policy
from dynamiccl_ray.baselines.choosers import Thompson, Uniform
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.baselines.method import Factory
from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.config.experiment import DEFAULT_POLICY
from dynamiccl_ray.evaluation.measures import Procedure, regret_interval, relative_regret
from dynamiccl_ray.evaluation.players import players
from dynamiccl_ray.evaluation.suite import horizon_of
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.simulation.sampling import told_of
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.splits import HELD_OUT, evaluation_splits

CURRICULUM = Path(__file__).parents[1] / "experiments" / "curricula" / "default.yaml"
WRONG: Mapping[str, str] = {
    "gh200-slingshot": "cloud-tcp",
    "l40s-pcie": "dgx-h100-ndr",
    "cloud-tcp": "gh200-slingshot",
    "hammingmesh": "ethernet-1g",
    "switchml-ethernet": "p5en-h200-efa",
}
"""By cluster another, as unlike as there is."""


def _told(scenario: Scenario, what: str) -> Scenario:
    if what == "right":
        return scenario
    return told_of(scenario, find_cluster(WRONG[scenario.cluster]) if what == "wrong" else None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--scenarios", type=int, default=6, help="half as many of each cluster")
    parser.add_argument("--runs", type=int, default=1)
    given = parser.parse_args()
    procedure = Procedure(runs=given.runs)
    splits = evaluation_splits(load_curriculum(CURRICULUM), given.scenarios, horizon_of(procedure), ())
    jobs = [scenario for name, of in splits.items() if name.startswith(HELD_OUT) for scenario in of]
    choosers: dict[str, Factory] = {
        "policy": learned(policy.load(DEFAULT_POLICY)),
        "thompson": Thompson,
        "uniform": Uniform,
    }
    rows = []
    with players(len(os.sched_getaffinity(0))) as play_all:
        for what, (name, factory) in itertools.product(("right", "wrong", "none"), choosers.items()):
            traces = play_all([_told(scenario, what) for scenario in jobs], factory, procedure)
            row = {
                "described": what,
                "chooser": name,
                "regret": relative_regret(traces),
                "interval": regret_interval(traces),
                "median": float(np.median([relative_regret([of]) for of in traces])),
                "jobs": len(jobs),
                "runs": given.runs,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
