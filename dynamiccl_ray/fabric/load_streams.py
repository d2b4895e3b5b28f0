"""The loads that streams of collectives meet while the processes of ``dynamiccl_ray.fabric.dynamics`` run.

Each process starts in its stationary state, except for shifts, before the first of which a link is as built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamiccl_ray.fabric.dynamics import Dynamics, Spells
from dynamiccl_ray.fabric.load import Load

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


def fair_share(capacity: ArrayLike, flows: ArrayLike, share: float, others: ArrayLike, other_share: float) -> Float64:
    """What max-min fairness leaves to one flow that takes all it gets.

    The others are ``flows`` that want ``share`` each and ``others`` that want ``other_share`` each; the result has the
    shape of their broadcast. The water level w solves w + sum of min(want, w) = capacity: the largest of what is left
    when any set of the others has its fill and the rest shares evenly (Bertsekas, Gallager 1992, section 6.5).
    """
    capacity, flows, others = (np.asarray(x, np.float64) for x in (capacity, flows, others))
    filled, other_filled = flows * share, others * other_share
    return np.asarray(
        np.maximum(
            np.maximum(capacity - filled - other_filled, (capacity - filled) / (1 + others)),
            np.maximum((capacity - other_filled) / (1 + flows), capacity / (1 + flows + others)),
        )
    )


@dataclass(frozen=True, kw_only=True)
class Spell:
    """Some collectives of all streams."""

    load: Load
    """Fields of shape (steps, streams)."""
    slow_rank: Int64
    """(steps, streams), -1 where no rank is slow."""


class LoadStreams:
    """The loads that many streams of collectives meet, each with dynamics of its own."""

    def __init__(self, dynamics: Dynamics, *, streams: int, ranks: int, devices: int, seed: int) -> None:
        """``devices`` is the network devices of a node. Raises ValueError where one could fail and none were left."""
        if dynamics.failures.mean_gap is not None and devices < 2:
            raise ValueError(f"dynamics.failures: {devices} device per node; one can fail only where others are left")
        self._dynamics: Final = dynamics
        self._streams: Final = streams
        self._ranks: Final = ranks
        self._left_after_failure: Final = 1 - 1 / devices if devices else 1.0
        d = dynamics
        # A generator for each process: one that is switched on does not change what the others do.
        seeds = iter(np.random.SeedSequence(seed).spawn(9))
        self._network: Final = _OnOff(d.network_flows, (streams, d.network_flows.count), next(seeds))
        self._node: Final = _OnOff(d.node_flows, (streams, d.node_flows.count), next(seeds))
        self._slow: Final = _OnOff(d.slow_ranks, (streams,), next(seeds))
        self._degraded: Final = _OnOff(d.degraded, (streams,), next(seeds))
        self._lossy: Final = _OnOff(d.lossy, (streams,), next(seeds))
        self._failed: Final = _OnOff(d.failures, (streams,), next(seeds))
        gap = d.shifts.mean_gap
        self._shifts: Final = _Held(1 / gap if gap else 0.0, streams, next(seeds))
        self._slowness: Final = _Held(0.0, streams, next(seeds))
        self._phase: Final = np.random.default_rng(next(seeds)).random(streams)
        self._at = 0

    def advance(self, steps: int) -> Spell:
        """The next ``steps`` collectives of every stream; what comes does not depend on how many are asked for."""
        d, shape = self._dynamics, (steps, self._streams)
        kept = self._shifts.advance(steps)
        capacity = np.where(np.isnan(kept), 1.0, d.shifts.least ** (1 - kept))
        capacity *= np.where(self._degraded.advance(steps)[0], d.degraded.bandwidth, 1.0)
        capacity *= np.where(self._failed.advance(steps)[0], self._left_after_failure, 1.0)
        flows = self._network.advance(steps)[0].sum(-1)
        bursts = np.zeros(shape)
        if d.other_job.period is not None:
            at = np.arange(self._at, self._at + steps)[:, None] / d.other_job.period + self._phase
            bursts = (at % 1 < d.other_job.duty).astype(np.float64)
        self._at += steps
        network = fair_share(capacity, flows, d.network_flows.share, bursts, d.other_job.share)
        node = fair_share(1.0, self._node.advance(steps)[0].sum(-1), d.node_flows.share, 0.0, 1.0)
        slow, onset = self._slow.advance(steps)
        drawn = self._slowness.advance(steps, onset)
        # One number says both: which rank by its whole part, how slow by the rest.
        rank, slowness = np.divmod(np.nan_to_num(drawn) * self._ranks, 1)
        return Spell(
            load=Load(
                intra_bandwidth=node,
                inter_bandwidth=network,
                intra_latency=1 + d.node_flows.queueing * (1 / node - 1),
                inter_latency=1 + d.network_flows.queueing * (capacity / network - 1),
                straggler=np.where(slow, 1 + (d.slow_ranks.most - 1) * slowness, 1.0),
                loss=np.where(self._lossy.advance(steps)[0], d.lossy.loss, 0.0),
            ),
            slow_rank=np.where(slow, rank, -1).astype(np.int64),
        )


class _OnOff:
    """Independent two-state Markov chains of some shape."""

    def __init__(self, episodes: Spells, shape: tuple[int, ...], seed: np.random.SeedSequence) -> None:
        self._rng: Final = np.random.default_rng(seed)
        self._starts: Final = 1 / episodes.mean_gap if episodes.mean_gap else 0.0
        self._ends: Final = 1 / episodes.mean_length
        self._on = self._rng.random(shape) < self._starts / (self._starts + self._ends)
        self._first = self._on.copy()

    def advance(self, steps: int) -> tuple[Bool, Bool]:
        """(steps, *shape): whether it is on, and whether it has just come on."""
        drawn = self._rng.random((steps, *self._on.shape))
        # A draw either starts it, ends it, or leaves it: the state is what the last draw that was not idle said.
        starts, ends = drawn < self._starts, drawn > 1 - self._ends
        on = _last(np.where(starts, 1.0, np.where(ends, 0.0, np.nan)), self._on.astype(np.float64)) > 0
        before = np.concatenate([self._on[None], on[:-1]]) if steps else on
        onset = on & ~before
        if steps:
            # What was on at the start came on at the start.
            onset[0] |= self._first & on[0]
            self._first = np.zeros_like(self._first)
            self._on = on[-1]
        return on, onset


class _Held:
    """A uniform number for each stream, drawn anew now and then; NaN before the first draw."""

    def __init__(self, often: float, streams: int, seed: np.random.SeedSequence) -> None:
        when, what = seed.spawn(2)
        self._when: Final = np.random.default_rng(when)
        self._what: Final = np.random.default_rng(what)
        self._often: Final = often
        self._held = np.full(streams, np.nan)

    def advance(self, steps: int, anew: Bool | None = None) -> Float64:
        """(steps, streams); ``anew`` says when, instead of chance."""
        shape = (steps, len(self._held))
        drawn = self._when.random(shape) < self._often if anew is None else anew
        held = _last(np.where(drawn, self._what.random(shape), np.nan), self._held)
        if steps:
            self._held = held[-1]
        return held


def _last(values: Float64, before: Float64) -> Float64:
    """The last number that was not NaN up to each step; ``before`` is that of the step before the first."""
    series = np.concatenate([before[None], values])
    index = np.where(np.isnan(series), 0, np.arange(len(series)).reshape(-1, *[1] * before.ndim))
    return np.asarray(np.take_along_axis(series, np.maximum.accumulate(index), 0)[1:])
