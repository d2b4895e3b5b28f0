"""What exploring costs a communicator, held to a share of its communication time over a sliding window.

The cost of a decision that explores is what it took above what the best known action would have taken. It may be
negative: so noise adds up to nothing. A window is counted in collectives, and what a whole one may cost can be spent at
its beginning: learning late costs more than learning soon.

That share is for the communicator to which communication matters most, by its leverage V = f(N) / (M I). Others have as
much less as their leverage is: one whose computation dwarfs its communication has less to gain than to lose.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np

from dynamiccl_ray.arrays import Bool, Float32, Float64, Int64
from dynamiccl_ray.config.control import Explore

_BINS: Final = 16
# Of the most leverage, the least that counts: whoever has said that communication does not matter may be wrong.
_LEAST_LEVERAGE: Final = 0.1


class Budget:
    """Of every group of keys, by its number."""

    def __init__(self, explore: Explore) -> None:
        self._explore: Final = explore
        self._unlimited: Final = explore.max_regret >= 1
        # By group, bins of (collectives, us they took, us of them that exploring cost), the newest last.
        self._bins: dict[int, deque[list[float]]] = {}
        self._leverage: dict[int, float] = {}
        self.cost_us = 0.0
        """What exploring has cost all groups together, ever."""

    def weigh(self, group: Int64, leverage: Float32) -> None:
        """What communication matters to the groups of these keys (N,): any unit, the same for all."""
        self._leverage |= dict(zip(group.tolist(), leverage.tolist(), strict=True))

    def limits(self) -> dict[int, float]:
        """Of its communication time, what each group may spend: ``max_regret`` at most."""
        if self._unlimited or not self._leverage:
            return dict.fromkeys(self._leverage, self._explore.max_regret)
        most = max(self._leverage.values())
        share = {g: max(_LEAST_LEVERAGE, of / most) if most > 0 else 1.0 for g, of in self._leverage.items()}
        return {g: self._explore.max_regret * of for g, of in share.items()}

    def spend(self, group: Int64, collectives: Float64, took_us: Float64, cost_us: Float64, keys: Int64) -> None:
        """Decisions (N,) that are over; ``keys`` (N,) is how many keys the group of each has."""
        self.cost_us += float(cost_us.sum())
        if self._unlimited:
            return
        for number in np.unique(group).tolist():
            mine = group == number
            bins = self._bins.setdefault(number, deque([[0.0, 0.0, 0.0]]))
            window = self._explore.window * int(keys[mine][0])
            if bins[-1][0] >= window / _BINS:
                bins.append([0.0, 0.0, 0.0])
            for place, of in enumerate((collectives, took_us, cost_us)):
                bins[-1][place] += float(of[mine].sum())
            while sum(of for of, *_ in bins) - bins[0][0] >= window:
                bins.popleft()

    def share(self, group: int, keys: int) -> float:
        """Of a window's communication time, what exploring has cost in the last one; a window that is not full yet is
        taken to go on as it began."""
        bins = self._bins.get(group, ())
        collectives, took_us, cost_us = (sum(content[place] for content in bins) for place in range(3))
        if took_us <= 0:
            return 0.0
        return cost_us / (took_us * max(1.0, self._explore.window * keys / collectives))

    def spent(self, group: Int64) -> Bool:
        """(K,) whether the groups of these keys, all that there are, may not explore for now."""
        if self._unlimited or not len(group):
            return np.zeros(len(group), np.bool_)
        numbers, of, counts = np.unique(group, return_inverse=True, return_counts=True)
        limits, most = self.limits(), self._explore.max_regret
        mine = zip(numbers.tolist(), counts.tolist(), strict=True)
        spent = [self.share(number, keys) >= limits.get(number, most) for number, keys in mine]
        return np.array(spent)[of]

    def keep(self, group: Int64) -> None:
        """Forgets all groups but those of these keys."""
        kept = set(group.tolist())
        self._bins = {number: bins for number, bins in self._bins.items() if number in kept}
        self._leverage = {number: of for number, of in self._leverage.items() if number in kept}

    # -- durability --

    def state(self) -> dict[str, Any]:
        """Plain arrays, for a checkpoint: of each bin (N, 4) its group and its content."""
        rows = [[float(number), *content] for number, bins in self._bins.items() for content in bins]
        return {"bins": np.array(rows, np.float64).reshape(-1, 4), "cost_us": np.array(self.cost_us)}

    def restore(self, state: dict[str, Any]) -> None:
        self._bins, self.cost_us = {}, float(state["cost_us"])
        for number, *content in state["bins"].tolist():
            self._bins.setdefault(int(number), deque()).append(content)
