"""How long one action takes by size, from repeated measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

# How far around a size its slope and its noise are looked for: an octave, which holds three to nine sizes.
_NEAR: Final = float(np.log(2)) + 1e-9
# Repeats that agree to the last printed digit do not mean that there is no noise.
_LEAST_SIGMA: Final = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Time against size of one action. Every array has shape (n,), sizes ascend and are distinct."""

    nbytes: Int64
    time_us: Float64
    """Median of the repeats."""
    log_scatter: Float64
    """Sum of squared deviations of the repeats' log times from their mean."""
    freedom: Int64
    """Degrees of freedom of ``log_scatter``: repeats less one."""

    @classmethod
    def of(cls, nbytes: Int64, time_us: Float64) -> Curve:
        """From single measurements in any order, repeats included; both have shape (rows,)."""
        sizes = np.unique(nbytes)
        repeats = [time_us[nbytes == size] for size in sizes]
        return cls(
            nbytes=sizes,
            time_us=np.array([np.median(times) for times in repeats]),
            log_scatter=np.array([np.log(times).var() * len(times) for times in repeats]),
            freedom=np.array([len(times) - 1 for times in repeats]),
        )

    def at(self, nbytes: Int64) -> Float64:
        """Time in us, straight in log-log between measured sizes, NaN outside; the shape of ``nbytes``."""
        log_time = np.interp(np.log(nbytes), np.log(self.nbytes), np.log(self.time_us), left=np.nan, right=np.nan)
        return np.asarray(np.exp(log_time), np.float64)

    def sigma(self, nbytes: Int64) -> Float64:
        """Standard deviation of the log time, pooled over an octave to each side; NaN if nothing was repeated
        there. ``nbytes`` and the result have shape (K,)."""
        near = np.abs(np.log(nbytes)[:, None] - np.log(self.nbytes)) <= _NEAR
        freedom = near @ self.freedom
        variance = near @ self.log_scatter / np.maximum(freedom, 1)
        return np.where(freedom > 0, np.maximum(np.sqrt(variance), _LEAST_SIGMA), np.nan)

    def bandwidth_share(self) -> Float64:
        """Share of the time that grows with bytes, (n,) from 0 to 1: the slope of log time over log bytes, by
        least squares over an octave to each side and at least the next size. Needs two sizes."""
        x, y, index = np.log(self.nbytes), np.log(self.time_us), np.arange(len(self.nbytes))
        near = (np.abs(x[:, None] - x) <= _NEAR) | (np.abs(index[:, None] - index) <= 1)
        dx = np.where(near, x - (near @ x / near.sum(1))[:, None], 0)
        return np.asarray(np.clip(dx @ y / (dx**2).sum(1), 0, 1), np.float64)
