"""The Trigger Agent's detector: a two-sided CUSUM on log(time / expected), one per key.

For increments of unit variance and a drift allowance k, Siegmund (Sequential Analysis, 1985) gives the one-sided
run length to a false alarm as (exp(2 k b) - 2 k b - 1) / (2 k^2) with b = h + 1.166; both sides halve it. The
threshold h is solved for from the run length the user asks for, never set by hand.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

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
    into a standard normal. The increments are independent whatever the true parameters are, so the run length holds
    from the third sample on.
    """

    def __init__(self, arl0: float) -> None:
        self.h = threshold(arl0)
        self._n = np.zeros(0)
        self._mean = np.zeros(0)
        self._m2 = np.zeros(0)
        self._high = np.zeros(0)
        self._low = np.zeros(0)

    _ARRAYS = ("_n", "_mean", "_m2", "_high", "_low")

    def grow(self, keys: int) -> None:
        """Makes room for ``keys`` keys."""
        for name in self._ARRAYS:
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(keys - len(old))]))

    def reset(self, keys: int | slice | npt.NDArray[np.int64] = slice(None)) -> None:
        """Forgets everything about some keys, or all."""
        for name in self._ARRAYS:
            getattr(self, name)[keys] = 0

    def update(self, key: int, log_times: npt.NDArray[np.float64]) -> int | None:
        """Feeds one key's samples in order. Returns the index of the sample that raised an alarm, or None."""
        n, mean, m2 = self._n[key], self._mean[key], self._m2[key]
        high, low = self._high[key], self._low[key]
        alarm = None
        for i, x in enumerate(log_times.tolist()):
            if n >= 3:
                # With few samples the estimate of the deviation can be far too small.
                sigma = max(MIN_SIGMA, math.sqrt(m2 / (n - 1)))
                t = (x - mean) / sigma * math.sqrt(n / (n + 1))
                dof = n - 1
                z = math.copysign((8 * dof + 1) / (8 * dof + 3) * math.sqrt(dof * math.log1p(t * t / dof)), t)
                z = min(WINSOR, max(-WINSOR, z))
                high, low = max(0.0, high + z - ALLOWANCE), max(0.0, low - z - ALLOWANCE)
                if max(high, low) > self.h:
                    alarm = i
                    break
            n += 1
            delta = x - mean
            mean += delta / n
            m2 += delta * (x - mean)
        self._n[key], self._mean[key], self._m2[key] = n, mean, m2
        self._high[key], self._low[key] = high, low
        return alarm

    @property
    def score(self) -> npt.NDArray[np.float64]:
        """(K,) score over threshold; an alarm is 1."""
        return np.asarray(np.maximum(self._high, self._low) / self.h)

    def state(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def restore(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
