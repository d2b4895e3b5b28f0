"""What it is worth to say which cluster a job runs on, and what it costs to say another: choosers in one control loop,
policies and what does without one, on the held-out clusters or on random ones.

    python benchmarks/described.py OUT.json [--scenarios 6] [--runs 1] [--random 20] [--seed 1] [--policies ...]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dynamiccl_ray.agent import policy
from dynamiccl_ray.baselines.choosers import LastTable
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.baselines.method import Factory
from dynamiccl_ray.baselines.registry import beside
from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.config.experiment import DEFAULT_POLICY
from dynamiccl_ray.control.columns import nothing_expected
from dynamiccl_ray.evaluation.measures import Procedure, collectives_to_best, judged, regret_interval, relative_regret
from dynamiccl_ray.evaluation.players import players
from dynamiccl_ray.evaluation.suite import horizon_of
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.fabric.recognise import presets
from dynamiccl_ray.simulation.sampling import recognised_of, told_of
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.splits import HELD_OUT, evaluation_splits, random_cluster_scenarios, random_places

CURRICULUM = Path(__file__).parents[1] / "experiments" / "curricula" / "default.yaml"
WRONG: Mapping[str, str] = {
    "gh200-slingshot": "cloud-tcp",
    "l40s-pcie": "dgx-h100-ndr",
    "cloud-tcp": "gh200-slingshot",
    "hammingmesh": "ethernet-1g",
    "switchml-ethernet": "p5en-h200-efa",
}
"""By cluster another, as unlike as there is."""


def jobs(random: bool, count: int, horizon: int, seed: int | None = None) -> dict[str, list[Scenario]]:
    """By what they say of their cluster; of another ``seed`` than the curriculum's, jobs that nobody has looked at.

    Of one that says nothing, or another, NCCL's costs tell which of the presets it is like: its own is left out, for
    that it is like exactly. In the end nothing is made of these costs either.
    """
    curriculum = load_curriculum(CURRICULUM)
    if seed is not None:
        curriculum = curriculum.model_copy(update={"seed": seed})
    if not random:
        splits = evaluation_splits(curriculum, count, horizon, ())
        right = [scenario for name, of in splits.items() if name.startswith(HELD_OUT) for scenario in of]
        wrong = [told_of(scenario, find_cluster(WRONG[scenario.cluster])) for scenario in right]
    else:
        right = random_cluster_scenarios(curriculum, horizon, count)
        _, *others = (cluster for cluster, _ in random_places(curriculum, count + 1))
        wrong = [told_of(scenario, other) for scenario, other in zip(right, others, strict=True)]

    def looked_up(scenario: Scenario) -> Scenario:
        known = recognised_of(scenario, [preset for preset in presets() if preset.name != scenario.cluster])
        # It is looked up once; what is said stands where NCCL's costs say nothing else.
        return replace(known, said=None)

    return {
        "right": right,
        "wrong": [looked_up(of) for of in wrong],
        "none": [looked_up(told_of(of, None)) for of in right],
        "not even NCCL's costs": [replace(of, prior=nothing_expected(len(of.nbytes)), said=None) for of in right],
        "wrong, not even NCCL's costs": [replace(of, said=None) for of in wrong],
    }


def _by_cluster(jobs: Sequence[Scenario], traces: Sequence[Any]) -> dict[str, float]:
    """Regret of the jobs of each."""
    names = dict.fromkeys(job.cluster for job in jobs)
    return {
        name: relative_regret([t for job, t in zip(jobs, traces, strict=True) if job.cluster == name]) for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--scenarios", type=int, default=6, help="half as many of each cluster")
    parser.add_argument("--random", type=int, help="on so many random clusters instead")
    parser.add_argument("--policies", type=Path, nargs="*", default=[DEFAULT_POLICY], help="each a chooser")
    parser.add_argument("--choosers", nargs="*", default=["thompson", "uniform"], help="baselines beside them")
    parser.add_argument("--told", nargs="+", help="only these rows")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, help="of the jobs, and of the clusters where they are random")
    given = parser.parse_args()
    procedure, control = Procedure(runs=given.runs), load_curriculum(CURRICULUM).control
    told = jobs(given.random is not None, given.random or given.scenarios, horizon_of(procedure), given.seed)
    nets = {"policy" if path == DEFAULT_POLICY else path.parent.name: policy.load(path) for path in given.policies}
    rivals: dict[str, Factory] = {**beside(control), "last table": partial(LastTable, control=control)}
    choosers: dict[str, Factory] = {
        **{name: learned(net, control) for name, net in nets.items()},
        **{name: rivals[name] for name in given.choosers},
    }
    rows = []
    with players(len(os.sched_getaffinity(0))) as play_all:
        rows_of = [(what, of) for what, of in told.items() if not given.told or what in given.told]
        for (what, of), (name, factory) in itertools.product(rows_of, choosers.items()):
            traces = play_all(of, factory, procedure)
            regret = relative_regret(traces)
            end = judged(what, traces, {name: regret}, procedure)
            row = {
                "described": what,
                "chooser": name,
                "seed": given.seed,
                "regret": regret,
                "interval": regret_interval(traces),
                "of_jobs": [relative_regret([job]) for job in traces],
                "to_best": collectives_to_best(traces),
                "over_best": end["geomean_vs_oracle"],
                "worst_key_vs_default": end["worst_key_vs_default"],
                "by_cluster": _by_cluster(of, traces),
                "jobs": len(of),
                "runs": given.runs,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
