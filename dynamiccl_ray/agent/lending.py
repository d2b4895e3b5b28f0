"""What measurements say of an action: a key's own, and those of keys that are like it.

Log time ratios to NCCL's own choice change slowly with size, so that keys of one collective on one communicator lend
each other what they have measured, the less the further their sizes are apart. So do keys of two collectives that
mirror each other: a reduce-scatter sends what an all-gather does the other way round, and a reduce what a broadcast
does. What is lent is worth less than what was measured, however often: it is of another key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamiccl_ray.knobs import Collective

Floats = NDArray[np.float32]

# Standard deviations of log time ratios, measured on the jobs that a policy is trained on (benchmarks/lending.py):
# between keys that are up to half an octave apart (0.05 where one is the mirror of the other's collective),
_APART: Final = 0.04
# and before a shift of the network around what they are after.
_STALE: Final = 0.15
# What a measurement counts for a key of the same size, and over how many octaves that falls by 1/e: there, the squares
# of the deviations at 1, 2 and 4 octaves are 4, 8 and 17 times that of half an octave.
_LENT: Final = 0.5
_OCTAVES: Final = 2.0
# Of an action around what its channels, or its chunk, say of it: for most there is no difference.
_FLOOR: Final = 0.003
# Collectives that such a hint counts for at most: one that is measured anew outweighs it, however noisy.
_HINT: Final = 0.5
# Of what is not known at all.
WIDE: Final = 0.5
# Sizes that are no further apart, in octaves, need not both try what is not expected to be good.
_NEAR: Final = 2.0
# Farthest that two sizes are apart, in octaves, between which a time is expected to lie on a line.
_BETWEEN: Final = 6.0
# Logs of standard deviations are in units of this, so that they are small numbers.
SURE_SCALE: Final = 4.0
_LEAST_NOISE: Final = 0.005
_USUAL_NOISE: Final = 0.02
# What the usual noise counts for, in measurements.
_PRIOR_FREEDOM: Final = 4.0

_MIRRORED: Final = {Collective.REDUCE: Collective.BROADCAST, Collective.REDUCE_SCATTER: Collective.ALL_GATHER}
# Of each collective, which of it and its mirror stands for both.
_KIND: Final = np.array([_MIRRORED.get(collective, collective) for collective in Collective], np.int64)


class Lending:
    """Which of B keys lend each other, and how much."""

    def __init__(self, group: ArrayLike, collective: ArrayLike, nbytes: ArrayLike) -> None:
        """All (B,); keys of one collective, or of its mirror, lend within a group, whatever the groups' numbers are."""
        groups, of = np.asarray(group, np.int64), np.asarray(collective, np.int64)
        kind = _KIND[of]
        octaves = np.log2(np.maximum(1, np.asarray(nbytes, np.float64)))
        order = np.lexsort((np.arange(len(groups)), kind, groups))
        edge = np.flatnonzero((np.diff(groups[order]) != 0) | (np.diff(kind[order]) != 0)) + 1
        # Rows by group and kind; and where those of one begin and end that has several, and what each gets from each.
        self._order: Final = order
        self._blocks: Final[list[tuple[int, int, Floats]]] = []
        # Of each row: its place among those of its kind, and how many of these are near, itself included.
        self._turn: Final = np.zeros((2, len(groups)), np.int64)
        for start, end in pairwise((0, *edge.tolist(), len(order))):
            rows = order[start:end]
            apart = np.abs(octaves[rows, None] - octaves[rows])
            near = _LENT * np.exp(-apart / _OCTAVES)
            self._turn[:, rows] = np.arange(len(rows)), (apart <= _NEAR).sum(-1)
            if len(rows) > 1:
                self._blocks.append((start, end, (near * ~np.eye(len(rows), dtype=np.bool_)).astype(np.float32)))
        self._place: Final = np.argsort(order)
        by_size = np.lexsort((octaves, of, groups))
        self._by_size: Final = (by_size, groups[by_size], of[by_size], octaves[by_size])

    def __call__(self, x: Floats, rows: NDArray[np.int64]) -> Floats:
        """(R, N) for R of the rows: the weighted sum of x (B, N) over the keys that lend to each."""
        wanted = np.zeros(len(x), np.bool_)
        wanted[rows] = True
        wanted, ordered, out = wanted[self._order], x[self._order], np.zeros(x.shape, np.float32)
        for start, end, weight in self._blocks:
            if wanted[start:end].any():
                np.matmul(weight, ordered[start:end], out=out[start:end])
        return out[self._place[rows]]

    def tried(self, own: NDArray[np.bool_], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(R, N) for R of the rows: whether a key or one that is near it has tried, by ``own`` (B, N)."""
        near = self(own.astype(np.float32), rows) >= _LENT * math.exp(-_NEAR / _OCTAVES)
        return np.asarray(own[rows] | near)

    def near(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """(N,) all: places in ``rows`` (R,), a row that is at most ``_NEAR`` octaves from the row there and is not it,
        and how many that is."""
        place, pairs, apart = self._place[rows], [np.zeros((2, 0), np.int64)], [np.zeros(0)]
        for start, end, weight in self._blocks:
            at = np.flatnonzero((place >= start) & (place < end))
            lent = weight[place[at] - start]
            of, other = np.nonzero(lent >= _LENT * math.exp(-_NEAR / _OCTAVES))
            pairs.append(np.stack([at[of], self._order[start + other]]))
            apart.append(-_OCTAVES * np.log(lent[of, other] / _LENT, dtype=np.float64))
        at, other = np.concatenate(pairs, -1)
        return at, other, np.concatenate(apart)

    def turn(self, rows: NDArray[np.int64], ordinal: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(R,) whether it is the turn of these keys at their decision ``ordinal`` (R,) to try what all that are near
        wait for: one of them at a time."""
        place, near = self._turn[:, rows]
        return np.asarray((ordinal + place) % near == 0)

    def excess(self, log_time: Floats) -> Floats:
        """(B,): how far each time lies above the line between those of the next smaller and the next larger key of its
        collective that have one; 0 where there is no such pair. Where NCCL's own choice switches too early or too late,
        its time stands out. NaN is a key without a time.
        """
        # A key that has never been measured must not come between two that have.
        known = np.isfinite(log_time[self._by_size[0]])
        key, group, kind, octaves = (column[known] for column in self._by_size)
        time = log_time[key]
        width = octaves[2:] - octaves[:-2]
        alike = (group[2:] == group[:-2]) & (kind[2:] == kind[:-2]) & (width > 0) & (width <= _BETWEEN)
        at = 1 + np.flatnonzero(alike)
        share = ((octaves[at] - octaves[at - 1]) / width[at - 1]).astype(np.float32)
        out = np.zeros(len(log_time), np.float32)
        out[key[at]] = time[at] - (1 - share) * time[at - 1] - share * time[at + 1]
        return out


def combine(
    total: Floats,
    samples: Floats,
    noise: Floats,
    lending: Lending,
    rows: NDArray[np.int64],
    priors: Sequence[tuple[Floats, Floats]],
) -> tuple[Floats, Floats]:
    """Mean log time ratio (R, ...) of each action by own and lent measurements and by what priors expect, 0 where
    there is nothing; and how sure it is, log(``WIDE`` / standard deviation) / ``SURE_SCALE``: 0 where nothing is known.
    Both of ``rows`` (R,).

    ``total`` and ``samples`` (B, ...) are sums and counts of own log time ratios, ``noise`` (B,) the standard
    deviation of one. Each of ``priors`` is what is expected (R, ...), NaN for nothing, and its standard deviation (R,).
    Precisions of independent Gaussian estimates add up.
    """
    shape = samples.shape
    flat_total, n = (x.reshape(shape[0], math.prod(shape[1:])) for x in (total, samples))
    times, variance = flat_total / np.maximum(n, 1e-9), (noise**2)[:, None]
    own = (n / (variance + n * np.float32(_FLOOR**2)))[rows]
    # However often it was measured, it says no more of another key than how far the two are apart; nor do many keys.
    worth = n / (variance + n * np.float32(_APART**2))
    lent, of_lent = np.split(lending(np.concatenate([worth * times, worth], -1), rows), 2, axis=-1)
    share = np.float32(_APART**-2) / np.maximum(of_lent, np.float32(_APART**-2))
    mean, precision = own * times[rows] + share * lent, own + share * of_lent
    for prior, error in priors:
        believed = prior.reshape(precision.shape)
        known = np.isfinite(believed)
        weight = known / (error**2)[:, None]
        precision += weight
        mean += np.multiply(weight, believed, out=weight, where=known)
    mean /= np.maximum(precision, 1e-9)
    sure = np.log1p(np.float32(WIDE**2) * precision) / np.float32(2 * SURE_SCALE)
    out = (len(rows), *shape[1:])
    return np.asarray(mean.reshape(out), np.float32), np.asarray(sure.reshape(out), np.float32)


def deviation(sure: NDArray[Any]) -> NDArray[Any]:
    """Standard deviations of log time ratios that ``combine`` is so sure of."""
    return np.asarray(WIDE * np.exp(-SURE_SCALE * sure))


def stale(samples: NDArray[Any], noise: NDArray[Any]) -> NDArray[Any]:
    """What counts (B, ...) are worth after a shift: no more than one time that is off by ``_STALE``, and no more than
    half a collective.
    """
    worth = np.minimum((noise / _STALE) ** 2, _HINT)
    return np.asarray(np.minimum(samples, worth.reshape(-1, *(1,) * (samples.ndim - 1)).astype(samples.dtype)))


def worse_than_own(
    ratio: NDArray[Any], samples: NDArray[Any], noise: NDArray[Any], *, margin: float, least: int
) -> NDArray[np.bool_]:
    """What the guardrail forbids, (N,): own mean log time ratios that lie above ``margin`` by two standard errors or
    more, of at least so many samples. ``noise`` is one time's.
    """
    doubt = 2 * noise / np.sqrt(np.maximum(samples, 1e-9))
    return np.asarray((samples >= least) & (ratio - doubt > margin))


def noise_of(squares: ArrayLike, freedom: ArrayLike) -> Floats:
    """Standard deviation (B,) of the log of one time, from squared deviations within epochs and their degrees of
    freedom; near the usual where little is known.
    """
    square, free = np.asarray(squares, np.float64), np.asarray(freedom, np.float64)
    variance = (square + _PRIOR_FREEDOM * _USUAL_NOISE**2) / (free + _PRIOR_FREEDOM)
    return np.sqrt(np.maximum(variance, _LEAST_NOISE**2)).astype(np.float32)
