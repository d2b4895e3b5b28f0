"""What it is worth to say which cluster a job runs on, and what it costs to say another: choosers in one control loop,
policies and what does without one, on the held-out clusters or on random ones; or under noise without a change.

    python benchmarks/described.py OUT.json [--scenarios 6] [--random 20 | --noise] [--seeds 0 1] [--policies ...]
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from dynamiccl_ray.agent import policy
from dynamiccl_ray.arrays import Float64
from dynamiccl_ray.baselines.choosers import LastTable
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.baselines.method import Factory
from dynamiccl_ray.baselines.registry import beside
from dynamiccl_ray.config.curriculum import Curriculum, load_curriculum
from dynamiccl_ray.config.experiment import DEFAULT_POLICY
from dynamiccl_ray.control.columns import nothing_expected
from dynamiccl_ray.evaluation.measures import Procedure, collectives_to_best, job_regrets, judged, mean_interval
from dynamiccl_ray.evaluation.players import players, under
from dynamiccl_ray.evaluation.suite import horizon_of
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.fabric.recognise import presets
from dynamiccl_ray.simulation.sampling import recognised_of, told_of
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.splits import HELD_OUT, NOISY, evaluation_splits, random_cluster_scenarios, random_places

CURRICULUM = Path(__file__).parents[1] / "experiments" / "curricula" / "default.yaml"
WRONG: Mapping[str, str] = {
    "gh200-slingshot": "cloud-tcp",
    "l40s-pcie": "dgx-h100-ndr",
    "cloud-tcp": "gh200-slingshot",
    "hammingmesh": "ethernet-1g",
    "switchml-ethernet": "p5en-h200-efa",
}
"""By cluster another, as unlike as there is."""


def jobs(random: bool, count: int, horizon: int, seed: int = 0) -> dict[str, list[Scenario]]:
    """By what they say of their cluster; of another ``seed`` than the curriculum's, 0, jobs that nobody has looked at.

    Of one that says nothing, or another, NCCL's costs tell which of the presets it is like: its own is left out, for
    that it is like exactly. In the end nothing is made of these costs either.
    """
    curriculum = _curriculum(seed)
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
        "not even NCCL's costs": [replace(told_of(of, None), prior=nothing_expected(len(of.nbytes))) for of in right],
        "wrong, not even NCCL's costs": [replace(of, said=None) for of in wrong],
    }


def noisy_jobs(count: int, horizon: int, seed: int = 0) -> dict[str, list[Scenario]]:
    """By noise the first of ``jobs`` of each held-out cluster, in a network that never changes."""
    splits = evaluation_splits(_curriculum(seed), count, horizon, ())
    return {name: of for name, of in splits.items() if name.startswith(NOISY)}


def _curriculum(seed: int) -> Curriculum:
    curriculum = load_curriculum(CURRICULUM)
    return curriculum.model_copy(update={"seed": seed}) if seed else curriculum


def _by_cluster(jobs: Sequence[Scenario], regret: Float64) -> dict[str, float]:
    """Mean over the jobs of each."""
    names = np.array([job.cluster for job in jobs])
    return {str(name): float(regret[names == name].mean()) for name in dict.fromkeys(names)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--scenarios", type=int, default=6, help="half as many of each cluster")
    parser.add_argument("--random", type=int, help="on so many random clusters instead")
    parser.add_argument("--policies", type=Path, nargs="*", default=[DEFAULT_POLICY], help="each a chooser")
    parser.add_argument("--choosers", nargs="*", default=["thompson", "uniform"], help="baselines beside them")
    parser.add_argument("--told", nargs="+", help="only these rows")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--noise", action="store_true", help="the network never changes, under each kind of noise")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the jobs, and of random clusters")
    given = parser.parse_args()
    procedure, control = Procedure(runs=given.runs), load_curriculum(CURRICULUM).control
    horizon, random = horizon_of(procedure), given.random is not None
    sets = [
        noisy_jobs(given.scenarios, horizon, seed)
        if given.noise
        else jobs(random, given.random or given.scenarios, horizon, seed)
        for seed in given.seeds
    ]
    nets = {"policy" if path == DEFAULT_POLICY else path.parent.name: policy.load(path) for path in given.policies}
    rivals: dict[str, Factory] = {**beside(control), "last table": partial(LastTable, control=control)}
    choosers: dict[str, Factory] = {
        **{name: learned(net, control) for name, net in nets.items()},
        **{name: rivals[name] for name in given.choosers},
    }
    rows = []
    with players(len(os.sched_getaffinity(0))) as play_all:
        for what in (what for what in sets[0] if not given.told or what in given.told):
            of = [job for by_told in sets for job in by_told[what]]
            first = None
            for name, traces in play_all(of, choosers, procedure, under(print, what)).items():
                regret = job_regrets(traces)
                first = regret if first is None else first
                behind = first - regret
                end = judged(what, traces, {name: float(regret.mean())}, procedure)
                row = {
                    "described": what,
                    "chooser": name,
                    "seeds": given.seeds,
                    "regret": float(regret.mean()),
                    "interval": mean_interval(regret),
                    "median": float(np.median(regret)),
                    # The first chooser's regret less this one's, of the same jobs.
                    "first_is_behind": [float(behind.mean()), *mean_interval(behind)],
                    "of_sets": [float(each.mean()) for each in np.split(regret, len(sets))],
                    "of_jobs": regret.tolist(),
                    "to_best": collectives_to_best(traces),
                    "over_best": end["geomean_vs_oracle"],
                    "worst_key_vs_default": end["worst_key_vs_default"],
                    "by_cluster": _by_cluster(of, regret),
                    "jobs": len(of),
                    "runs": given.runs,
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
                given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
