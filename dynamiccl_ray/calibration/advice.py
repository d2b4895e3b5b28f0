"""Is tuning worth it on somebody's machines: NCCL's own time, the best setting, what that gains, size by size.

What was measured is taken as it is. Where NCCL's own choice was measured and nothing was forced, the gain is a forecast
with a 90 % interval: by the calibrated model where settings of the collective were forced at other sizes or scales of
the machine, and by NCCL's own times alone (``gains``) where none was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.calibration.calibrated import Calibrated
from dynamiccl_ray.calibration.cells import Cell, Shape, cells
from dynamiccl_ray.calibration.gains import INTERVAL, MODEL, Evidence, Forecast, by_shape
from dynamiccl_ray.calibration.model import variants_of
from dynamiccl_ray.calibration.samples import Machine
from dynamiccl_ray.calibration.spikes import spikes
from dynamiccl_ray.knobs import N_ALGORITHMS, N_PROTOCOLS, Collective

Float64 = NDArray[np.float64]
Basis = Literal["measured", "model", "own times", "silent", "own unknown"]
"""Where a gain comes from; ``silent``: nothing can be said; ``own unknown``: NCCL's own choice was not measured."""

WORTH: Final = 1.05
"""Less of a gain is what two sessions of one machine differ by."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size of one collective at one scale. Times in us."""

    machine: str
    run: str
    """Which of the machine's runs, where they disagree."""
    collective: str
    nodes: int
    gpus_per_node: int
    bytes: int
    default_us: float | None
    best: str | None
    """``tree/ll128``, ``ring/simple/8`` (channels), ``nccl`` for NCCL's own choice; None where nobody knows."""
    best_us: float | None
    gain: float | None
    """NCCL's own time over the best."""
    low: float | None
    high: float | None
    """90 % interval of the gain where it is a forecast; the gain itself where it was measured."""
    basis: Basis
    why: str = ""
    """Why nothing can be said."""

    @property
    def sure(self) -> bool:
        """Tuning gains more than noise."""
        return self.low is not None and self.low >= WORTH

    @property
    def open(self) -> bool:
        """What was measured does not say whether it does."""
        return not self.sure and self.basis != "measured" and (self.high is None or self.high >= WORTH)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def advise(machine: Machine) -> list[Row]:
    """A row for each cell of a machine, sizes within scales within collectives. The model is calibrated only where it
    is needed."""
    found = cells(machine)
    own = by_shape(found)
    forced = forced_collectives(found)
    bare = [cell for cell in found if cell.own_us is not None and not cell.forced_us]
    modelled = _modelled(machine, bare, forced)
    return [
        _row(machine.name, cell, own.get(cell.shape), modelled.get((cell.shape, cell.nbytes)), forced) for cell in found
    ]


def forced_collectives(found: Sequence[Cell]) -> set[tuple[str, int]]:
    """(Variant, collective) of which settings were forced."""
    return {cell.shape[:2] for cell in found if cell.forced_us}


def _row(
    name: str,
    cell: Cell,
    own: Evidence | None,
    modelled: tuple[str, float] | None,
    forced: set[tuple[str, int]],
) -> Row:
    run, collective, nodes, local = cell.shape
    row = Row(
        machine=name,
        run=run,
        collective=Collective(collective).name.lower(),
        nodes=nodes,
        gpus_per_node=local,
        bytes=cell.nbytes,
        default_us=cell.own_us,
        best=None,
        best_us=None,
        gain=None,
        low=None,
        high=None,
        basis="silent",
    )
    basis: Basis
    if cell.forced_us:
        basis = "own unknown" if cell.gain is None else "measured"
        setting, best_us = cell.best
        gain = cell.gain
        return replace(row, best=setting, best_us=best_us, gain=gain, low=gain, high=gain, basis=basis)
    assert cell.own_us is not None
    assert own is not None
    best = modelled[0] if modelled else None
    if modelled and (run, collective) in forced:
        basis, least, quantiles = "model", max(0.0, float(np.log(cell.own_us / modelled[1]))), MODEL
        best = best if least > 0 else "nccl"
    elif own.silent:
        return replace(row, best=best, why=own.silent)
    else:
        basis, least, quantiles = "own times", own.least[cell.nbytes], INTERVAL
    forecast = Forecast.at(least, own.spread, quantiles)
    return replace(
        row,
        best=best,
        best_us=cell.own_us / forecast.gain,
        gain=forecast.gain,
        low=forecast.low,
        high=forecast.high,
        basis=basis,
    )


def _modelled(
    machine: Machine, bare: Sequence[Cell], forced: set[tuple[str, int]]
) -> dict[tuple[Shape, int], tuple[str, float]]:
    """The calibrated model's fastest setting for cells, and its time: of those that were forced somewhere on the
    machine for the collective, or else of all pairs. Without what the model has no price for."""
    if not bare:
        return {}
    try:
        calibrated = Calibrated.of(machine)
    except ValueError:
        return {}
    return forecast_best(calibrated, machine, bare, forced)


def forecast_best(
    calibrated: Calibrated, machine: Machine, wanted: Sequence[Cell], forced: set[tuple[str, int]]
) -> dict[tuple[Shape, int], tuple[str, float]]:
    """As ``_modelled`` has them, by a calibration. ``forced`` has the (variant, collective) of which settings were."""
    settings = _settings(machine)
    asked = [
        (i, *setting)
        for i, cell in enumerate(wanted)
        for setting in (settings.get(cell.shape[:2], ()) if cell.shape[:2] in forced else _EVERY_PAIR)
    ]
    if not asked:
        return {}
    at, algorithm, protocol, channels = np.array(asked, np.int64).T
    run, collective, nodes, local = (np.array(column) for column in zip(*(c.shape for c in wanted), strict=True))
    priced = replace(
        machine,
        source=run[at],
        tuner=np.full(len(at), ""),
        collective=collective[at],
        nodes=nodes[at],
        gpus_per_node=local[at],
        algorithm=algorithm,
        protocol=protocol,
        channels=channels,
        nbytes=np.array([c.nbytes for c in wanted])[at],
        time_us=np.ones(len(at)),
    )
    times = calibrated.corrected_us(priced, calibrated.physics_us(priced))
    best: dict[tuple[Shape, int], tuple[str, float]] = {}
    for i, time, setting in zip(at.tolist(), times.tolist(), priced.settings.tolist(), strict=True):
        key = (wanted[i].shape, wanted[i].nbytes)
        if np.isfinite(time) and (key not in best or time < best[key][1]):
            best[key] = (setting, time)
    return best


_EVERY_PAIR: Final = tuple((a, p, 0) for a in range(N_ALGORITHMS) for p in range(N_PROTOCOLS))


def _settings(machine: Machine) -> dict[tuple[str, int], set[tuple[int, int, int]]]:
    """(Variant, collective) -> (algorithm, protocol, channels) that were forced; what is an artefact is left out."""
    variants = variants_of(machine.where(machine.tuner == ""))
    rows = machine.where(machine.forced & ~spikes(machine))
    found: dict[tuple[str, int], set[tuple[int, int, int]]] = {}
    for source, collective, *setting in zip(
        rows.source.tolist(),
        rows.collective.tolist(),
        rows.algorithm.tolist(),
        rows.protocol.tolist(),
        rows.channels.tolist(),
        strict=True,
    ):
        found.setdefault((variants[source], collective), set()).add(tuple(setting))
    return found
