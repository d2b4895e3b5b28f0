"""What false alarms cost: the shipped policy under noise, on networks that never change, with the trigger and without.

    python benchmarks/false_alarms.py OUT.json [--collectives 4000] [--seeds 0 21 22]

One job of each held-out cluster and seed under each noise of ``simulation/splits.py``. ``checks`` counts choices of
keys that were checked and stood, ``anew`` keys that learned anew. Regret is over the whole run; ``cost`` is what the
trigger adds to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from dynamiccl_ray.agent import policy
from dynamiccl_ray.baselines.in_loop import InLoop
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.baselines.method import Method
from dynamiccl_ray.baselines.run import run
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.config.experiment import DEFAULT_POLICY
from dynamiccl_ray.evaluation.measures import relative_regret
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.splits import NOISY, evaluation_splits

CURRICULUM: Final = Path(__file__).parents[1] / "experiments" / "curricula" / "default.yaml"
NEVER: Final = 1e100
"""Collectives to one false alarm of a trigger that does nothing."""


def played(scenario: Scenario, arl0: float, collectives: int) -> tuple[float, int, int]:
    """Regret, choices that were checked and stood, and alarms after which a key learned anew."""
    make = learned(policy.load(DEFAULT_POLICY), Control.model_validate({"trigger": {"arl0": arl0}}))
    made: list[Method] = []

    def kept(of: Scenario, rng: np.random.Generator) -> Method:
        made.append(make(of, rng))
        return made[0]

    regret = relative_regret([[run(scenario, kept, collectives, 0)]])
    (method,) = made
    assert isinstance(method, InLoop)
    return regret, method.checks, method.alarms


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--collectives", type=int, default=4000, help="of each key")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the jobs")
    given = parser.parse_args()
    curriculum = load_curriculum(CURRICULUM)
    noisy: dict[str, list[Scenario]] = {}
    for seed in given.seeds:
        splits = evaluation_splits(curriculum.model_copy(update={"seed": seed}), 2, given.collectives, ())
        for name, of in splits.items():
            if name.startswith(NOISY):
                noisy.setdefault(name, []).extend(of)
    rows = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        for name, of in noisy.items():
            both = [
                list(pool.map(played, of, itertools.repeat(arl0), itertools.repeat(given.collectives)))
                for arl0 in (curriculum.control.trigger.arl0, NEVER)
            ]
            (regret, checks, anew), (without, *_) = (np.transpose(one) for one in both)
            row = {
                "noise": name,
                "jobs": len(of),
                "collectives": given.collectives * sum(len(s.nbytes) for s in of),
                "checks": int(checks.sum()),
                "anew": int(anew.sum()),
                "regret": float(regret.mean()),
                "cost": float((regret - without).mean()),
                "most": float((regret - without).max()),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
            given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
