"""What an epoch takes the coordinator, and what it saves, with many keys and with many communicators that are gone.

python benchmarks/state.py OUT.json [--keys 1000] [--dead 300]
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, action_of
from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.actors.messages import COLLECTIVE_DTYPE, CommContext, CommReport, EpochContext, Member, RankNews
from dynamiccl_ray.actors.overview import status_of
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.control.agreement import Answer
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.keys import N_KEYS
from dynamiccl_ray.knobs import N_PAIRS
from dynamiccl_ray.plugin_bridge.bench import hardware

RANKS = 2


class Counting:
    """A store that knows how much was put into it."""

    def __init__(self) -> None:
        self.put_bytes: list[int] = []

    def put(self, key: str, value: bytes) -> None:
        self.put_bytes.append(len(value))

    def get(self, key: str) -> bytes | None:
        return None


class Run:
    """A coordinator with one runner; every key of every communicator runs ``per_epoch`` times in an epoch."""

    def __init__(self, comms: int, keys: int, per_epoch: int = 4) -> None:
        self.store = Counting()
        experiment = Online.model_validate({"name": "state", "fabric": {"kind": "nccl"}})
        self.core = Coordinator(Plan(run="state", experiment=experiment), self.store)
        self._comms, self._keys, self._per_epoch = comms, keys, per_epoch
        self._rng, self._dseq, self._first = np.random.default_rng(0), 0, 1
        self._join()

    def _join(self) -> None:
        members = [
            Member(
                comm=self._first + c,
                rank=rank,
                ranks=RANKS,
                nodes=1,
                tuner_abi=6,
                profiler_abi=6,
                user_env=False,
                term=self.core.term,
            )
            for c in range(self._comms)
            for rank in range(RANKS)
        ]
        gone = frozenset((c, rank) for c in range(1, self._first) for rank in range(RANKS))
        self.core.join("runner", members, gone)

    def replace(self) -> None:
        """The job destroys its communicators and makes new ones."""
        self._first += self._comms
        self._join()

    def epoch(self) -> tuple[float, int]:
        """Seconds that it took, with the table, the next context and the status; bytes that every runner is sent."""
        began = time.perf_counter()
        reports = [self._report(self._first + c) for c in range(self._comms)]
        self._dseq += self._keys * self._per_epoch
        context = self.core.report("runner", self.core.phases.epoch, reports, None)
        status_of(self.core)
        took = time.perf_counter() - began
        return took, len(pickle.dumps(context))

    def _report(self, comm: int) -> CommReport:
        context: EpochContext = self.core.context
        its = next((of for of in context.comms if of.comm == comm), None)
        decided = np.zeros(0, np.int64)
        if its is not None and len(its.due.row):
            decided = its.due.actions(self._rng.integers(1, N_PAIRS, int(its.due.draw.sum())) * N_CHANNELS * N_CHUNKS)
            self._commit(its, context.version, decided)
        keys = np.sort(np.random.default_rng(comm).choice(N_KEYS, self._keys, replace=False))
        n = self._keys * self._per_epoch
        ran = np.zeros(n, COLLECTIVE_DTYPE)
        ran["key"] = np.repeat(keys, self._per_epoch)
        ran["dseq"] = self._dseq + 1 + np.arange(n)
        ran["least_ns"] = ran["most_ns"] = self._rng.lognormal(11, 0.1, n)
        ran["bytes"], ran["ranks"] = 1 << 20, RANKS
        ran["version"] = 0 if its is None else self.core.comms[comm].version
        new = its is None or not len(its.keys)
        return CommReport(
            comm=comm,
            collectives=ran,
            unmatched=0,
            decided=decided,
            refused={},
            costs={int(key): np.full((7, 3), 10.0, np.float32) for key in keys} if new else {},
            max_channels=16,
            ranks={rank: RankNews(fingerprints={}, dropped=0, unused=0) for rank in range(RANKS)},
        )

    def _commit(self, its: CommContext, version: int, decided: Int64) -> None:
        actions = its.wanted.copy()
        actions[its.due.row] = decided
        of_keys = {int(key): action_of(int(flat)) for key, flat in zip(its.keys, actions, strict=True) if flat}
        table = DecisionTable.of(version, of_keys, max_channels=16)
        for rank in range(RANKS):
            answer = Answer(rank=rank, digest=table.digest, hold_at=self._dseq)
            self.core.promise("runner", its.comm, version, [answer], table.to_bytes(), self.core.term)


def measure(comms: int, keys: int, *, dead: int = 0, epochs: int = 64) -> dict[str, Any]:
    """Medians over the second half of so many epochs; ``dead`` communicators were there before."""
    run = Run(comms, keys)
    for _ in range(dead // comms):
        for _ in range(4):
            run.epoch()
        run.replace()
    said = [run.epoch() for _ in range(epochs)][epochs // 2 :]
    saved = len(run.store.put_bytes)
    began = time.perf_counter()
    run.core.save()
    return {
        "communicators": comms,
        "keys_each": keys,
        "dead_before": dead,
        "epoch_ms": 1e3 * statistics.median(took for took, _ in said),
        "context_kib": statistics.median(size for _, size in said) / 1024,
        "saves": saved,
        "save_ms": 1e3 * (time.perf_counter() - began),
        "state_kib": run.store.put_bytes[-1] / 1024,
        "communicators_known": len(run.core.comms),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--dead", type=int, default=300)
    asked = parser.parse_args()
    result = {
        "few": measure(2, 10),
        "many_keys": measure(1, asked.keys),
        "many_communicators": measure(100, 10),
        "many_dead": measure(2, 10, dead=asked.dead),
        "hardware": hardware(),
    }
    asked.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
