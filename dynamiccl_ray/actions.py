"""Actions: indices into the three heads, as one number, and as a decision table holds them.

A flat action numbers (pair, channels, chunk) as the heads count them, chunk fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.keys import bytes_name
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_PAIRS, OWN_PAIR, Carrier, pair_name

N_CHANNELS: Final = len(CHANNEL_VALUES)
N_CHUNKS: Final = len(CHUNK_VALUES)
N_ACTIONS: Final = N_PAIRS * N_CHANNELS * N_CHUNKS
OWN_ACTION: Final = 0
"""The flat action that leaves everything to NCCL."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """One decision: indices into the heads of ``dynamiccl_ray.knobs``. The default leaves everything to NCCL."""

    path: Carrier = Carrier.NCCL
    pair: int = OWN_PAIR
    channels: int = 0
    chunk: int = 0

    @property
    def flat(self) -> int:
        """Its number among flat actions."""
        return (self.pair * N_CHANNELS + self.channels) * N_CHUNKS + self.chunk

    @property
    def name(self) -> str:
        """``tree/ll 4ch chunk 64KiB``; what is NCCL's own is left out."""
        parts = [pair_name(self.pair)]
        if self.channels:
            parts.append(f"{CHANNEL_VALUES[self.channels]}ch")
        if self.chunk:
            parts.append(f"chunk {bytes_name(CHUNK_VALUES[self.chunk])}")
        return " ".join(parts)


def flat_action(pair: ArrayLike, channels: ArrayLike, chunk: ArrayLike) -> Int64:
    """The flat action of indices into the three heads, of their broadcast shape."""
    pairs, counts, chunks = (np.asarray(index, np.int64) for index in (pair, channels, chunk))
    return np.asarray((pairs * N_CHANNELS + counts) * N_CHUNKS + chunks)


def action_parts(flat: ArrayLike) -> tuple[Int64, Int64, Int64]:
    """(pair, channels, chunk) indices of flat actions: the inverse of ``flat_action``."""
    rest, chunk = np.divmod(np.asarray(flat, np.int64), N_CHUNKS)
    pair, channels = np.divmod(rest, N_CHANNELS)
    return pair, channels, chunk


def action_of(flat: int) -> Action:
    """A flat action as a decision table holds it."""
    pair, channels, chunk = action_parts(flat)
    return Action(pair=int(pair), channels=int(channels), chunk=int(chunk))
