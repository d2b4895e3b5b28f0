"""Rows that are artefacts of a measurement: a size that takes longer than a larger one under the same setting."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.calibration.samples import Machine

# Repeats differ by some per cent; connection set-up and cold starts by much more.
_FALL: Final = 1.2


def spikes(machine: Machine) -> NDArray[np.bool_]:
    """(rows,) where the algorithm or protocol was forced and time falls by more than a fifth as bytes grow.

    No forced setting is faster for more bytes by itself; the runs that lead over such a size set up connections in
    it, or were disturbed. Where NCCL chose, time may fall for a reason (it changed its mind), so nothing is marked.
    """
    marked = np.zeros(len(machine), np.bool_)
    runs: dict[tuple[object, ...], list[int]] = {}
    for row, key in enumerate(
        zip(
            machine.source.tolist(),
            machine.collective.tolist(),
            machine.nodes.tolist(),
            machine.gpus_per_node.tolist(),
            machine.settings.tolist(),
            strict=True,
        )
    ):
        if machine.forced[row]:
            runs.setdefault(key, []).append(row)
    for members in runs.values():
        rows = np.array(members)
        rows = rows[np.argsort(machine.nbytes[rows], kind="stable")]
        time = machine.time_us[rows]
        least_after = np.append(np.minimum.accumulate(time[::-1])[::-1][1:], np.inf)
        marked[rows] = time > _FALL * least_after
    return marked
