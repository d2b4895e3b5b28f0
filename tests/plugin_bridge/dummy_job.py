"""Jobs on the emulated NCCL whose plugin does nothing but check what it is told, and count it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rig import MIB, Play, belief_of, play

from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob

MakeJob = Callable[..., NcclJob]
PLAIN = belief_of("dgx-a100-hdr")
"""Rings and trees alone."""
PAIR = ((Collective.ALL_REDUCE, MIB), (Collective.ALL_REDUCE, 16 * MIB))


def dummy_play(calls: Any = PAIR, **changes: Any) -> Play:
    return play(calls, **{"belief": PLAIN, "places": (0, 5), "us": 100.0, **changes})


def run(job: NcclJob) -> None:
    job.start()
    job.wait(30)


def summary(job: NcclJob, directory: Path, process: int = 0) -> Counter[str]:
    """What the plugin counted."""
    lines = (line.split() for line in (directory / f"summary.{job.pids()[process]}").read_text().splitlines())
    return Counter({name: int(value) for name, value in lines})


def violations(count: Counter[str]) -> dict[str, int]:
    return {name: n for name, n in count.items() if name.startswith("bad_") or name == "late_profiler_init"}
