"""The reward of a decision: what it gained in time, less what it cost besides. docs/reward.md has every term.

Nothing here knows where its inputs come from: beside a job they are reduced over ranks, in the model they are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import N_PROTOCOLS, OWN_PAIR, Algorithm
from dynamiccl_ray.settings import NotNegative, Positive, Section

Floats = NDArray[np.floating[Any]]
Bool = NDArray[np.bool_]

PRIMARY: Final = "primary"


class Reward(Section):
    """Weights of the reward's terms; 0 switches one off. Times are log ratios, so 0.01 is worth one per cent of time.

    The time itself has weight 1. What follows from the action alone (probe, sm, tier) is worth half a per cent at most
    on most GPUs: less than two times can be told apart by, so that it decides between actions that are equally fast.
    """

    iteration: NotNegative = 0.1
    """Of the job's iteration time over the baseline's, less 1. All keys share it: enough to notice that a faster
    collective slows the job down, too little to bury a key's own time."""
    switch: NotNegative = 0.0
    """Of changing a key's action. 0: a switch costs the job no time that could be measured."""
    congestion: NotNegative = 0.05
    """Of the log of a time over the least that the key has shown since the last drift. It grows with the time, as the
    primary term falls, and cannot turn the order of two actions."""
    probe: NotNegative = 0.005
    """Of an action that the key has not been measured with before: gaining half a per cent is not worth a trial."""
    convergence: NotNegative = 0.001
    """Of a loss that stands still. What NCCL chooses does not change what is computed: it is much the same for all
    actions, and kept small."""
    found: NotNegative = 16.0
    """Of what a decision makes the best known action faster by: what is found is used for many collectives. So many,
    where what is tried costs one."""
    sm: NotNegative = 0.02
    """Of all SMs of a GPU; 16 channels of a H100 cost a quarter of a per cent."""
    tier: NotNegative = 0.005
    """Of a ring between data centres; see ``tier_penalty``."""
    fault: NotNegative = 1.0
    """Of a fault while the key's collectives ran."""
    limit: Positive = 2.0
    """The log of the speedup, congestion and iteration are clipped to plus and minus this."""
    least_loss_change: Positive = 0.01
    """A loss that changes by no more than this stands still."""

    def without(self, names: Iterable[str]) -> Self:
        """The same, with these terms switched off. Raises ConfigError for what is not a term that has a weight."""
        names = tuple(names)
        for name in names:
            if name not in COSTS:
                why = "the time itself cannot be left out" if name == PRIMARY else "the reward has no such term"
                raise ConfigError(f"--without {name}: {why}; give one of {', '.join(COSTS)}")
        return self.model_copy(update=dict.fromkeys(names, 0.0))

    @property
    def off(self) -> list[str]:
        """Terms whose weight is 0."""
        return [name for name in COSTS if getattr(self, name) == 0]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One epoch of K keys, (K,) each or one number for all. None: there is no source; NaN: none for that key."""

    log_speedup: Floats
    """log(baseline / time); NaN for a key that did not run."""
    switched: Bool
    """The action is not the one of the epoch before."""
    probed: Bool
    """The action had never been measured for this key."""
    congestion: Floats
    """log(time / the least since the last drift)."""
    tier: Floats
    """As ``tier_penalty`` has it."""
    found: Floats | None = None
    """By how much, as a log, what is the best by all measurements is truly faster than what was before the decision."""
    sm_share: Floats | None = None
    """SMs that the collective takes over all of a GPU."""
    iteration: ArrayLike | None = None
    """The job's iteration time over the baseline's, less 1."""
    loss_change: ArrayLike | None = None
    """Absolute change of the loss since the epoch before."""
    fault: ArrayLike | None = None


_COST: Final[Mapping[str, Callable[[Reward, Inputs], Any]]] = {
    "iteration": lambda w, x: None if x.iteration is None else np.clip(x.iteration, -w.limit, w.limit),
    "switch": lambda _, x: x.switched,
    "congestion": lambda w, x: np.clip(x.congestion, 0, w.limit),
    "probe": lambda _, x: x.probed,
    "convergence": lambda w, x: None if x.loss_change is None else _stagnation(x.loss_change, w.least_loss_change),
    "found": lambda w, x: None if x.found is None else -np.clip(x.found, -w.limit, w.limit),
    "sm": lambda _, x: None if x.sm_share is None else np.clip(x.sm_share, 0, 1),
    "tier": lambda _, x: x.tier,
    "fault": lambda _, x: x.fault,
}
COSTS: Final = tuple(_COST)
"""Terms that have a weight, and may be switched off."""
TERMS: Final = (PRIMARY, *COSTS)
"""Whose sum is the reward."""


def terms(weights: Reward, inputs: Inputs) -> dict[str, Floats]:
    """Name -> (K,) of every term that has a weight and an input; ``total`` of them is the reward."""
    primary = np.clip(inputs.log_speedup, -weights.limit, weights.limit)
    out: dict[str, Floats] = {PRIMARY: primary}
    for name in COSTS:
        weight = getattr(weights, name)
        cost = _COST[name](weights, inputs) if weight else None
        if cost is not None:
            known = np.nan_to_num(np.asarray(cost, primary.dtype))
            out[name] = np.broadcast_to(primary.dtype.type(-weight) * known, primary.shape)
    return out


def _stagnation(change: ArrayLike, least: float) -> Floats:
    """1 / max(change, least) over its largest value: 1 for a loss that stands still, near 0 for one that moves."""
    return least / np.maximum(np.asarray(change, np.float64), least)


def total(parts: Mapping[str, Floats]) -> Floats:
    """(K,) the reward; NaN for keys that did not run."""
    return np.asarray(np.sum(list(parts.values()), 0))


def means(parts: Mapping[str, Floats]) -> dict[str, float]:
    """Name -> mean over the keys that ran; empty if none did."""
    ran = np.isfinite(parts[PRIMARY])
    return {name: float(part[ran].mean()) for name, part in parts.items()} if ran.any() else {}


# Of the six algorithms besides the ring, by what their crossings of the network grow with.
_LOGARITHMIC: Final = (Algorithm.TREE, Algorithm.NVLS_TREE, Algorithm.PAT)


def tier_penalty(pair: ArrayLike, tier: ArrayLike, nodes: ArrayLike) -> NDArray[np.float64]:
    """How far an action stretches over far tiers: 0 to 1, of the broadcast shape of pair indices, tiers and nodes.

    What a byte must cross one after the other: a ring passes through every node, nodes - 1 crossings; a tree's depth is
    log2 of them; aggregation in a switch is one. Each is a chance to meet somebody else's traffic, and on tier 3 and 4
    it is slow besides. So: crossings over the ring's, by half on tier 3 and in full on tier 4; 0 on nearer ones, within
    one node, and where ``pair`` is NCCL's own without saying which that is.
    """
    pairs, n = np.asarray(pair), np.maximum(np.asarray(nodes, np.float64), 1)
    algorithm = (pairs - 1) // N_PROTOCOLS
    ring = np.maximum(n - 1, 1)
    crossings = np.where(np.isin(algorithm, _LOGARITHMIC), np.ceil(np.log2(n)), 1.0)
    crossings = np.where(algorithm == Algorithm.RING, ring, crossings)
    far = np.clip((np.asarray(tier) - 2) / 2, 0, 1)
    return np.asarray(np.where((pairs == OWN_PAIR) | (n < 2), 0.0, far * np.minimum(crossings / ring, 1)))
