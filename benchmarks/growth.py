"""How the control plane grows with the ranks of one communicator: what an epoch takes the coordinator, and an agreement
through Ray.

    python benchmarks/growth.py OUT.json OUT.svg

A node has 8 ranks and one runner. In every epoch each key needs a decision, so that there is a new table. ``epoch_ms``
is the coordinator's CPU time: every runner's report and answers are unpacked and taken, every runner's context packed.
``agreement_ms`` is from the first answer to the last decision, through an actor, all runners at once. Both have a line
fitted to them, which is drawn up to 10,000 ranks: what lies beyond the points is on paper only.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
import ray

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, action_of
from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.actors.messages import COLLECTIVE_DTYPE, CommReport, Member, RankNews
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.control.agreement import Answer, MemoryStore
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.keys import N_KEYS
from dynamiccl_ray.knobs import N_PAIRS
from dynamiccl_ray.plugin_bridge.bench import hardware
from dynamiccl_ray.trainers.bench.activation import agreement_ms
from dynamiccl_ray.trainers.common.cluster import start_ray

RANKS: Final = (8, 16, 32, 64, 128, 256, 512, 1000)
PAPER: Final = 10_000
KEYS: Final = 20
_A_NODE: Final = 8
_COMM: Final = 1
_EPOCHS: Final = 24
_AGREEMENTS: Final = 5


class Job:
    """A coordinator, and what the runners of one communicator would send it."""

    def __init__(self, ranks: int) -> None:
        experiment = Online.model_validate({"name": "growth", "fabric": {"kind": "nccl"}})
        self.core = Coordinator(Plan(run="growth", experiment=experiment), MemoryStore())
        self._ranks = [range(first, first + _A_NODE) for first in range(0, ranks, _A_NODE)]
        self._keys = np.sort(np.random.default_rng(0).choice(N_KEYS, KEYS, replace=False))
        self._rng, self._dseq = np.random.default_rng(1), 0
        for node, mine in enumerate(self._ranks):
            members = [
                Member(
                    comm=_COMM,
                    rank=rank,
                    ranks=ranks,
                    nodes=len(self._ranks),
                    tuner_abi=6,
                    profiler_abi=6,
                    user_env=False,
                    term=self.core.term,
                )
                for rank in mine
            ]
            self.core.join(str(node), members)
        self.core.close_epoch()

    def epoch(self) -> tuple[float, int, bool]:
        """CPU seconds of the coordinator, bytes that a runner is sent, and whether a new table was agreed on."""
        (its,) = self.core.context.comms
        decided = its.due.actions(self._rng.integers(1, N_PAIRS, int(its.due.draw.sum())) * N_CHANNELS * N_CHUNKS)
        wanted = its.wanted.copy()
        wanted[its.due.row] = decided
        of_keys = {int(key): action_of(int(flat)) for key, flat in zip(its.keys, wanted, strict=True) if flat}
        version = self.core.context.version
        table = DecisionTable.of(version, of_keys, max_channels=16)
        answers, reports = [], []
        for mine in self._ranks if len(its.due.row) else ():
            of = [Answer(rank=rank, digest=table.digest, hold_at=self._dseq) for rank in mine]
            answers.append(pickle.dumps((of, table.to_bytes() if 0 in mine else None)))
        ran = self._ran(version if answers else its.version_in_force)
        for mine in self._ranks:
            reports.append(pickle.dumps(self._report(mine, ran, decided, new=not len(its.keys))))
        began = time.process_time()
        for node, raw in enumerate(answers):
            of, its_table = pickle.loads(raw)
            self.core.promise(str(node), _COMM, version, of, its_table, self.core.term)
        sent = 0
        for node, raw in enumerate(reports):
            self.core.report(str(node), self.core.phases.epoch, pickle.loads(raw), None)
        for _ in self._ranks:
            sent = len(pickle.dumps(self.core.context))
        return time.process_time() - began, sent, bool(answers)

    def _ran(self, version: int) -> Any:
        ran = np.zeros(KEYS, COLLECTIVE_DTYPE)
        ran["key"], ran["bytes"], ran["version"] = self._keys, 1 << 20, version
        ran["dseq"] = self._dseq + 1 + np.arange(KEYS)
        ran["least_ns"] = ran["most_ns"] = self._rng.lognormal(11, 0.02, KEYS)
        self._dseq += KEYS
        return ran

    def _report(self, mine: range, ran: Any, decided: Any, *, new: bool) -> list[CommReport]:
        ran["ranks"] = len(mine)
        report = CommReport(
            comm=_COMM,
            collectives=ran,
            unmatched=0,
            decided=decided,
            refused={},
            costs={int(key): np.full((7, 3), 10.0, np.float32) for key in self._keys} if new else {},
            max_channels=16,
            ranks={rank: RankNews(fingerprints={}, dropped=0, unused=0) for rank in mine},
        )
        return [report]


def measure(ranks: int) -> dict[str, Any]:
    """Medians over the second half of the epochs, and over agreements."""
    job = Job(ranks)
    said = [job.epoch() for _ in range(_EPOCHS)][_EPOCHS // 2 :]
    if not all(switched for *_, switched in said):
        raise RuntimeError("an epoch had no new table")
    return {
        "ranks": ranks,
        "epoch_ms": 1e3 * statistics.median(took for took, *_ in said),
        "context_kib": statistics.median(size for _, size, _ in said) / 1024,
        "agreement_ms": statistics.median(agreement_ms(ranks) for _ in range(_AGREEMENTS)),
    }


def line(rows: list[dict[str, Any]], of: str) -> tuple[float, float]:
    """Milliseconds at no rank and for each rank more, by least squares of relative errors."""
    ranks, ms = (np.array([row[name] for row in rows]) for name in ("ranks", of))
    slope, at_none = np.polyfit(ranks, ms, 1, w=1 / ms)
    return float(at_none), float(slope)


def plot(rows: list[dict[str, Any]], lines: dict[str, tuple[float, float]], out: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # the backend has to be chosen first

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    names = {"epoch_ms": "an epoch, CPU time of the coordinator", "agreement_ms": "an agreement, through Ray"}
    paper = np.geomspace(RANKS[0], PAPER, 50)
    for (of, name), colour in zip(names.items(), ("tab:blue", "tab:orange"), strict=True):
        axes.plot([row["ranks"] for row in rows], [row[of] for row in rows], "o", color=colour, label=name)
        at_none, slope = lines[of]
        axes.plot(paper, at_none + slope * paper, "--", color=colour, linewidth=1)
    axes.axvspan(RANKS[-1], PAPER, color="0.93", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="ranks of one communicator", ylabel="ms")
    axes.text(RANKS[-1] * 1.1, axes.get_ylim()[0] * 1.2, "on paper", color="0.4")
    axes.legend(frameon=False)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("picture", type=Path)
    asked = parser.parse_args()
    start_ray()
    rows = []
    try:
        for ranks in RANKS:
            rows.append(measure(ranks))
            print(json.dumps(rows[-1]), flush=True)
    finally:
        ray.shutdown()
    lines = {of: line(rows, of) for of in ("epoch_ms", "agreement_ms")}
    on_paper = {of: at_none + slope * PAPER for of, (at_none, slope) in lines.items()}
    result = {"keys": KEYS, "rows": rows, "on_paper": {"ranks": PAPER, **on_paper}, "hardware": hardware()}
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, lines, asked.picture)


if __name__ == "__main__":
    main()
