"""The shipped policy beside a job and in the evaluation, on the same measured tables, after as many collectives.

    python benchmarks/warm_start.py OUT.json [--seeds 3]

What is in force when a key has been measured so often is priced without noise, over the best static choice of the key;
geometric mean over keys. Beside a job all but the times is real: processes that load the plugin, the channel,
agreement, PPO's updates.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.actions import flat_action
from dynamiccl_ray.agent import policy
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.baselines.run import run
from dynamiccl_ray.config.experiment import DEFAULT_POLICY, Online, Stop, load
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.splits import MEASURED_NODES, measured_scenario
from dynamiccl_ray.trainers.online.recorder import read_samples
from dynamiccl_ray.trainers.online.run import run_online

EXPERIMENT = Path(__file__).parents[1] / "experiments" / "online" / "p5en-warm.yaml"
AFTER = (200, 600)
"""Collectives of each key."""
OVER = 16
"""Collectives from then on."""
_ROUNDS = 45
"""Of exploitation, long enough for all of them."""

Actions = npt.NDArray[np.int64]


def beside_a_job(experiment: Online, scenario: Scenario, directory: Path) -> tuple[Actions, dict[str, Any]]:
    """(S, K) flat actions by the collective of each key, and the run's summary."""
    summary = run_online(experiment, directory, serial=True)
    samples = read_samples(directory)
    numbers = [key_of(int(c), int(b), False) for c, b in zip(scenario.collective, scenario.nbytes, strict=True)]
    actions = flat_action(*(samples[head].astype(np.int64) for head in ("pair", "channels", "chunk")))
    by_key = [actions[samples["key"] == number] for number in numbers]
    return np.stack([of[: min(map(len, by_key))] for of in by_key], -1), summary


def over_best(scenario: Scenario, actions: Actions, after: int) -> float:
    """Geometric mean over keys of the time that is spent from then on, over the best's."""
    chosen = actions[after : after + OVER]
    if len(chosen) < OVER:
        raise ValueError(f"the run ended after {len(actions)} collectives of a key; {after + OVER} are needed")
    time_us = scenario.flat_us[0, np.arange(chosen.shape[1]), chosen].mean(0)
    return float(np.exp(np.mean(np.log(time_us / scenario.oracle_us[0]))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    experiment, net, rows = load(EXPERIMENT), policy.load(DEFAULT_POLICY), []
    for nodes in MEASURED_NODES:
        scenario = measured_scenario(nodes)
        for seed in range(given.seeds):
            fabric = experiment.fabric.model_copy(update={"nodes": nodes})
            changes = {"seed": seed, "fabric": fabric, "stop": Stop(exploit_rounds_after_last_event=_ROUNDS)}
            with tempfile.TemporaryDirectory() as out:
                actions, summary = beside_a_job(experiment.model_copy(update=changes), scenario, Path(out))
            judged = run(scenario, learned(net, experiment.control), max(AFTER) + OVER, seed).actions.astype(np.int64)
            row = {
                "nodes": nodes,
                "seed": seed,
                "keys": len(scenario.nbytes),
                "job": {n: over_best(scenario, actions, n) for n in AFTER},
                "evaluation": {n: over_best(scenario, judged, n) for n in AFTER},
                "default": float(np.exp(np.mean(np.log(scenario.default_us[0] / scenario.oracle_us[0])))),
                "alarms": len(summary["alarms"]),
                "agreement_violations": summary["agreement_violations"],
                "seconds": summary["seconds"],
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
