"""What earlier runs measured, as a prior: log time ratios to NCCL's own choice, for a communicator of the same shape.

It is a hint of another day. How far it is believed is found out by measurements, as for a model; see ``prior.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from dynamiccl_ray.actions import N_ACTIONS, N_CHANNELS, N_CHUNKS, OWN_ACTION, action_parts
from dynamiccl_ray.agent.lending import noise_of
from dynamiccl_ray.agent.prior import EARLIER_ERROR
from dynamiccl_ray.arrays import Float32, Float64, Int64
from dynamiccl_ray.keys import N_BINS, key_parts
from dynamiccl_ray.knobs import N_PAIRS, OWN_PAIR

# Octaves within which a size that was measured says something of one that was not; and where there is none on its other
# side: NCCL's own choice may change in between.
_NEAR: Final = 1.0
_ALONE: Final = 0.25
# Standard errors by which something is surely slower.
_SURELY: Final = 3.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Decisions:
    """N decisions of one communicator, in their order."""

    key: Int64
    action: Int64
    """Flat."""
    samples: Float64
    log_us: Float64
    """Mean log time, NaN of what was not tried; ``own_log_us`` of NCCL's own choice, NaN before it was known."""
    own_log_us: Float64
    anew: Int64
    """0 until the key began to learn anew; then more each time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """What one run measured of one communicator, K keys."""

    ranks: int
    nodes: int
    name: str
    key: Int64
    """(K,) ascending."""
    ratio: Float32
    """(K, N_PAIRS, N_CHANNELS + N_CHUNKS) mean log time over NCCL's own choice since the key last began to learn, of
    each pair's channel counts and chunks; NaN where nothing was measured."""
    variance: Float32
    """Of the same shape: squared standard error of ``ratio``."""
    noise: Float32
    """(K,) standard deviation of the log of one time; NaN where no action has two decisions."""


