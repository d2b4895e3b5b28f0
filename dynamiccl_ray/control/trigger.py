"""The Trigger Agent's detector: has the mean of a key's log times changed? A two-sided CUSUM, one per key.

The sums are over batches of 8 samples, because measured times are correlated and their tails are heavy: the standard
deviation of a batch mean is estimated from what such means really vary by, and where there are too few of them, from
the correlation of neighbouring samples. Neither a mean, nor a deviation, nor the size of a shift has to be known.

At each batch the last p batches are compared with all before them, for p of 2 to 32: the window-limited generalised
likelihood ratio of Lai (Journal of the Royal Statistical Society B, 1995), with a deviation that is estimated. So a
shift is compared with a reference from before it, also if it comes slowly.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from dynamiccl_ray.arrays import Bool, Float64, Int64

BATCH: Final = 8
"""Samples. An alarm comes at the end of a batch."""
# Batches after a shift that are compared with those before it, of which there have to be so many.
_AFTER: Final = np.array([2, 3, 4, 6, 8, 12, 16, 24, 32])
_BEFORE: Final = 2
# Within a batch, one outlier counts as no more than so many deviations; and a batch as no more than so many of its own:
# two that are far off are an alarm, and one is none.
_OUTLIER: Final = 3.0
_FAR: Final = 5.0
# What is off by so many deviations of a batch, and by a factor of so much as a log, is an alarm at once.
_SUDDEN: Final = 8.0
_LEAST_SUDDEN: Final = 0.35
# Below this, session effects rather than noise decide: repeats on p5en differ by 0.6 % within a session.
_LEAST_SIGMA: Final = 0.003
# The correlation of neighbouring samples before it is known, and the batches that this counts for.
_USUAL_CORRELATION: Final = 0.5
_USUAL_BATCHES: Final = 16.0
_MOST_CORRELATION: Final = 0.9
# Batches that the deviation counts for which follows from that correlation.
_FREEDOM: Final = 24.0
# Samples to a false alarm from which there is to be none.
_NEVER: Final = 1e50


def threshold(arl0: float, batch: int = BATCH) -> float:
    """Standard deviations that the recent batches may be off by, for at most one false alarm in ``arl0`` samples of a
    key: the union bound over all comparisons. They are not independent, so false alarms are rarer.

    Raises ValueError unless arl0 > 2.
    """
    if not arl0 > 2:
        raise ValueError(f"arl0 is {arl0}; expected more than 2 samples")
    return -NormalDist().inv_cdf(min(0.25, batch / (2 * len(_AFTER) * arl0)))


class Cusum:
    """One detector per key; it needs no reference period."""

    _SHAPES: Final[dict[str, tuple[int, ...]]] = {
        "_fill": (),
        "_batch": (-1,),
        "_n": (),
        "_total": (),
        "_square": (),
        "_spread": (),
        "_near": (),
        "_next": (),
        "_recent": (int(_AFTER[-1]),),
        "_score": (),
        "_sudden": (),
    }
    _fill: Float64
    """(K,) samples in ``_batch`` (K, batch)."""
    _batch: Float64
    _n: Float64
    """(K,) batches."""
    _total: Float64
    """(K,) sum of their means, and of the squares of these."""
    _square: Float64
    _spread: Float64
    """(K,) sum of variances within batches."""
    _near: Float64
    """(K,) sum of half the mean squared difference of neighbours, and of samples with one between them. They tell the
    variance and its correlation whatever the mean does from batch to batch (von Neumann, 1941)."""
    _next: Float64
    _recent: Float64
    """(K, 32) means, the last one first."""
    _score: Float64
    _sudden: Float64
    """(K,) 1 where the last batch alone was an alarm."""

    def __init__(self, arl0: float, batch: int = BATCH) -> None:
        """``batch``: samples, at least 3 of them."""
        self.h = threshold(arl0, batch)
        self._size: Final = batch
        self.watches: Final = arl0 < _NEVER
        """Whether anything can be an alarm at all."""
        for name in self._SHAPES:
            setattr(self, name, self._none(name, 0))

    def _none(self, name: str, keys: int) -> Float64:
        return np.zeros((keys, *(self._size if n < 0 else n for n in self._SHAPES[name])))

    def grow(self, keys: int) -> None:
        """``keys`` new ones."""
        for name in self._SHAPES:
            setattr(self, name, np.concatenate([getattr(self, name), self._none(name, keys)]))

    def keep(self, rows: Bool) -> None:
        """Forgets all other keys (a mask (K,)), and moves these together."""
        for name in self._SHAPES:
            setattr(self, name, getattr(self, name)[rows])

    def reset(self, rows: Int64) -> None:
        """Forgets all that was seen of these keys."""
        for name in self._SHAPES:
            getattr(self, name)[rows] = 0

    def update(self, rows: Int64, counts: Int64, log_times: Float64) -> Int64:
        """Feeds R different keys ``counts`` (R,) samples each, one key's after the other's in ``log_times``.

        Returns (R,) the index among a key's samples of the one that raised an alarm, -1 without one. What comes after
        an alarm is not looked at.
        """
        alarm = np.full(len(rows), -1)
        first, used = np.cumsum(counts) - counts, np.zeros(len(rows), np.int64)
        place = np.arange(self._size)
        while (live := np.flatnonzero((used < counts) & (alarm < 0))).size:
            of, fill = rows[live], self._fill[rows[live]].astype(np.int64)
            taken = np.minimum(self._size - fill, counts[live] - used[live])
            new = (place >= fill[:, None]) & (place < (fill + taken)[:, None])
            at = first[live, None] + used[live, None] + place - fill[:, None]
            self._batch[of] = np.where(new, log_times[np.where(new, at, 0)], self._batch[of])
            used[live] += taken
            self._fill[of] = (fill + taken) % self._size
            whole = fill + taken == self._size
            raised = live[whole][self._one(of[whole])]
            alarm[raised] = used[raised] - 1
        return alarm

    def _one(self, rows: Int64) -> Bool:
        """A whole batch of each; whether it raised an alarm."""
        x, n = self._batch[rows], self._n[rows]
        ordered, half = np.sort(x, -1), (self._size - 1) / 2
        median = ordered[:, [math.floor(half), math.ceil(half)]].mean(-1, keepdims=True)
        within = np.where(n > 0, self._spread[rows] / np.maximum(n, 1), x.var(-1, ddof=1))
        reach = _OUTLIER * np.sqrt(np.maximum(within, _LEAST_SIGMA**2))[:, None]
        x = np.clip(x, median - reach, median + reach)
        self._spread[rows] += x.var(-1, ddof=1)
        self._near[rows] += (np.diff(x) ** 2).mean(-1) / 2
        self._next[rows] += ((x[:, 2:] - x[:, :-2]) ** 2).mean(-1) / 2

        mean, total, square = x.mean(-1), self._total[rows], self._square[rows]
        expected, linked = self._expected(rows, n + 1)
        before = total / np.maximum(n, 1)
        freedom = _FREEDOM + np.maximum(n - 1, 0)
        deviation = np.sqrt((_FREEDOM * expected + np.maximum(square - n * before**2, 0)) / freedom)
        off = np.abs(median[:, 0] - before)
        sudden = (n >= _BEFORE) & (off > _LEAST_SUDDEN) & (off > _SUDDEN * deviation)
        known = np.clip(mean, before - _FAR * deviation, before + _FAR * deviation)
        mean = np.where(n >= _BEFORE, known, mean)

        n, total, square = n + 1, total + mean, square + mean**2
        self._n[rows], self._total[rows], self._square[rows] = n, total, square
        recent = np.concatenate([mean[:, None], self._recent[rows, :-1]], -1)
        self._recent[rows] = recent
        score = _off(n, total, square, recent, expected, linked) / self.h
        self._score[rows], self._sudden[rows] = np.where(sudden, np.maximum(score, 2.0), score), sudden
        return np.asarray(self._score[rows] > 1)

    def _expected(self, rows: Int64, n: Float64) -> tuple[Float64, Float64]:
        """(R,) variance of a batch mean and correlation of two that follow each other, of samples with an
        autoregression of order 1: sigma^2 / B (1 + 2 sum (1 - k / B) phi^k), and what that leaves of the covariance
        (Anderson, The Statistical Analysis of Time Series, 1971)."""
        near = np.maximum(self._near[rows] / n, 1e-12)
        usual = _USUAL_BATCHES * (1 + _USUAL_CORRELATION) * near
        phi = np.clip((self._next[rows] + usual) / ((n + _USUAL_BATCHES) * near) - 1, 0, _MOST_CORRELATION)
        size = self._size
        longer = (1 + phi) / (1 - phi) - 2 * phi * (1 - phi**size) / (size * (1 - phi) ** 2)
        linked = phi * (1 - phi**size) ** 2 / (size * (1 - phi) ** 2) / longer
        return np.maximum(near / (1 - phi) * longer / size, _LEAST_SIGMA**2), linked

    def deviation(self, rows: Int64) -> Float64:
        """(R,) standard deviation of the mean of a batch's log times."""
        return np.sqrt(self._expected(rows, np.maximum(self._n[rows], 1))[0])

    def sudden(self, rows: Int64) -> Bool:
        """(R,) whether the last batch was off by so much that nobody has to look twice."""
        return self._sudden[rows] > 0

    def young(self, rows: Int64) -> Bool:
        """(R,) whether too little was seen of these keys to know what is usual."""
        return self._n[rows] < _BEFORE

    @property
    def score(self) -> Float64:
        """(K,) score over threshold; an alarm is above 1."""
        return self._score.copy()

    def state(self) -> dict[str, Any]:
        """Plain arrays, for a checkpoint. The threshold is not among them: it follows from the settings."""
        return {name.strip("_"): getattr(self, name) for name in self._SHAPES}

    def restore(self, state: dict[str, Any]) -> None:
        """After ``grow`` by the same keys."""
        for name in self._SHAPES:
            getattr(self, name)[:] = state[name.strip("_")]


