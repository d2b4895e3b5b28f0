"""The loop beside a job, started from the shipped policy, on measured tables of several numbers of nodes.

    python benchmarks/warm_start.py OUT.json [--seeds 3]

Each run plays every measured size in turn and decides with two collectives of a key an epoch, PPO's updates included.
What it prints is in the words of `dynamiccl online --json`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from dynamiccl_ray.experiment import load
from dynamiccl_ray.fabric.clusters import p5en_all_reduce
from dynamiccl_ray.fabric.measured import playable_keys
from trainers.online import run_online

EXPERIMENT = Path(__file__).parents[1] / "experiments" / "online" / "p5en-warm.yaml"
NODES = (4, 8, 16, 32)
PER_EPOCH = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    experiment, rows = load(EXPERIMENT), []
    for nodes in NODES:
        keys = len(playable_keys(p5en_all_reduce(nodes)))
        for seed in range(given.seeds):
            run = experiment.model_copy(
                update={
                    "seed": seed,
                    "fabric": experiment.fabric.model_copy(update={"nodes": nodes}),
                    "epochs": experiment.epochs.model_copy(update={"collectives": PER_EPOCH * keys}),
                }
            )
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as out:
                summary = run_online(run, Path(out), serial=True)
            row = {
                "nodes": nodes,
                "seed": seed,
                "keys": keys,
                "geomean_vs_oracle": summary["geomean_vs_oracle"],
                "worst_key_vs_default": max(k["learned_us"] / k["default_us"] for k in summary["keys"]),
                "collectives_per_key": summary["collectives"] / keys,
                "agreement_violations": summary["agreement_violations"],
                "seconds": time.monotonic() - began,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
