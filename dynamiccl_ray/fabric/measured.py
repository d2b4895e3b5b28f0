"""The measured fabric: response surfaces over tables of real measurements.

A surface says how long a collective took on one machine under every action that was tried there, as arrays
over (pair, channels) in the order of the action heads; NaN where nothing was measured. Sizes between measured
ones are interpolated, sizes outside are not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.curve import Curve
from dynamiccl_ray.fabric.measurements import (
    FORCED,
    NCCL,
    VENDOR,
    Measurements,
    Selection,
    read_measurements,
)
from dynamiccl_ray.keys import bytes_name
from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS, N_PROTOCOLS, OWN_PAIR

__all__ = [
    "Measurements",
    "NetworkPhase",
    "PhasedSurface",
    "Selection",
    "Surface",
    "oracle",
    "playable_keys",
    "read_measurements",
    "scaled",
    "valid",
]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

N_CHANNELS: Final = len(CHANNEL_VALUES)

TYPICAL_SIGMA: Final = 0.006
"""Noise of a surface on which nothing was repeated: the median over the repeated p5en runs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Surface:
    """Times of one collective on one machine by size, pair and channels."""

    selection: Selection
    curves: Mapping[tuple[int, int], Curve]
    """By (pair index, channel index); (0, 0) only where NCCL's own choice was measured."""
    vendor: Curve | None
    """The vendor's tuner; never part of an action's time."""
    belief: Belief | None
    """Stands in for NCCL's choice where that was not measured."""

    @classmethod
    def of(cls, measurements: Measurements, selection: Selection, belief: Belief | None = None) -> Surface:
        """The surface of a selection.

        Where NCCL's own choice was not measured, its time is that of the pair that ``belief`` says NCCL
        picks; without ``belief`` it is NaN. Raises what ``Selection.of`` does, and ConfigError where
        ``belief`` describes another number of ranks or nodes.
        """
        rows = selection.of(measurements)
        if belief is not None:
            comm = belief.communicator
            if (comm.nodes, comm.ranks) != (selection.nodes, selection.ranks):
                raise ConfigError(
                    f"the belief is of {comm.nodes} nodes and {comm.ranks} ranks; it must be of "
                    f"{selection.nodes} and {selection.ranks}, as the selection is"
                )
        curves = {}
        actions = rows.where((rows.chooser == FORCED) | (rows.chooser == NCCL))
        for pair, channels in sorted(set(zip(actions.pair.tolist(), actions.channels.tolist(), strict=True))):
            cell = (actions.pair == pair) & (actions.channels == channels)
            curves[pair, channels] = Curve.of(actions.nbytes[cell], actions.time_us[cell])
        tuned = rows.where(rows.chooser == VENDOR)
        vendor = Curve.of(tuned.nbytes, tuned.time_us) if len(tuned) else None
        return cls(selection=selection, curves=curves, vendor=vendor, belief=belief)

    @property
    def default_source(self) -> Literal["measured", "belief", "none"]:
        """Where the time of NCCL's own choice comes from."""
        if (OWN_PAIR, 0) in self.curves:
            return "measured"
        return "none" if self.belief is None else "belief"

    def time_us(self, nbytes: ArrayLike) -> Float64:
        """Median times in us for sizes of shape (K,): (K, 22, 9), NaN where that was not measured."""
        sizes = _sizes(nbytes)
        return self._table(sizes, {cell: curve.at(sizes) for cell, curve in self.curves.items()})

    def sigma(self, nbytes: ArrayLike) -> Float64:
        """Standard deviations of the log time for sizes of shape (K,): (K, 22, 9), NaN where ``time_us`` is.

        An action without repeats near a size gets the median over the other actions there: the root mean
        square would hand it the outliers of whichever pair is unstable.
        """
        sizes = _sizes(nbytes)
        sigma = self._table(sizes, {cell: curve.sigma(sizes) for cell, curve in self.curves.items()})
        time = self.time_us(sizes)
        sigma[np.isnan(time)] = np.nan
        for row in sigma:
            known = row[~np.isnan(row)]
            row[np.isnan(row)] = np.median(known) if known.size else TYPICAL_SIGMA
        sigma[np.isnan(time)] = np.nan
        return sigma

    def measured(self, nbytes: ArrayLike) -> Bool:
        """Whether exactly these sizes, shape (K,), were measured: (K, 22, 9)."""
        sizes = _sizes(nbytes)
        hits = {cell: np.isin(sizes, c.nbytes).astype(np.float64) for cell, c in self.curves.items()}
        return np.asarray(self._table(sizes, hits) == 1, np.bool_)

    def vendor_us(self, nbytes: ArrayLike) -> Float64:
        """Times in us under the vendor's tuner for sizes of shape (K,): (K,), NaN where not measured."""
        sizes = _sizes(nbytes)
        return np.full(sizes.shape, np.nan) if self.vendor is None else self.vendor.at(sizes)

    def _table(self, sizes: Int64, cells: Mapping[tuple[int, int], Float64]) -> Float64:
        table = np.full((len(sizes), N_PAIRS, N_CHANNELS), np.nan)
        for (pair, channels), values in cells.items():
            table[:, pair, channels] = values
        if self.default_source == "belief" and self.belief is not None:
            choice = self.belief.choose(self.selection.collective, sizes)
            chosen = 1 + N_PROTOCOLS * choice.algorithm + choice.protocol
            table[:, OWN_PAIR, 0] = table[np.arange(len(sizes)), chosen, 0]
        return table


