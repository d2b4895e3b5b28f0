"""What may be asked for: what an experiment allows, NCCL offers and takes, and the communicator has channels for."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, action_parts
from dynamiccl_ray.agent.observation import relative_cost
from dynamiccl_ray.arrays import Bool, Float32, Int64
from dynamiccl_ray.control.columns import Keys
from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS, OWN_PAIR


class Offers:
    """Of K keys."""

    def __init__(self) -> None:
        self.forbidden = np.zeros((0, N_PAIRS, N_CHANNELS), np.bool_)
        """(K, N_PAIRS, N_CHANNELS) what NCCL does not offer, or did not take."""
        self.known = np.zeros(0, np.bool_)
        """(K,) whether NCCL has said what it offers."""
        self.most_channels = np.zeros(0, np.int64)
        """(K,) that the communicator is known to have."""

    def grow(self, n: int) -> None:
        """New keys, of which everything may be asked."""
        self.forbidden = np.append(self.forbidden, np.zeros((n, N_PAIRS, N_CHANNELS), np.bool_), 0)
        self.known = np.append(self.known, np.zeros(n, np.bool_))
        self.most_channels = np.append(self.most_channels, np.full(n, CHANNEL_VALUES[-1]))

    def keep(self, rows: Bool) -> None:
        """Forgets all other keys (a mask (K,)), and moves these together."""
        for name in _ROWS:
            setattr(self, name, getattr(self, name)[rows])

    def offer(self, row: int, cost_us: Float32) -> Float32:
        """NCCL's own costs (N_PAIRS - 1,) for a key: what it marks -1 is not available. Returns (N_PAIRS,) as the
        policy sees them."""
        self.forbidden[row, 1:] |= ~(cost_us >= 0)[:, None]
        self.known[row] = True
        return np.asarray(relative_cost(cost_us[None])[0])

    def forbid(self, row: int, action: int) -> None:
        """NCCL did not take an action for a key: its pair is never asked for again; of NCCL's own, its channels."""
        pair, channels, _ = (int(part) for part in action_parts(action))
        if pair != OWN_PAIR:
            self.forbidden[row, pair] = True
        elif channels:
            self.forbidden[row, pair, channels] = True

    def refused(self, row: int, action: int) -> bool:
        """Whether NCCL does not offer an action for a key, or did not take it."""
        pair, channels, _ = (int(part) for part in action_parts(action))
        return bool(self.forbidden[row, pair, channels])

    def allowed(self, keys: Keys, rows: Int64) -> Bool:
        """(R, N_PAIRS, N_CHANNELS, N_CHUNKS) what may be asked of some of the keys."""
        there = np.array(CHANNEL_VALUES) <= self.most_channels[rows][:, None, None]
        channels = keys.channels[rows] & ~self.forbidden[rows] & there
        # A broadcast would do it for a few chunks at a time.
        each, every = np.repeat(channels, N_CHUNKS, -1), np.tile(keys.chunks[rows], N_CHANNELS)
        return np.asarray(each & every).reshape(len(rows), N_PAIRS, N_CHANNELS, N_CHUNKS)

    def state(self) -> dict[str, Any]:
        """Plain arrays, for a checkpoint."""
        return {name: getattr(self, name) for name in _ROWS}

    def restore(self, state: dict[str, Any]) -> None:
        """After ``grow`` by as many keys."""
        for name in _ROWS:
            getattr(self, name)[:] = state[name]


_ROWS: Final = ("forbidden", "known", "most_channels")
