"""Memory and open files of the control plane beside jobs that come and go.

    PYTHONPATH=.:tests:tests/soak python tests/soak/memory.py OUT.json [--jobs 50] [--collectives 200000]

One control plane serves one job after the other under one job id, as a job that is restarted. Each has four
communicators that no job before had, and begins once its ranks are served. What each process takes is read at the end
of every job.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from attached import training
from growth import use_of
from plane import Planes
from rich.console import Console
from rich.table import Table

from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING, NcclJob
from dynamiccl_ray.plugin_bridge.segments import claimed_by, segments

COMMS, SIZES = 4, (1 << 14, 1 << 18, 1 << 22)
RANKS = 2
WATCHED = ("driver", "coordinator", "runner", "gcs")
USES = ("rss_mib", "own_mib", "files")
POLL_S = 0.1


def _settings(job: str, seed: int) -> dict[str, object]:
    return {
        "name": "memory",
        "job": job,
        "seed": seed,
        "policy": "default",
        "fabric": {"kind": "nccl", "intra": "pcie", "inter": "tcp"},
    }


class Jobs:
    """One after the other; the next one is there before the last one goes, for a run ends with its job."""

    def __init__(self, job: str, directory: Path, planes: Planes, rate_hz: float) -> None:
        self._job, self._directory, self._planes, self._rate_hz = job, directory, planes, rate_hz
        self._before = contextlib.ExitStack()

    def run(self, number: int, steps: int) -> None:
        """The next one, for so many steps; it stays."""
        with contextlib.ExitStack() as stack:
            comms = range(COMMS * number, COMMS * (number + 1))
            directory = self._directory / f"job{number}"
            job = stack.enter_context(
                training(
                    self._job, directory, nodes=1, ranks_per_node=RANKS, comms=comms, sizes=SIZES, rate_hz=self._rate_hz
                )
            )
            stack.callback(job.stop)
            job.set_credit(0)
            job.start()
            job.await_ranks()
            before, self._before = self._before, stack.pop_all()
            before.close()
            if not self._planes.up and not number:
                self._planes.start(resume=False)
            self._await(job, lambda: all(claimed_by(path) is not None for path in segments(self._job)))
            job.set_credit(FREE_RUNNING)
            self._await(job, lambda: job.progress().min() >= steps)

    def _await(self, job: NcclJob, done: Any) -> None:
        while not done():
            job.check()
            if not self._planes.up:
                print(f"the control plane has ended:\n{self._planes.last_words()}", file=sys.stderr, flush=True)
                raise SystemExit(1)
            time.sleep(POLL_S)

    def close(self) -> None:
        self._before.close()


def look(planes: Planes) -> dict[str, dict[str, float]]:
    """What the parts of the control plane take."""
    parts = planes.parts()
    uses = {part: [use for pid in parts.get(part, []) if (use := use_of(pid)) is not None] for part in WATCHED}
    return {part: {name: sum(getattr(use, name) for use in of) for name in USES} for part, of in uses.items()}


def show(rows: list[dict[str, Any]]) -> None:
    """What every part has that nobody else does, and by how much that grew in the last half."""
    table = Table(title="MiB of each process's own")
    for name in ("communicators", "collectives", "s", *WATCHED):
        table.add_column(name, justify="right")
    for row in rows:
        own = [f"{row[part]['own_mib']:.1f}" for part in WATCHED]
        table.add_row(str(row["communicators"]), f"{row['collectives']:,}", f"{row['seconds']:.0f}", *own)
    half = rows[len(rows) // 2 :]
    if len(half) > 2:
        for what, by in (("a job", COMMS), ("a million collectives", 1e6)):
            at = np.array([row["communicators" if by == COMMS else "collectives"] for row in half]) / by
            slopes = [np.polyfit(at, [1024 * row[part]["own_mib"] for row in half], 1)[0] for part in WATCHED]
            table.add_row("last half:", f"KiB for {what}", "", *(f"{slope:+.0f}" for slope in slopes))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--collectives", type=int, default=200_000, help="of each job")
    parser.add_argument("--rate-hz", type=float, default=3000.0, help="steps of each job, of 12 collectives")
    given = parser.parse_args()
    job = f"memory-{uuid.uuid4().hex[:8]}"
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    steps = given.collectives // (COMMS * len(SIZES))
    with tempfile.TemporaryDirectory() as kept:
        planes = Planes(Path(kept), job, 0, serial=False, settings=_settings)
        jobs = Jobs(job, Path(kept), planes, given.rate_hz)
        try:
            for number in range(given.jobs):
                jobs.run(number, steps)
                counts = {"communicators": COMMS * (number + 1), "collectives": given.collectives * (number + 1)}
                rows.append({**counts, "seconds": time.monotonic() - began, **look(planes)})
                given.out.write_text(json.dumps(rows, indent=1) + "\n")
                print(json.dumps(rows[-1]), flush=True)
        finally:
            jobs.close()
            planes.end(60.0)
            planes.kill()
    show(rows)


if __name__ == "__main__":
    main()