def _sizes(nbytes: ArrayLike) -> Int64:
    sizes = np.asarray(nbytes, np.int64)
    if sizes.ndim != 1 or np.any(sizes < 1):
        raise ValueError(f"sizes are {sizes}; expected a vector of bytes, each at least 1")
    return sizes


def valid(time_us: Float64) -> Bool:
    """Which actions were measured; same shape as ``time_us``."""
    return np.isfinite(time_us)


def oracle(time_us: Float64) -> tuple[Float64, Int64, Int64]:
    """Time, pair index and channel index of the best valid action for times of shape (K, 22, 9); each (K,).

    The lowest pair, then channel index wins a tie. Raises ValueError where a key has no valid action.
    """
    flat = np.where(valid(time_us), time_us, np.inf).reshape(len(time_us), -1)
    best = flat.argmin(-1)
    best_us = flat[np.arange(len(flat)), best]
    if (lost := np.flatnonzero(np.isinf(best_us))).size:
        raise ValueError(f"key {lost[0]} has no valid action; each key needs at least one that is not NaN")
    pair, channels = np.divmod(best, time_us.shape[-1])
    return best_us, pair, channels


def playable_keys(surface: Surface) -> Int64:
    """Sizes in bytes, ascending, at which NCCL's own choice and two or more forced pairs were measured.

    Raises ConfigError where the surface has no time for NCCL's own choice, or no such size.
    """
    if surface.default_source == "none":
        raise ConfigError(
            f"{surface.selection} has no rows with algo=default, so NCCL's own choice has no time; "
            "add their source, or give the surface a Belief of the machine"
        )
    sizes = np.unique(np.concatenate([curve.nbytes for curve in surface.curves.values()]))
    measured = surface.measured(sizes)
    forced_pairs = measured[:, OWN_PAIR + 1 :].any(-1).sum(-1)
    keys = sizes[measured[:, OWN_PAIR, 0] & (forced_pairs >= 2)]
    if not keys.size:
        raise ConfigError(f"{surface.selection}: at no size were NCCL's own choice and two forced pairs measured")
    return np.asarray(keys, np.int64)


def scaled(surface: Surface, link_bandwidth: float, latency: float = 1.0) -> Surface:
    """The surface as it would be if links had their bandwidth and their latency times these factors.

    In the alpha-beta model N bytes take T = a + b N, so d log T / d log N = b N / T: the local log-log slope
    is the share s of the time that is bound by bandwidth. Every measured time becomes
    T (s / link_bandwidth + (1 - s) latency), action by action, so that the best action can change. An action
    measured at a single size has no slope and drops out. The noise stays, and so does what NCCL chooses: its
    model is fixed when a communicator is created. This is a what-if from measurements, not a measurement.
    Raises ConfigError for a factor that is not above 0.
    """
    for name, value in (("link_bandwidth", link_bandwidth), ("latency", latency)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name} is {value}; it must be a factor above 0, 1 for no change")

    def shifted(curve: Curve) -> Curve:
        share = curve.bandwidth_share()
        return replace(curve, time_us=curve.time_us * (share / link_bandwidth + (1 - share) * latency))

    curves = {cell: shifted(curve) for cell, curve in surface.curves.items() if len(curve.nbytes) > 1}
    vendor = surface.vendor
    return replace(
        surface,
        curves=curves,
        vendor=shifted(vendor) if vendor is not None and len(vendor.nbytes) > 1 else None,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkPhase:
    """A state of the network: the base, ``scaled``, or another selection in its place."""

    name: str
    surface: Surface


@dataclass(frozen=True, kw_only=True, eq=False)
class PhasedSurface:
    """What an emulated job plays: a base surface and the phases that may follow it."""

    base: Surface
    """Phase 0."""
    later: tuple[NetworkPhase, ...] = ()
    """Phases 1 and on."""

    def __post_init__(self) -> None:
        """Raise ConfigError where a phase is of another collective than the base."""
        for phase in self.later:
            if phase.surface.selection.collective != self.base.selection.collective:
                raise ConfigError(
                    f"phase {phase.name!r} is of {phase.surface.selection.collective.name.lower()}; "
                    f"it must be of {self.base.selection.collective.name.lower()}, as the base is"
                )

    @property
    def phases(self) -> tuple[NetworkPhase, ...]:
        """All phases, the base first."""
        return (NetworkPhase(name="base", surface=self.base), *self.later)

    def tables(self, nbytes: ArrayLike) -> tuple[Float64, Float64]:
        """Median times in us and standard deviations of their logs for sizes (K,): each (phases, K, 22, 9).

        An action must exist in every phase to exist in any; the others are NaN throughout. Raises ConfigError
        for a size where NCCL's own choice or every forced pair is missing.
        """
        sizes = _sizes(nbytes)
        time = np.stack([phase.surface.time_us(sizes) for phase in self.phases])
        sigma = np.stack([phase.surface.sigma(sizes) for phase in self.phases])
        everywhere: Bool = np.logical_and.reduce(valid(time), 0)
        for size, actions in zip(sizes.tolist(), everywhere, strict=True):
            if not actions[OWN_PAIR, 0]:
                missing = "the time of NCCL's own choice"
            elif not actions[OWN_PAIR + 1 :].any():
                missing = "a forced pair"
            else:
                continue
            raise ConfigError(
                f"{bytes_name(size)}: {missing} is not known in every phase; choose sizes from "
                "playable_keys(base), and phases that cover them"
            )
        return np.where(everywhere, time, np.nan), np.where(everywhere, sigma, np.nan)
