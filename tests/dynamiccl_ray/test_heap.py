"""What was freed goes back to the system."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dynamiccl_ray.heap import trim


def _own_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def test_what_lies_between_blocks_in_use_goes_back() -> None:
    freed, kept = [], []
    for _ in range(3000):
        freed.append(np.ones(8000))
        kept.append(np.ones(100))
    before = _own_mib()
    freed.clear()
    trim()
    assert _own_mib() < before - 150
    assert len(kept) == 3000
