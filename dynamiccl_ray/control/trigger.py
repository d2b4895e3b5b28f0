"""The Trigger Agent's detector: a two-sided CUSUM on log(time / expected), one per key.

For increments of unit variance and a drift allowance k, Siegmund (Sequential Analysis, 1985) gives the one-sided
run length to a false alarm as (exp(2 k b) - 2 k b - 1) / (2 k^2) with b = h + 1.166; both sides halve it. The
threshold h is solved for from the run length the user asks for, never set by hand.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from scipy.optimize import brentq

from dynamiccl_ray.arrays import Bool, Float64, Int64

# Drift allowance in standard deviations: shifts of twice this are found fastest.
ALLOWANCE: Final = 1.0
# Measured times have heavy tails; one outlier must not be an alarm on its own.
WINSOR: Final = 4.0
# Below this, session effects rather than noise decide: repeats on p5en differ by 0.6 % within a session.
MIN_SIGMA: Final = 0.01

_SIEGMUND: Final = 1.166


def threshold(arl0: float, allowance: float = ALLOWANCE) -> float:
    """CUSUM threshold h, in standard deviations, for one false alarm in ``arl0`` samples of a key.

    Raises ValueError unless arl0 > 2.
    """
    if not arl0 > 2:
        raise ValueError(f"arl0 is {arl0}; expected more than 2 samples")

    def excess(h: float) -> float:
        x = 2 * allowance * (h + _SIEGMUND)
        return (math.exp(x) - x - 1) / (2 * allowance**2) / 2 - arl0

    return float(brentq(excess, -_SIEGMUND, 200 / allowance))


class Cusum:
    """One self-starting detector per key: it needs no reference period and no known mean or deviation.

    Hawkins (Journal of Quality Technology, 1987): each sample is compared with the mean and deviation of the samples
    before it, which gives a Student t; Wallace's approximation (Annals of Mathematical Statistics, 1959) turns that
    into a standard normal. Of samples that are independent and normal the increments are independent whatever their
    mean and deviation are, so the run length holds from the third sample on. Of correlated ones they are not, and it
    is shorter.
    """

    _ARRAYS: Final = ("_n", "_mean", "_m2", "_high", "_low")

    def __init__(self, arl0: float) -> None:
        self.h = threshold(arl0)
        self._n = np.zeros(0)
        self._mean = np.zeros(0)
        self._m2 = np.zeros(0)
        self._high = np.zeros(0)
        self._low = np.zeros(0)

    def grow(self, keys: int) -> None:
        """``keys`` new ones."""
        for name in self._ARRAYS:
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(keys)]))

    def keep(self, rows: Bool) -> None:
        """Forgets all other keys (a mask (K,)), and moves these together."""
        for name in self._ARRAYS:
            setattr(self, name, getattr(self, name)[rows])

    def reset(self, rows: Int64) -> None:
        """Forgets all that was seen of these keys."""
        for name in self._ARRAYS:
            getattr(self, name)[rows] = 0

    def update(self, rows: Int64, counts: Int64, log_times: Float64) -> Int64:
        """Feeds R different keys ``counts`` (R,) samples each, one key's after the other's in ``log_times``.

        Returns (R,) the index among a key's samples of the one that raised an alarm, -1 without one. What comes after
        an alarm is not looked at.
        """
        alarm = np.full(len(rows), -1)
        first = np.cumsum(counts) - counts
        for i in range(int(counts.max(initial=0))):
            live = np.flatnonzero((counts > i) & (alarm < 0))
            alarm[live[self._one(rows[live], log_times[first[live] + i])]] = i
        return alarm

    def _one(self, rows: Int64, x: Float64) -> Bool:
        """One sample of each; whether it raised an alarm."""
        n, mean, m2 = self._n[rows], self._mean[rows], self._m2[rows]
        known = n >= 3
        dof = np.where(known, n - 1, 2.0)
        # With few samples the estimate of the deviation can be far too small.
        sigma = np.maximum(MIN_SIGMA, np.sqrt(m2 / dof))
        t = (x - mean) / sigma * np.sqrt(n / (n + 1))
        z = np.copysign((8 * dof + 1) / (8 * dof + 3) * np.sqrt(dof * np.log1p(t * t / dof)), t)
        z = np.where(known, np.clip(z, -WINSOR, WINSOR), ALLOWANCE)
        high = np.where(known, np.maximum(0.0, self._high[rows] + z - ALLOWANCE), 0.0)
        low = np.where(known, np.maximum(0.0, self._low[rows] - z - ALLOWANCE), 0.0)
        delta = x - mean
        mean = mean + delta / (n + 1)
        self._n[rows], self._mean[rows], self._m2[rows] = n + 1, mean, m2 + delta * (x - mean)
        self._high[rows], self._low[rows] = high, low
        return np.asarray(np.maximum(high, low) > self.h)

    @property
    def score(self) -> Float64:
        """(K,) score over threshold; an alarm is above 1."""
        return np.asarray(np.maximum(self._high, self._low) / self.h)

    def state(self) -> dict[str, Any]:
        """Plain arrays, for a checkpoint. The threshold is not among them: it follows from the settings."""
        return {name.strip("_"): getattr(self, name) for name in self._ARRAYS}

    def restore(self, state: dict[str, Any]) -> None:
        """After ``grow`` by the same keys."""
        for name in self._ARRAYS:
            getattr(self, name)[:] = state[name.strip("_")]
