"""How long after ``dynamiccl off`` every rank is back on NCCL's own choice, beside a run that learns.

    PYTHONPATH=.:tests:tests/soak python tests/soak/off.py OUT.json [--rounds 20] [--nccl TREE_OR_TARBALL]

From the start of the command, Python's own start included, to the last rank's first call without our table, read from
the segments 250 times a second. Then the run is made active again, until every rank has a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
from plane import Planes, experiment
from soak import Training

from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.segments import segments

LIMIT_S = 120.0


def settings(job: str, seed: int) -> dict[str, object]:
    """A run as people have it: learning, with its usual epochs."""
    return {"name": "off", "policy": "default"} | {k: experiment(job, seed)[k] for k in ("job", "seed", "fabric")}


def _waited(done: Callable[[], bool], began: float) -> float:
    """Seconds since then."""
    while not done():
        if time.monotonic() > began + LIMIT_S:
            raise SystemExit(f"nothing came of it within {LIMIT_S:.0f} s")
        time.sleep(0.004)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rate", type=float, default=30.0, help="steps a second")
    parser.add_argument("--nccl", type=Path)
    given = parser.parse_args()
    job, directory = f"off_{uuid.uuid4().hex[:8]}", Path(tempfile.mkdtemp(prefix="dynamiccl-off-"))
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    planes = Planes(directory, job, 0, serial=False, settings=settings)
    training = Training(directory, job, given.rate, given.nccl, in_band=False)

    def command(*words: str) -> dict[str, object]:
        said = subprocess.run(
            [sys.executable, "-m", "dynamiccl_ray.cli", *words, "--job", job, "--json"],
            stdout=subprocess.PIPE,
            check=True,
        )
        return dict(json.loads(said.stdout))

    took, said_s, returned = [], [], []
    try:
        channels = [Channel(path, claim=False) for path in segments(job)]

        def tuned() -> list[bool]:
            tables = [channel.table for channel in channels]
            return [table is not None and bool((table.flat() != 0).any()) for table in tables]

        planes.start(resume=False)
        for _ in range(given.rounds):
            _waited(lambda: all(tuned()), time.monotonic())
            began = time.monotonic()
            with subprocess.Popen(
                [sys.executable, "-m", "dynamiccl_ray.cli", "off", "--job", job, "--json"], stdout=subprocess.PIPE
            ) as off:
                took.append(_waited(lambda: not any(tuned()), began))
                assert off.stdout is not None
                document = json.loads(off.stdout.read())
            returned.append(time.monotonic() - began)
            said_s.append(document["seconds"])
            print(f"{took[-1]:.2f} s, of which the run took {said_s[-1]:.2f} s", file=sys.stderr, flush=True)
            command("mode", "active")
    finally:
        planes.kill()
        training.kill()
    columns = {"in_force_everywhere_s": took, "said_s": said_s, "returned_s": returned}
    document = {
        "segments": len(channels),
        "nccl": given.nccl.name if given.nccl else None,
        **columns,
        **{f"{name} p50, worst": [float(np.median(of)), max(of)] for name, of in columns.items()},
    }
    given.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