def record(ranks: int, nodes: int, name: str, of: Decisions) -> Record:
    """Pools a communicator's decisions."""
    keys, row = np.unique(of.key, return_inverse=True)
    last = np.zeros(len(keys), np.int64)
    np.maximum.at(last, row, of.anew)
    since, own = of.anew == last[row], of.action == OWN_ACTION
    # Where NCCL's own choice has no decision since, its time is of a check's few collectives.
    own_samples = np.bincount(row[since & own], of.samples[since & own], len(keys))
    kept = since & ~own & np.isfinite(of.own_log_us - of.log_us)
    row, samples = row[kept], of.samples[kept]
    log_ratio = of.log_us[kept] - of.own_log_us[kept]
    pair, channels, chunk = action_parts(of.action[kept])
    shape = (len(keys), N_PAIRS, N_CHANNELS + N_CHUNKS)
    count, total, square, times = np.zeros((4, *shape))
    for column in (channels, N_CHANNELS + chunk):
        cell = (row, pair, column)
        np.add.at(count, cell, samples)
        np.add.at(total, cell, samples * log_ratio)
        np.add.at(square, cell, samples * log_ratio**2)
        np.add.at(times, cell, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = total / count
        apart = np.where(count > 0, square - count * ratio**2, 0.0)[..., :N_CHANNELS].sum((1, 2))
        freedom = np.maximum(times - 1, 0)[..., :N_CHANNELS].sum((1, 2))
        # What counts or chunks of one pair differ by is not known of others, either.
        spread = noise_of(np.maximum(apart, 0), freedom)[:, None, None]
        variance = spread**2 * (1 / count + 1 / np.maximum(own_samples, 1)[:, None, None])
    ratio[:, OWN_PAIR] = np.nan
    return Record(
        ranks=ranks,
        nodes=nodes,
        name=name,
        key=keys,
        ratio=ratio.astype(np.float32),
        variance=np.where(np.isfinite(ratio), variance, np.nan).astype(np.float32),
        noise=_noise(row, of.action[kept], samples, log_ratio, len(keys)),
    )


def _noise(row: Int64, action: Int64, samples: Float64, log_ratio: Float64, keys: int) -> Float32:
    """``Record.noise`` by decisions (N,): how far those of one action of a key are apart."""
    cell, at = np.unique(row * N_ACTIONS + action, return_inverse=True)
    count, total, square = (np.bincount(at, samples * log_ratio**power, len(cell)) for power in range(3))
    with np.errstate(invalid="ignore", divide="ignore"):
        apart, freedom = np.maximum(square - total**2 / count, 0), np.bincount(at, minlength=len(cell)) - 1
        of = cell // N_ACTIONS
        variance = np.bincount(of, apart, keys) / np.bincount(of, freedom, keys)
    return np.sqrt(variance).astype(np.float32)


class Earlier:
    """Records of earlier runs, the newest run first; each run has one for every communicator."""

    def __init__(self, runs: Sequence[Sequence[Record]] = ()) -> None:
        self._records: Final = [(age, record) for age, of in enumerate(runs) for record in of]
        # What ``expected`` and ``lead`` say of a key. A job may have hundreds of communicators of one shape, each of
        # which all records of that shape are asked about.
        self._known: Final[dict[tuple[int, int, str, int], tuple[Float32, Float32]]] = {}

    def expected(self, ranks: int, nodes: int, name: str, keys: ArrayLike) -> Float32:
        """(N, N_PAIRS, N_CHANNELS + N_CHUNKS) mean log time ratios of keys (N,) as ``Keys.earlier``: of communicators
        of as many ranks and nodes, and of the same name where both have one.

        NaN where nothing was measured, or so badly that it says less than a record is believed; unless it is surely
        slower than NCCL's own choice.
        """
        return self._told(ranks, nodes, name, keys)[0]

    def lead(self, ranks: int, nodes: int, name: str, keys: ArrayLike) -> Float32:
        """(N,) by how much, as a log, the fastest action was ahead of NCCL's own choice in the newest run that has
        keys (N,), of such a communicator; 0 where none surely was. That may be known of actions that are too badly
        known for ``expected``.
        """
        return self._told(ranks, nodes, name, keys)[1]

    def noise(self, ranks: int, nodes: int, name: str, keys: ArrayLike) -> Float32:
        """(N,) standard deviation of the log of one time of keys (N,), in the newest run of such a communicator that
        knows it; NaN for none."""
        wanted = np.asarray(keys, np.int64)
        noise = np.full(len(wanted), np.nan, np.float32)
        for _, of in self._of(ranks, nodes, name):
            at = np.minimum(np.searchsorted(of.key, wanted), len(of.key) - 1)
            noise = np.where(np.isnan(noise) & (of.key[at] == wanted), of.noise[at], noise)
        return noise

    def fits(self, ranks: int, nodes: int, name: str) -> bool:
        """Whether there is a record of such a communicator."""
        return bool(self._of(ranks, nodes, name))

    @property
    def recorded(self) -> list[tuple[int, int, str]]:
        """Ranks, nodes and name of each record's communicator."""
        return [(of.ranks, of.nodes, of.name) for _, of in self._records]

    def _told(self, ranks: int, nodes: int, name: str, keys: ArrayLike) -> tuple[Float32, Float32]:
        """``expected`` and ``lead`` of keys (N,)."""
        wanted = np.asarray(keys, np.int64)
        records = self._of(ranks, nodes, name)
        if not records:
            return _pooled(records, wanted)
        places = [(ranks, nodes, name, key) for key in wanted.tolist()]
        new = [place for place in dict.fromkeys(places) if place not in self._known]
        said = _pooled(records, np.array([key for *_, key in new], np.int64))
        self._known.update(zip(new, zip(*said, strict=True), strict=True))
        expected, lead = zip(*(self._known[place] for place in places), strict=True)
        return np.stack(expected), np.stack(lead)

    def _of(self, ranks: int, nodes: int, name: str) -> list[tuple[int, Record]]:
        """Records of such communicators and how many runs came after, the newest first."""
        alike = ((age, of) for age, of in self._records if (of.ranks, of.nodes) == (ranks, nodes))
        return [(age, of) for age, of in alike if not name or not of.name or name == of.name]


def _pooled(records: Sequence[tuple[int, Record]], keys: Int64) -> tuple[Float32, Float32]:
    """``Earlier.expected`` and ``Earlier.lead`` of keys (N,), by records of such communicators, the newest first."""
    shape = (len(keys), N_PAIRS, N_CHANNELS + N_CHUNKS)
    precision, total = np.zeros((2, *shape))
    lead, has = np.zeros(len(keys), np.float32), np.zeros(len(keys), np.bool_)
    for age, of in records:
        ratio, variance = _at(of, keys)
        # A run is off by what days differ by, an older one by that of every run since.
        weight = 1 / (variance + (1 + age) * EARLIER_ERROR**2)
        # What was measured badly says little; but how far behind it is does not matter of what surely is.
        well = (variance <= EARLIER_ERROR**2) | (ratio > _SURELY * np.sqrt(variance))
        known = np.isfinite(ratio) & well
        precision += np.where(known, weight, 0.0)
        total += np.where(known, weight * ratio, 0.0)
        surely = np.where(ratio < -_SURELY * np.sqrt(variance), -ratio, 0.0).max((1, 2))
        lead = np.where(has, lead, surely).astype(np.float32)
        has |= np.isfinite(ratio).any((1, 2))
    return np.where(precision > 0, total / np.maximum(precision, 1e-9), np.nan).astype(np.float32), lead


def _at(of: Record, keys: Int64) -> tuple[Float64, Float64]:
    """A record's ratios and their variances at keys (N,): of each action the nearest sizes on both sides that have it,
    and a line between them; NaN where there is none near enough.
    """
    out = np.full((2, len(keys), N_PAIRS, N_CHANNELS + N_CHUNKS), np.nan)
    octave = np.log2([max(1, key_parts(key)[2]) for key in of.key.tolist()])
    for n, key in enumerate(keys.tolist()):
        at = np.log2(max(1, key_parts(key)[2]))
        near = np.flatnonzero((of.key // N_BINS == key // N_BINS) & (np.abs(octave - at) <= _NEAR))
        if not len(near):
            continue
        known = np.isfinite(of.ratio[near])
        away = (octave[near] - at)[:, None, None]
        # By action, the nearest on either side; one of the same size is on both.
        sides = [np.where(known & (sign * away >= 0), np.abs(away), np.inf) for sign in (-1, 1)]
        places = [side.argmin(0)[None] for side in sides]
        gaps = [np.take_along_axis(side, place, 0)[0] for side, place in zip(sides, places, strict=True)]
        (below, above), (lower, upper) = gaps, places
        only_above, only_below = np.isinf(below), np.isinf(above)
        with np.errstate(invalid="ignore"):
            between = np.where(below + above > 0, below / (below + above), 0.0)
        share = np.where(only_above, 1.0, np.where(only_below, 0.0, between))
        for table, to in ((of.ratio, out[0]), (of.variance, out[1])):
            low, high = (np.take_along_axis(table[near], place, 0)[0] for place in (lower, upper))
            to[n] = np.where(share < 1, (1 - share) * np.nan_to_num(low), 0) + share * np.nan_to_num(high)
            to[n][np.where(only_above | only_below, np.minimum(below, above) > _ALONE, below + above > _NEAR)] = np.nan
    return out[0], out[1]
