"""The job that is attacked: eight ranks, a process each, on the emulated NCCL or on NCCL's own host code.

    python job.py DIRECTORY JOB RATE [--nccl SOURCES] [--in-band]

Runs until its standard input ends. Writes ``up.json`` once every rank has its communicators, and ``result.json``, from
the log of what was used, at the end. The attacker leaves this process and its ranks alone.
"""

from __future__ import annotations

import argparse
import json
import select
import sys
import time
from pathlib import Path

import numpy as np
from attached import training

from dynamiccl_ray.config.fabrics import RealNcclFabric
from dynamiccl_ray.plugin_bridge.boundary import Boundary
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob, agreement_violations
from dynamiccl_ray.plugin_bridge.program import SEND_RECV
from dynamiccl_ray.plugin_bridge.real_job import real_job
from dynamiccl_ray.plugin_bridge.segments import segment_pid, segments

NODES, RANKS_PER_NODE = 2, 4
SIZES = (1 << 14, 1 << 20)


def made(directory: Path, job: str, rate_hz: float, nccl: Path | None) -> NcclJob:
    if nccl is None:
        return training(job, directory, nodes=NODES, ranks_per_node=RANKS_PER_NODE, sizes=SIZES, rate_hz=rate_hz)
    calls = {"collective": "all_reduce", "sizes_bytes": SIZES}
    fabric = RealNcclFabric.model_validate(
        {
            "kind": "real_nccl",
            "nccl": str(nccl),
            "cluster": "dgx-a100-hdr",
            "nodes": NODES,
            "ranks_per_node": RANKS_PER_NODE,
            "steps_per_s": rate_hz,
            "compute_us": 0.0,
            "groups": [{"name": name, "of": "world", "step": [calls]} for name in ("world", "other")],
        }
    )
    return real_job(fabric, seed=0, say=lambda said: print(said, file=sys.stderr)).job(job, directory)


class Steps:
    """The ends of the steps of all ranks, in band. The ranks of this job are C, so this process serves their
    boundaries: it lets each rank take a step, and reduces in memory what gloo would. The rest is as in a script."""

    def __init__(self, job: NcclJob, name: str, rate_hz: float) -> None:
        self._job, self._period_s = job, 1 / rate_hz if rate_hz else 0.0
        by_rank: dict[int, list[Channel]] = {}
        for path in segments(name):
            by_rank.setdefault(segment_pid(path), []).append(Channel(path, claim=False))
        self._boundaries = [Boundary() for _ in by_rank]
        for boundary, channels in zip(self._boundaries, by_rank.values(), strict=True):
            boundary.serve(channels)
        self._asked = False

    def step(self) -> None:
        began = time.monotonic()
        credit = self._job.add_credit(1)
        while self._job.progress().min() < credit or set(self._job.states()) - {"waiting", "finished"}:
            self._job.check()
            time.sleep(0.0002)
        if self._asked:
            least = np.min([boundary.words for boundary in self._boundaries], axis=0)
            for boundary in self._boundaries:
                boundary.words[:] = least
                if boundary.take():
                    raise RuntimeError("boundaries that are the same on all ranks were found out of step")
        for boundary in self._boundaries:
            boundary.bring()
        self._asked = True
        time.sleep(max(0.0, began + self._period_s - time.monotonic()))


def result(job: NcclJob) -> dict[str, object]:
    """What the ranks did, by their own log: calls by communicator and rank, collectives that two ran differently."""
    log = job.logs()
    collectives = log[log["func"] != SEND_RECV]
    places, calls = np.unique(collectives[["comm", "rank"]], return_counts=True)
    return {
        "violations": agreement_violations(log),
        "calls": [[int(comm), int(rank), int(n)] for (comm, rank), n in zip(places, calls, strict=True)],
        "codes": job.returncodes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("job")
    parser.add_argument("rate", type=float)
    parser.add_argument("--nccl", type=Path)
    parser.add_argument("--in-band", action="store_true")
    told = parser.parse_args()
    with made(told.directory / "job", told.job, 0.0 if told.in_band else told.rate, told.nccl) as job:
        if told.in_band:
            job.set_credit(0)
        job.start()
        job.await_ranks()
        steps = Steps(job, told.job, told.rate) if told.in_band else None
        (told.directory / "up.json").write_text(json.dumps(job.pids()))
        while not select.select([sys.stdin], [], [], 0 if steps else 0.2)[0]:
            job.check()
            if steps:
                steps.step()
        job.stop()
        (told.directory / "result.json").write_text(json.dumps(result(job)))


if __name__ == "__main__":
    main()