def _off(n: Float64, total: Float64, square: Float64, recent: Float64, expected: Float64, linked: Float64) -> Float64:
    """(R,) how far the most conspicuous of the recent batches, up to the last, lie from all before them: a Student t of
    two samples, turned into a standard normal (Wallace, Annals of Mathematical Statistics, 1959). 0 with too few.
    """
    after = np.cumsum(recent, -1)[:, _AFTER - 1]
    after_square = np.cumsum(recent**2, -1)[:, _AFTER - 1]
    before_n = n[:, None] - _AFTER
    enough = before_n >= _BEFORE
    before_n = np.maximum(before_n, 1)
    before = (total[:, None] - after) / before_n
    spread = np.maximum(square[:, None] - after_square - before_n * before**2, 0)
    spread += np.maximum(after_square - after**2 / _AFTER, 0)
    freedom = _FREEDOM + before_n + _AFTER - 2
    variance = (_FREEDOM * expected[:, None] + spread) / freedom
    share = (1 + 2 * linked[:, None] * (1 - 1 / before_n)) / before_n
    share += (1 + 2 * linked[:, None] * (1 - 1 / _AFTER)) / _AFTER
    t2 = (after / _AFTER - before) ** 2 / (variance * share)
    z = (8 * freedom + 1) / (8 * freedom + 3) * np.sqrt(freedom * np.log1p(t2 / freedom))
    return np.asarray(np.where(enough, z, 0.0).max(-1))
