"""Where the shipped policy loses time on the held-out clusters: what each key was doing while it lost it.

    python benchmarks/where.py OUT.json [--scenarios 6] [--seed 1]

Regret as ``described.py`` has it, each job with the model of its cluster, in per cent of the best possible time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
from described import CURRICULUM, jobs

from dynamiccl_ray.agent import policy
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.baselines.learned import LearnedPolicy
from dynamiccl_ray.baselines.run import run
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.config.experiment import DEFAULT_POLICY
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.cores import one_core
from dynamiccl_ray.evaluation.measures import Procedure
from dynamiccl_ray.evaluation.suite import horizon_of
from dynamiccl_ray.simulation.scenario import Scenario

DOING: Final = (
    "learning, before the first change", "exploiting, before it",
    "not noticed yet", "checking", "checked, and stood",
    "measuring NCCL's own choice anew", "drawing anew", "comparing anew", "exploiting what was learned anew",
)  # fmt: skip


class _Watched(LearnedPolicy):
    """Says before each collective what every key is doing."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator, said: list[Int64], **of: Any) -> None:
        super().__init__(scenario, rng, **of)
        self._starts, self._said = scenario.starts.tolist(), said
        self._look()

    def _look(self) -> None:
        self._shifts, self._checked = self.loop.shifts.copy(), np.zeros(len(self.loop), np.bool_)

    def choose(self, step: int) -> Int64:
        if step in self._starts:
            self._look()
        self._said.append(self._doing(changed=step >= self._starts[1]))
        return super().choose(step)

    def _doing(self, *, changed: bool) -> Int64:
        loop = self.loop
        exploits, draws = loop.phase == Phase.EXPLOIT, loop.decisions <= loop.draws()
        if not changed:
            return np.where(exploits, 1, 0)
        self._checked |= loop.phase == Phase.CHECK
        as_before = np.where(exploits & self._checked, 4, 2)
        anew = np.where(exploits, 8, np.where(draws, 6, 7))
        out = np.where(loop.shifts > self._shifts, anew, as_before)
        out[loop.phase == Phase.CHECK], out[loop.phase == Phase.BASELINE] = 3, 5
        return out


def lost(scenario: Scenario, control: Control, steps: int) -> list[float]:
    """Of one job, by ``DOING``."""
    one_core()
    said: list[Int64] = []
    trace = run(scenario, partial(_Watched, said=said, net=policy.load(DEFAULT_POLICY), control=control), steps, seed=0)
    best = scenario.oracle_us[trace.phases]
    share = 100 * (trace.clean_us - best) * scenario.weight / float((best @ scenario.weight).sum())
    return [float(x) for x in np.bincount(np.stack(said).ravel(), share.ravel(), len(DOING))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--scenarios", type=int, default=6, help="half as many of each cluster")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    procedure, control = Procedure(runs=1), load_curriculum(CURRICULUM).control
    told: Sequence[Scenario] = jobs(False, given.scenarios, horizon_of(procedure), given.seed)["right"]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        rows = list(pool.map(partial(lost, control=control, steps=procedure.steps), told))
    mean = np.mean(rows, 0)
    document = {"jobs": len(told), "regret": float(mean.sum()), **dict(zip(DOING, mean.tolist(), strict=True))}
    given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
