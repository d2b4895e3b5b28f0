"""What the control loop is told and what it finds out, in columns: arrays of one row per key or collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS
from dynamiccl_ray.agent.observation import STATIC_SIZE
from dynamiccl_ray.arrays import Bool, Float32, Float64, Int64, UInt64
from dynamiccl_ray.knobs import N_PAIRS


@dataclass(frozen=True, kw_only=True, eq=False)
class Keys:
    """What never changes of some keys; N of them."""

    group: Int64
    """(N,) number of the key's communicator: keys of one lend each other what they measure."""
    identity: UInt64
    """(N,) the same for as long as the key lives, and no other's."""
    salt: UInt64
    """(N,) what the key's draws depend on, beside the seed and its decisions."""
    collective: Int64
    """(N,) NCCL's function number."""
    nbytes: Int64
    """(N,)"""
    pipelined: Bool
    """(N,)"""
    cost: Float32
    """(N, N_PAIRS) log of NCCL's predicted cost over its cheapest; 0 where there is none."""
    channels: Bool
    """(N, N_PAIRS, N_CHANNELS) what may be chosen."""
    chunks: Bool
    """(N, N_PAIRS, N_CHUNKS)"""
    context: Float32
    """(N, STATIC_SIZE) what is known of the communicator, encoded."""
    prior: Float32
    """(N, N_PAIRS, N_CHANNELS + N_CHUNKS) what a model of the cluster expects, see ``prior.py``; NaN where nothing."""
    earlier: Float32
    """As ``prior``: what earlier runs measured, see ``earlier.py``."""
    lead: Float32
    """(N,) by how much, as a log, something was surely ahead of NCCL's own choice in an earlier run; or 0."""
    noise: Float32
    """(N,) standard deviation of the log of one time in an earlier run; NaN where that is not known."""

    def __len__(self) -> int:
        return len(self.nbytes)

    @staticmethod
    def join(parts: Sequence[Keys]) -> Keys:
        """One after the other."""
        of = (no_keys(), *parts)
        return Keys(**{name: np.concatenate([getattr(keys, name) for keys in of]) for name in vars(of[0])})

    def part(self, chosen: Int64) -> Keys:
        """Those at these places, in order."""
        return take(self, chosen)


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """N collectives, in the order in which they ran."""

    row: Int64
    """(N,)"""
    action: Int64
    """(N,) flat, that was in force."""
    log_us: Float64
    """(N,)"""
    skew: Float64
    """(N,) log of the slowest rank's time over the collective's: what that rank waited for others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What came of the decisions that are over; R of them."""

    known: Bool
    """(R,) whether there was a decision to judge: not of a baseline, and of nothing that a shift cut short."""
    log_speedup: Float64
    """(R,) log of the baseline over the mean time."""
    switched: Bool
    """(R,) the action was not the one before it."""
    probed: Bool
    """(R,) the action had never been tried on the key."""
    congestion: Float64
    """(R,) log of the mean time over the least of any decision since the last shift."""

    def part(self, chosen: Int64) -> Outcome:
        """Those at these places, in order."""
        return take(self, chosen)


@dataclass(frozen=True, kw_only=True, eq=False)
class Drift:
    """The times of a key have changed."""

    row: int
    anew: bool
    """Whether the key learns anew. False where its choice was checked, and stood."""
    sample: int
    """Index, among what was observed, of the collective that raised it; -1 for one that was observed before."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Closed:
    """Decisions (R,) that are over, of different keys."""

    rows: Int64
    actions: Int64
    samples: Float64
    mean: Float64
    """Of the log times, and their squared deviations from it."""
    square: Float64

    def part(self, chosen: Int64) -> Closed:
        return Closed(**{name: column[chosen] for name, column in vars(self).items()})

    def as_if(self, samples: Float64) -> Closed:
        """The same as of no more than so many ``samples`` (R,), that vary as they do."""
        fewer = np.minimum(self.samples, samples)
        square = self.square * (fewer - 1) / np.maximum(self.samples - 1, 1)
        return Closed(rows=self.rows, actions=self.actions, samples=fewer, mean=self.mean, square=square)

    def into(self, evidence: Callable[..., None]) -> None:
        if len(self.rows):
            evidence(**vars(self))


def closed(samples: Measured, wanted: Int64, limit: Float32) -> tuple[Closed, Float64]:
    """Decisions, flat actions ``wanted`` (K,), that have all of their samples (N,), in the order of their rows; and the
    log times that count (N,).

    No time counts as further above the median of its decision, of two the lesser, than ``limit`` (K,): what held one
    collective up says nothing of its action.
    """
    rows, first, counts = np.unique(samples.row, return_index=True, return_counts=True)
    median = samples.log_us[np.lexsort((samples.log_us, samples.row))][first + (counts - 1) // 2]
    log_us = np.minimum(samples.log_us, np.repeat(median + limit[rows], counts))
    mean = np.add.reduceat(log_us, first) / counts
    square = np.add.reduceat((log_us - np.repeat(mean, counts)) ** 2, first)
    of = Closed(rows=rows, actions=wanted[rows], samples=counts.astype(np.float64), mean=mean, square=square)
    return of, log_us


def salt_of(keys: ArrayLike, ranks: int, nodes: int) -> UInt64:
    """(N,) what the draws of a communicator's keys depend on: communicators of one shape draw alike, in whichever order
    they come.
    """
    return np.asarray(keys, np.uint64) + np.uint64((ranks << 40) + (nodes << 16))


_NONE: Final = np.zeros(0, np.int64)
NOTHING: Final = Measured(row=_NONE, action=_NONE, log_us=np.zeros(0), skew=np.zeros(0))

_Columns = TypeVar("_Columns", Keys, Measured, Outcome)


def take(columns: _Columns, chosen: Bool | Int64) -> _Columns:
    """The chosen rows of every column."""
    return type(columns)(**{name: column[chosen] for name, column in vars(columns).items()})


def joined(columns: _Columns, more: _Columns) -> _Columns:
    """The rows of the first, then those of the second."""
    return type(columns)(**{k: np.concatenate([v, getattr(more, k)]) for k, v in vars(columns).items()})


def no_keys() -> Keys:
    return Keys(
        group=_NONE,
        identity=np.zeros(0, np.uint64),
        salt=np.zeros(0, np.uint64),
        collective=_NONE,
        nbytes=_NONE,
        pipelined=np.zeros(0, np.bool_),
        cost=np.zeros((0, N_PAIRS), np.float32),
        channels=np.zeros((0, N_PAIRS, N_CHANNELS), np.bool_),
        chunks=np.zeros((0, N_PAIRS, N_CHUNKS), np.bool_),
        context=np.zeros((0, STATIC_SIZE), np.float32),
        prior=nothing_expected(0),
        earlier=nothing_expected(0),
        lead=np.zeros(0, np.float32),
        noise=np.zeros(0, np.float32),
    )


def nothing_expected(n: int) -> Float32:
    """``Keys.prior`` of keys on a cluster that nobody described, or ``Keys.earlier`` of what never ran there."""
    return np.full((n, N_PAIRS, N_CHANNELS + N_CHUNKS), np.nan, np.float32)


def no_outcome(n: int) -> Outcome:
    no = np.zeros(n, np.bool_)
    return Outcome(known=no, log_speedup=np.zeros(n), switched=no.copy(), probed=no.copy(), congestion=np.zeros(n))
