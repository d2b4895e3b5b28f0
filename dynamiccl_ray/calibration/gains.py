"""What tuning could gain where nothing was forced: an interval from NCCL's own times alone.

A collective need not take longer than a larger one of its kind: it could be padded. So NCCL's own time at a size over
its least time at that size or above is a gain that is there; call its log, less what two sessions differ by, p. What is
to be had beyond p is not known from these times. How far it reached on machines of which settings were measured is:
there, (log of the gain - p) / s has quantiles that ``INTERVAL`` keeps, where s is what two sessions differ by plus how
unevenly NCCL's own times grow from size to size. NCCL changes its mind where they jump, and its mistakes are there.

This is a conformal interval with a normalised score (Papadopoulos, Vovk, Gammerman 2011). ``others`` has the
quantiles that leave a machine out which is to be judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.calibration.cells import Cell, Shape
from dynamiccl_ray.calibration.cells import cells as cells_of
from dynamiccl_ray.calibration.samples import Machine

Float64 = NDArray[np.float64]

SESSION: Final = 0.05
"""Two sessions of one machine differ by so much, in logs."""
LEAST_SIZES: Final = 5
"""Of which NCCL's own choice must have been measured before its times say how evenly they grow."""
# No network takes so long for a small message: something else is being measured, such as ranks that share a GPU.
_SMALL_BYTES: Final = 65536
_SLOW_US: Final = 1000.0


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Of scores, over cells of machines."""

    low: float
    """5 %"""
    middle: float
    high: float
    """95 %"""

    @classmethod
    def of(cls, scores: Float64) -> Quantiles:
        """Of at least one score; the least interval that has 90 % holds 0."""
        low, middle, high = np.quantile(scores, [0.05, 0.5, 0.95], method="inverted_cdf")
        return cls(low=min(0.0, float(low)), middle=float(middle), high=max(0.0, float(high)))


INTERVAL: Final = Quantiles(low=0.0, middle=0.066, high=1.806)
"""Over 261 cells of 16 machines of which NCCL's own choice and forced settings were measured; by
``benchmarks/gain_interval.py``."""
MODEL: Final = Quantiles(low=-1.424, middle=-0.0395, high=0.270)
"""The same where p is what a calibrated model says, and settings were forced at other sizes or scales: 149 cells."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A gain: NCCL's own time over the best, at least 1."""

    gain: float
    low: float
    high: float
    """``low`` to ``high`` is a 90 % interval."""

    @classmethod
    def at(cls, least: float, spread: float, quantiles: Quantiles) -> Forecast:
        """From p and s, as the module has them."""
        low, middle, high = (
            float(np.exp(max(0.0, least + q * spread))) for q in (quantiles.low, quantiles.middle, quantiles.high)
        )
        return cls(gain=middle, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What NCCL's own times at one shape say of each size."""

    least: Mapping[int, float]
    """Bytes -> log of the gain that is there."""
    spread: float
    """s of the module."""
    silent: str
    """Why nothing can be said; empty where it can."""


def evidence(own_us: Mapping[int, float]) -> Evidence:
    """Of one shape: bytes -> time of NCCL's own choice in us."""
    sizes = sorted(own_us)
    x, y = np.log(np.array(sizes, np.float64)), np.log(np.array([own_us[size] for size in sizes]))
    least_after = np.minimum.accumulate(y[::-1])[::-1]
    silent = ""
    small = [own_us[size] for size in sizes if size <= _SMALL_BYTES]
    if len(sizes) < LEAST_SIZES:
        silent = f"{len(sizes)} sizes were measured, and it takes {LEAST_SIZES}"
    elif small and min(small) > _SLOW_US:
        silent = f"a small message takes {min(small):.0f} us, which no network does: ranks may share a GPU"
    return Evidence(
        least=dict(zip(sizes, np.maximum(0, y - least_after - SESSION).tolist(), strict=True)),
        spread=SESSION + _roughness(x, y),
        silent=silent,
    )


def _roughness(x: Float64, y: Float64) -> float:
    """Root mean square distance of the inner points from the straight line between their neighbours."""
    if len(x) < 3:
        return 0.0
    share = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    bend = y[1:-1] - (1 - share) * y[:-2] - share * y[2:]
    return float(np.sqrt(np.mean(bend**2)))


def by_shape(cells: Sequence[Cell]) -> dict[Shape, Evidence]:
    """Of every shape of which NCCL's own choice was measured."""
    own: dict[Shape, dict[int, float]] = {}
    for cell in cells:
        if cell.own_us is not None:
            own.setdefault(cell.shape, {})[cell.nbytes] = cell.own_us
    return {shape: evidence(times) for shape, times in own.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """Cells of one machine of which the gain was measured and could have been forecast; arrays of their number."""

    name: str
    file: str
    """Of its measurements: machines of one file are not strangers to each other."""
    gain: Float64
    least: Float64
    spread: Float64
    silent: int
    """Cells of which nothing could have been said."""

    @classmethod
    def of(cls, machine: Machine) -> Scored:
        """What was forced is only used for the gain."""
        cells = cells_of(machine)
        shapes = by_shape(cells)
        judged = [(cell, shapes[cell.shape]) for cell in cells if cell.gain is not None]
        said = [(cell, of) for cell, of in judged if not of.silent]
        return cls(
            name=machine.name,
            file=machine.file,
            gain=np.array([cell.gain for cell, _ in said], np.float64),
            least=np.array([of.least[cell.nbytes] for cell, of in said]),
            spread=np.array([of.spread for _, of in said]),
            silent=len(judged) - len(said),
        )

    @property
    def scores(self) -> Float64:
        return np.asarray((np.log(self.gain) - self.least) / self.spread)

    def forecasts(self, quantiles: Quantiles) -> list[Forecast]:
        return [Forecast.at(p, s, quantiles) for p, s in zip(self.least.tolist(), self.spread.tolist(), strict=True)]


def others(machine: Scored, machines: Sequence[Scored]) -> Quantiles:
    """Of the scores of all machines of other files. Raises ValueError where there are none."""
    scores = [other.scores for other in machines if other.file != machine.file]
    if not scores:
        raise ValueError(f"{machine.name}: no machine of another file; leaving it out takes some")
    return Quantiles.of(np.concatenate(scores))
