"""What measurements say of an action: a key's own, and those of keys that are like it.

Log time ratios to NCCL's own choice change slowly with size, so that keys of one collective on one communicator lend
each other what they have measured, the less the further their sizes are apart. What is lent is worth less than what
was measured, however often: it is of another key.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamiccl_ray.knobs import OWN_PAIR

Floats = NDArray[np.float32]

# What a measurement counts for a key of the same size, and over how many octaves that falls by 1/e.
_LENT: Final = 0.5
_OCTAVES: Final = 2.0
# Standard deviation of log time ratios between keys that lend each other,
_APART: Final = 0.04
# of one action's around what its channels, or its chunk, say of it.
_FLOOR: Final = 0.003
# and of a ratio before a shift of the network around what it is after.
_STALE: Final = 0.15
# Of what is not known at all.
WIDE: Final = 0.5
# Farthest that two sizes are apart, in octaves, between which a time is expected to lie on a line.
_BETWEEN: Final = 6.0
# Logs of standard deviations are in units of this, so that they are small numbers.
SURE_SCALE: Final = 4.0
_LEAST_NOISE: Final = 0.005
_USUAL_NOISE: Final = 0.02
# What the usual noise counts for, in measurements.
_PRIOR_FREEDOM: Final = 4.0


class Lending:
    """Which of B keys lend each other, and how much."""

    def __init__(self, group: ArrayLike, collective: ArrayLike, nbytes: ArrayLike) -> None:
        """All (B,); keys lend within a group. Groups must be contiguous and numbered from 0."""
        groups, kind = np.asarray(group, np.int64), np.asarray(collective)
        size = np.bincount(groups) if len(groups) else np.zeros(0, np.int64)
        width = int(size.max(initial=0))
        within = np.arange(width) < size[:, None]
        # Row of each place in a group; those beyond a group's end stand for its first key and lend nothing.
        first = np.cumsum(size) - size
        self._rows: Final = np.where(within, first[:, None] + np.arange(width), first[:, None])
        self._within: Final = within
        octaves, kind = np.log2(np.maximum(1, np.asarray(nbytes)))[self._rows], kind[self._rows]
        near = _LENT * np.exp(-np.abs(octaves[:, :, None] - octaves[:, None, :]) / _OCTAVES)
        alike = (kind[:, :, None] == kind[:, None, :]) & within[:, :, None] & within[:, None, :]
        self._weight: Final = (near * alike * ~np.eye(width, dtype=np.bool_)).astype(np.float32)
        self._line: Final = _between(groups, np.asarray(collective), np.log2(np.maximum(1, np.asarray(nbytes))))

    def __call__(self, x: Floats) -> Floats:
        """(B, N): the weighted sum over the keys that lend to each."""
        return np.asarray((self._weight @ x[self._rows])[self._within])

    def excess(self, log_time: Floats) -> Floats:
        """(B,): how far each time lies above the line between those of the next smaller and the next larger key; 0
        where there is no such pair. Where NCCL's own choice switches too early or too late, its time stands out.
        """
        key, below, above, share = self._line
        out = np.zeros(len(log_time), np.float32)
        out[key] = log_time[key] - (1 - share) * log_time[below] - share * log_time[above]
        return out


def _between(
    group: NDArray[np.int64], collective: NDArray[np.int64], octaves: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], Floats]:
    """Keys that lie between two others of their kind, these two, and how far along, 0 to 1."""
    order = np.lexsort((octaves, collective, group))
    below, key, above = order[:-2], order[1:-1], order[2:]
    alike = (group[below] == group[above]) & (collective[below] == collective[above])
    width = octaves[above] - octaves[below]
    chosen = alike & (width > 0) & (width <= _BETWEEN)
    share = (octaves[key] - octaves[below])[chosen] / width[chosen]
    return key[chosen], below[chosen], above[chosen], share.astype(np.float32)


def combine(total: Floats, samples: Floats, noise: Floats, lending: Lending) -> tuple[Floats, Floats]:
    """Mean log time ratio (B, ...) of each action by own and lent measurements, 0 where there are none; and how sure
    it is, log(``WIDE`` / standard deviation) / ``SURE_SCALE``: 0 where nothing is known.

    ``total`` and ``samples`` (B, ...) are sums and counts of own log time ratios, ``noise`` (B,) the standard
    deviation of one. Precisions of independent Gaussian estimates add up.
    """
    shape = samples.shape
    flat_total, flat_samples = (x.reshape(shape[0], math.prod(shape[1:])) for x in (total, samples))
    lent = lending(np.concatenate([flat_total, flat_samples], -1))
    lent_total, lent_samples = lent[:, : flat_total.shape[1]], lent[:, flat_total.shape[1] :]
    variance = (noise**2)[:, None]
    own = flat_samples / (variance + flat_samples * np.float32(_FLOOR**2))
    other = lent_samples / (variance + lent_samples * np.float32(_APART**2))
    precision = own + other
    mean = own * flat_total / np.maximum(flat_samples, 1e-9) + other * lent_total / np.maximum(lent_samples, 1e-9)
    mean = mean / np.maximum(precision, 1e-9)
    sure = np.log1p(np.float32(WIDE**2) * precision) / np.float32(2 * SURE_SCALE)
    return np.asarray(mean.reshape(shape), np.float32), np.asarray(sure.reshape(shape), np.float32)


def stale(samples: NDArray[Any], noise: NDArray[Any]) -> NDArray[Any]:
    """What counts (B, ...) are worth after a shift: no more than one time that is off by ``_STALE``."""
    worth = (noise / _STALE) ** 2
    return np.asarray(np.minimum(samples, worth.reshape(-1, *(1,) * (samples.ndim - 1)).astype(samples.dtype)))


def worse_than_own(
    ratio: NDArray[Any], samples: NDArray[Any], noise: NDArray[Any], *, margin: float, least: int
) -> NDArray[np.bool_]:
    """What the guardrail forbids, (B, N_PAIRS, N_CHANNELS): own mean log time ratios that lie above ``margin`` by two
    standard errors or more, of at least so many samples. NCCL's own choice is never forbidden. ``noise`` is (B,).
    """
    doubt = 2 * noise[:, None, None] / np.sqrt(np.maximum(samples, 1e-9))
    worse = (samples >= least) & (ratio - doubt > margin)
    worse[:, OWN_PAIR, 0] = False
    return np.asarray(worse)


def noise_of(squares: ArrayLike, freedom: ArrayLike) -> Floats:
    """Standard deviation (B,) of the log of one time, from squared deviations within epochs and their degrees of
    freedom; near the usual where little is known.
    """
    square, free = np.asarray(squares, np.float64), np.asarray(freedom, np.float64)
    variance = (square + _PRIOR_FREEDOM * _USUAL_NOISE**2) / (free + _PRIOR_FREEDOM)
    return np.sqrt(np.maximum(variance, _LEAST_NOISE**2)).astype(np.float32)
