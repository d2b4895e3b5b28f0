"""What each piece of the control loop is worth: the shipped policy on held-out clusters, one piece changed at a time.

    python benchmarks/pieces.py OUT.json [--scenarios 4] [--runs 2]

Regret is the time above the best possible over the whole run, exploration included; the ratio is that of the last 100
collectives of each key. Every held-out cluster, three shifts of the load in every run, 2,000 collectives of each key.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.agent import policy
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.config.experiment import DEFAULT_POLICY
from dynamiccl_ray.control import loop
from dynamiccl_ray.evaluation.measures import Procedure, play, relative_regret
from dynamiccl_ray.evaluation.suite import horizon_of
from dynamiccl_ray.simulation.splits import HELD_OUT, evaluation_splits

CURRICULUM = Path(__file__).parents[1] / "experiments" / "curricula" / "default.yaml"
PIECES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "as it is": ({}, {}),
    "no heat": ({"learning": {"heat": 0.0}}, {}),
    "twice the heat": ({"learning": {"heat": 1.0}}, {}),
    "half of the draws": ({"learning": {"draws": 32}}, {}),
    "twice the draws": ({"learning": {"draws": 128}}, {}),
    "two collectives a draw": ({"learning": {"draw_samples": 2}}, {}),
    "four collectives a draw": ({"learning": {"draw_samples": 4}}, {}),
    "a quarter of the comparing": ({"learning": {"compares": 6}}, {}),
    "twice the comparing": ({"learning": {"compares": 48}}, {}),
    "nothing is ruled out by a prior": ({}, {"_TRUSTED": 0.0}),
    "no budget": ({"explore": {"max_regret": 1.0}}, {}),
    "no guardrail": ({"guardrail": {"samples": 10**6}}, {}),
    "no trigger": ({"trigger": {"arl0": 1e100}}, {}),
    "no clipping of outliers": ({}, {"_OUTLIER": np.inf}),
    "keys alarm alone": ({}, {"_AGREED": 2.0}),
    "recurrent state never begins anew": ({"learning": {"sequence": 10**6}}, {}),
}
"""Name -> settings, and constants of the loop."""


@contextmanager
def changed(constants: dict[str, float]) -> Iterator[None]:
    """Constants of the loop, for a while."""
    before = {name: getattr(loop, name) for name in constants}
    vars(loop).update(constants)
    try:
        yield
    finally:
        vars(loop).update(before)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--scenarios", type=int, default=4, help="of each held-out cluster")
    parser.add_argument("--runs", type=int, default=2)
    given = parser.parse_args()
    procedure = Procedure(runs=given.runs)
    splits = evaluation_splits(load_curriculum(CURRICULUM), 2 * given.scenarios, horizon_of(procedure), ())
    scenarios = [s for name, of in splits.items() if name.startswith(HELD_OUT) for s in of]
    net, rows = policy.load(DEFAULT_POLICY), []
    for name, (settings, constants) in PIECES.items():
        with changed(constants):
            traces = [play(s, learned(net, Control.model_validate(settings)), procedure) for s in scenarios]
        best = [[np.log(t.clean_us / t.scenario.oracle_us[t.phases])[-100:].mean() for t in of] for of in traces]
        row = {"piece": name, "regret": relative_regret(traces), "over_best": float(np.exp(np.mean(best)))}
        rows.append(row)
        print(json.dumps(row), flush=True)
    given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
