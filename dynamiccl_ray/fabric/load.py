"""The state of a cluster while a collective runs: what others and faults leave of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Load:
    """Each field is a number, or an array that broadcasts with the batch that is priced under it."""

    intra_bandwidth: ArrayLike = 1.0
    """Share of the links inside a node that is left, above 0."""
    inter_bandwidth: ArrayLike = 1.0
    """Share of the network that is left, above 0."""
    intra_latency: ArrayLike = 1.0
    """Factor on a hop inside a node, above 0."""
    inter_latency: ArrayLike = 1.0
    """Factor on a hop between nodes, above 0."""
    straggler: ArrayLike = 1.0
    """How much longer the slowest rank takes for its own work (hops and copies), at least 1."""
    loss: ArrayLike = 0.0
    """Share of the network's packets that are lost and sent again, from 0 to below 1."""

    def __post_init__(self) -> None:
        """Raise ValueError on a number out of its range."""
        for field in fields(self):
            value = np.asarray(getattr(self, field.name), np.float64)
            least, most, words = _RANGES.get(field.name, (0.0, np.inf, "above 0, 1 for no change"))
            wrong = ~((value > least) | ((value == least) & (field.name in _RANGES))) | ~(value < most)
            if np.any(wrong):
                raise ValueError(f"{field.name} is {value[wrong].flat[0]:g}; it must be {words}")


_RANGES: Final = {
    "straggler": (1.0, np.inf, "at least 1"),
    "loss": (0.0, 1.0, "at least 0 and below 1"),
}

IDLE: Final = Load()
