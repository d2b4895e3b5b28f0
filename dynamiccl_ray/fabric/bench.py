"""``dynamiccl bench fabric``: how many configurations a second the physical model prices, and in how much memory."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import Collective

_CLUSTER: Final = "dgx-h100-ndr-sharp"
_NODES: Final = 8
_BATCH: Final = 1_000_000
_MEMORY_BATCHES: Final = (100_000, 1_000_000, 4_000_000)
_LOOP: Final = 1_000
_REPEATS: Final = 7


def bench_fabric() -> dict[str, Any]:
    """Configurations a second on one core, over random sizes, channels and pairs of all collectives that exist.

    ``configurations_per_s`` is the median of repeats over one batch; ``loop_per_s`` prices one at a time in the same
    run. ``memory`` has, by batch size, the bytes of the answer and the peak of what was allocated beside it, which
    must not grow with the batch.
    """
    physics = Physics(find_cluster(_CLUSTER), _NODES)
    rng = np.random.default_rng(0)
    batch = _configurations(physics, rng, _BATCH)
    some = np.stack(batch, -1)[:_LOOP].tolist()
    vectorised = [_seconds(lambda: physics.price_us(*batch)) for _ in range(_REPEATS)]
    looped = [_seconds(lambda: [physics.price_us(*one) for one in some]) for _ in range(_REPEATS)]
    per_s, loop_per_s = _BATCH / np.median(vectorised), _LOOP / np.median(looped)
    return {
        "cluster": _CLUSTER,
        "nodes": _NODES,
        "batch": _BATCH,
        "repeats": _REPEATS,
        "configurations_per_s": float(per_s),
        "slowest_per_s": _BATCH / max(vectorised),
        "loop_per_s": float(loop_per_s),
        "ratio": float(per_s / loop_per_s),
        "memory": [_memory(physics, rng, size) for size in _MEMORY_BATCHES],
        "cores": os.cpu_count(),
    }


def _configurations(physics: Physics, rng: np.random.Generator, n: int) -> tuple[NDArray[np.int64], ...]:
    """Collective, bytes, algorithm, protocol and channels; (n,) each, only what the cluster can do."""
    exists = np.array([physics.belief.cost_table_us(c, 1 << 20) >= 0 for c in Collective])
    collective, algorithm, protocol = np.argwhere(exists)[rng.integers(exists.sum(), size=n)].T.copy()
    nbytes = np.exp2(rng.uniform(10, 32, n)).astype(np.int64)
    return collective, nbytes, algorithm, protocol, rng.integers(1, 33, n)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _memory(physics: Physics, rng: np.random.Generator, n: int) -> dict[str, int]:
    batch = _configurations(physics, rng, n)
    tracemalloc.start()
    try:
        times = physics.price_us(*batch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return {"batch": n, "answer_bytes": times.nbytes, "peak_extra_bytes": peak - times.nbytes}
