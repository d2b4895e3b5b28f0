"""Memory of Ray's actors that do nothing but answer, with nothing of ours: what of a control plane's growth is Ray's.

    python tests/soak/ray_alone.py SECONDS

One actor makes calls of another, an asyncio one, as a runner of the coordinator. What each process has of its own, and
of what it shares, is printed in MiB.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

LOOKS = 12
CALLS_A_ROUND = 16


def use() -> tuple[float, float]:
    """Own and shared MiB of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    own, shared = (int(status[name].split()[0]) / 1024 for name in ("RssAnon", "RssShmem"))
    return round(own, 1), round(shared, 1)


class Asked:
    """Keeps nothing."""

    async def report(self, measured: Any) -> Any:
        return np.zeros(2000)

    async def others_done(self) -> None:
        await asyncio.sleep(0.05)

    async def use(self) -> tuple[float, float]:
        return use()


class Asks:
    """Makes two calls at once, and waits for one."""

    def __init__(self, asked: Any) -> None:
        self._asked = asked
        self._chance = np.random.default_rng(0)

    def round(self) -> None:
        for _ in range(CALLS_A_ROUND):
            self._asked.others_done.remote().future()
            measured = np.zeros((self._chance.integers(200, 6000), 5))
            ray.get(self._asked.report.remote(measured))

    def use(self) -> tuple[float, float]:
        return use()


def main(seconds: float) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, _system_config={"task_events_report_interval_ms": 0})
    asked = ray.remote(Asked).options(num_cpus=0, max_concurrency=1000).remote()
    asks = ray.remote(Asks).options(num_cpus=0).remote(asked)
    began, looks, reports = time.monotonic(), 0, 0
    while looks <= LOOKS:
        ray.get(asks.round.remote())
        reports += CALLS_A_ROUND
        if time.monotonic() >= began + looks * seconds / LOOKS:
            looks += 1
            told = dict(zip(("asked", "asks"), ray.get([asked.use.remote(), asks.use.remote()]), strict=True))
            print({"reports": reports, "driver": use(), **told}, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
