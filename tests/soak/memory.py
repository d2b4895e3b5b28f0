"""Memory and open files of the control plane beside jobs that come and go.

    PYTHONPATH=tests:tests/soak python tests/soak/memory.py OUT.json [--jobs 50] [--collectives 200000]

One control plane serves one job after the other under one job id, as a job that is restarted. Each has four
communicators that no job before had. What each process takes is read after every job.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from attached import training
from growth import use_of
from plane import Planes

COMMS, SIZES = 4, (1 << 14, 1 << 18, 1 << 22)
RANKS = 2
WATCHED = ("driver", "coordinator", "runner", "gcs")


def _settings(job: str, seed: int) -> dict[str, object]:
    return {
        "name": "memory",
        "job": job,
        "seed": seed,
        "policy": "default",
        "fabric": {"kind": "nccl", "intra": "pcie", "inter": "tcp"},
    }


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
    with tempfile.TemporaryDirectory() as kept:
        directory = Path(kept)
        planes = Planes(directory, job, 0, serial=False, settings=_settings)
        planes.start(resume=False)
        try:
            done = 0
            for number in range(given.jobs):
                steps = given.collectives // (COMMS * len(SIZES))
                comms = range(COMMS * number, COMMS * (number + 1))
                with training(
                    job, directory / f"job{number}", nodes=1, ranks_per_node=RANKS, comms=comms, sizes=SIZES,
                    rate_hz=given.rate_hz,
                ) as trained:  # fmt: skip
                    trained.start()
                    trained.await_ranks()
                    while trained.progress().min() < steps:
                        trained.check()
                        if not planes.up:
                            raise SystemExit("the control plane has ended")
                        time.sleep(0.1)
                    trained.stop()
                done += steps * COMMS * len(SIZES)
                row: dict[str, Any] = {
                    "communicators": COMMS * (number + 1),
                    "collectives": done,
                    "seconds": time.monotonic() - began,
                }
                parts = planes.parts()
                for part in WATCHED:
                    uses = [use for pid in parts.get(part, []) if (use := use_of(pid)) is not None]
                    row[part] = {"rss_mib": sum(use.rss_mib for use in uses), "files": sum(use.files for use in uses)}
                rows.append(row)
                print(json.dumps(row), flush=True)
        finally:
            planes.end(60.0)
            planes.kill()
    given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
