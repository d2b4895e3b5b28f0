"""A second run beside a job on the measured tables: warmed by the first, or by what is wrong.

    python benchmarks/second_run.py OUT.json [--seeds 3]

A run is warmed by one before it on the same nodes, of another seed; by a run on the other number of nodes that says it
was on these; and by the first with its times shuffled among each key's decisions. Regret is the time of each key's
first collectives, without noise, over the best static choice, less 1: geometric mean over keys. ``end`` is what is in
force when the run ends. All but the times is real, as in ``warm_start.py``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dynamiccl_ray.actions import flat_action
from dynamiccl_ray.config.experiment import Online, Stop, load
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.splits import measured_scenario
from dynamiccl_ray.trainers.online.recorder import read_samples
from dynamiccl_ray.trainers.online.run import run_online

EXPERIMENT: Final = Path(__file__).parents[1] / "experiments" / "online" / "p5en-warm.yaml"
NODES: Final = (8, 16)
FIRST: Final = 200
"""Collectives of each key over which regret is a mean."""
END: Final = 16
"""The last ones of each key."""
_GPUS: Final = 8

Actions = npt.NDArray[np.int64]


def played(experiment: Online, nodes: int, seed: int, out: Path, warm: tuple[Path, ...] = ()) -> dict[str, float]:
    """Runs to ``out``: what the run took over the best static choice, less 1, at its beginning and at its end."""
    fabric = experiment.fabric.model_copy(update={"nodes": nodes})
    run_online(experiment.model_copy(update={"seed": seed, "fabric": fabric, "warm": warm}), out, serial=True)
    scenario = measured_scenario(nodes)
    actions = _actions(scenario, out)
    return {"first": _regret(scenario, actions[:FIRST]), "end": _regret(scenario, actions[-END:])}


def relabelled(run: Path, out: Path, nodes: int) -> Path:
    """A copy of what a run decided that says it was on so many nodes."""
    table = pq.read_table(run / "decisions.parquet")
    for name, value in (("nodes", nodes), ("ranks", nodes * _GPUS)):
        at = table.column_names.index(name)
        table = table.set_column(at, table.schema.field(name), pa.array(np.full(len(table), value, np.int32)))
    return _written(table, out)


def shuffled(run: Path, out: Path) -> Path:
    """A copy with the times of each key's decisions, other than of NCCL's own choice, in another order."""
    table, rng = pq.read_table(run / "decisions.parquet"), np.random.default_rng(0)
    key, got, action = (table[name].to_numpy().copy() for name in ("key", "got_us", "action"))
    own = action == "nccl"
    for number in np.unique(key):
        rows = np.flatnonzero((key == number) & ~own)
        # The same action keeps one time, so that it looks well measured.
        names, of = np.unique(action[rows], return_inverse=True)
        mean = np.array([got[rows][of == n].mean() for n in range(len(names))])
        got[rows] = rng.permutation(mean)[of]
    at = table.column_names.index("got_us")
    return _written(table.set_column(at, table.schema.field(at), pa.array(got)), out)


def _written(table: pa.Table, out: Path) -> Path:
    folder = out / "decisions.parquet"
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "part-000000.parquet")
    return out


def _actions(scenario: Scenario, out: Path) -> Actions:
    """(S, K) flat actions by the collective of each key."""
    samples = read_samples(out)
    numbers = [key_of(int(c), int(b), False) for c, b in zip(scenario.collective, scenario.nbytes, strict=True)]
    actions = flat_action(*(samples[head].astype(np.int64) for head in ("pair", "channels", "chunk")))
    by_key = [actions[samples["key"] == number] for number in numbers]
    least = min(map(len, by_key))
    if least < FIRST:
        raise ValueError(f"the run ended after {least} collectives of a key; {FIRST} are needed")
    return np.stack([of[:least] for of in by_key], -1)


def _regret(scenario: Scenario, actions: Actions) -> float:
    time_us = scenario.flat_us[0, np.arange(actions.shape[1]), actions].mean(0)
    return float(np.exp(np.mean(np.log(time_us / scenario.oracle_us[0])))) - 1


def compared(experiment: Online, nodes: int, other: int, seed: int, first: int, work: Path) -> dict[str, Any]:
    """Runs of a seed, warmed by what cold runs of the seed ``first`` left in ``work``."""
    of, elsewhere = work / f"{nodes}-{first}", work / f"{other}-{first}"
    by = {
        "warm": of,
        "other nodes": relabelled(elsewhere, work / f"relabelled-{nodes}-{seed}", nodes),
        "shuffled": shuffled(of, work / f"shuffled-{nodes}-{seed}"),
    }
    row = {}
    for name, warm in by.items():
        row[name] = played(experiment, nodes, seed, work / "run", (warm,))
        shutil.rmtree(work / "run")
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    experiment = load(EXPERIMENT).model_copy(update={"stop": Stop(exploit_rounds_after_last_event=1)})
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # One seed more: a run is never warmed by its own.
        cold = {
            (nodes, seed): played(experiment, nodes, seed, work / f"{nodes}-{seed}")
            for seed in range(given.seeds + 1)
            for nodes in NODES
        }
        for seed in range(given.seeds):
            for nodes, other in zip(NODES, NODES[::-1], strict=True):
                warmed = compared(experiment, nodes, other, seed, seed + 1, work)
                rows.append({"nodes": nodes, "seed": seed, "cold": cold[nodes, seed], **warmed})
                print(json.dumps(rows[-1]), flush=True)
                given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
