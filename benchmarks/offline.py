"""Whether a policy that was trained from recorded runs is better on another number of nodes than the one that ships.

    python benchmarks/offline.py OUT.json [--seeds 3] [--kept DIR]

Serial runs on the measured tables of one number of nodes, from the shipped policy, are recorded. From that policy and
what they recorded others are trained. All play on the other numbers of nodes, as in ``second_run.py``, with the same
seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.second_run import EXPERIMENT, played
from dynamiccl_ray.config.experiment import DEFAULT_POLICY, Stop, load
from dynamiccl_ray.trainers.offline import Method
from dynamiccl_ray.trainers.offline.run import POLICY, run_offline

RECORDED: Final = (8, 16)
JUDGED: Final = (4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kept", type=Path, help="where the trained policies stay")
    given = parser.parse_args()
    changes = {"job": "offline-benchmark", "stop": Stop(exploit_rounds_after_last_event=1)}
    experiment = load(EXPERIMENT).model_copy(update=changes)
    seeds = range(given.seeds)
    rows: list[dict[str, Any]] = []

    def say(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        given.out.write_text(json.dumps(rows, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for nodes in JUDGED:
            for seed in seeds:
                regret = played(experiment, nodes, seed, work / f"{nodes}-{seed}")
                say({"policy": "shipped", "recorded": None, "nodes": nodes, "seed": seed, **regret})
        for recorded in RECORDED:
            runs = [work / f"{recorded}-{seed}" for seed in seeds]
            for method in Method:
                kept = (given.kept or work) / f"{method.value}-{recorded}"
                trained = run_offline(runs, kept, method=method, start=DEFAULT_POLICY)
                print(json.dumps({**trained, "recorded": recorded}), flush=True)
                learned = experiment.model_copy(update={"policy": kept / POLICY})
                for nodes in JUDGED:
                    for seed in seeds if nodes != recorded else ():
                        regret = played(learned, nodes, seed, work / "run")
                        say({"policy": method.value, "recorded": recorded, "nodes": nodes, "seed": seed, **regret})


if __name__ == "__main__":
    main()
