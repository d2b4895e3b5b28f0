"""How well a calibration predicts what it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.calibration.calibrated import Calibrated, Parameters
from dynamiccl_ray.calibration.samples import Machine
from dynamiccl_ray.calibration.spikes import spikes

Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

# A setting this close to the best is as good: runs of one session differ by a per cent, sessions by five.
_AS_GOOD: Final = 0.03
_SEVERAL_SCALES: Final = 3
# A median of fewer rows says nothing.
_LEAST_ROWS: Final = 3
# What is asked of a machine's median error.
_MOST_ERROR: Final = 0.2


def held_out(machine: Machine) -> Bool:
    """(rows,) about half of a machine's rows, which calibration does not see.

    Whole sizes and whole rank counts are held out, never the smallest or the largest: every third size at every rank
    count and every third rank count at every size; every second size where there are fewer than three rank counts.
    """
    ranks, sizes = np.unique(machine.ranks), np.unique(machine.nbytes)
    rank, size = np.searchsorted(ranks, machine.ranks), np.searchsorted(sizes, machine.nbytes)
    several = len(ranks) >= _SEVERAL_SCALES
    size_held = (size % (3 if several else 2) == 1) & (size < len(sizes) - 1)
    rank_held = (rank % 3 == 1) & (rank < len(ranks) - 1)
    return np.asarray(size_held | rank_held, np.bool_)


def judge(calibrated: Calibrated, machine: Machine) -> dict[str, Any]:
    """The report on one machine's rows. Rows that the model cannot price are counted, not judged."""
    physics_us = calibrated.physics_us(machine)
    priced = np.isfinite(physics_us)
    rows, physics_us = machine.where(priced), physics_us[priced]
    modelled_us = calibrated.corrected_us(rows, physics_us)
    error = np.abs(modelled_us / rows.time_us - 1)
    spiked = spikes(rows)
    regrets = winner_regrets(calibrated, rows.where(~spiked), modelled_us[~spiked])
    return {
        "machine": machine.name,
        "rows": len(rows),
        "median_abs_rel_error": _quantile(error, 0.5),
        "p90_abs_rel_error": _quantile(error, 0.9),
        "winner_accuracy": float(np.mean(regrets <= _AS_GOOD)) if len(regrets) else None,
        "winner_regret": float(regrets.mean()) if len(regrets) else None,
        "winner_cells": len(regrets),
        "equations_median_abs_rel_error": _quantile(np.abs(physics_us / rows.time_us - 1), 0.5),
        "rows_unpriced": len(machine) - len(rows),
        "rows_spiked": int(spiked.sum()),
    }


def winner_regrets(calibrated: Calibrated, rows: Machine, modelled_us: Float64) -> Float64:
    """(cells,) what following the model costs: measured time of its winner over the least measured, less 1.

    A cell is a collective, a scale and a size of one variant of the machine, where two or more settings were
    forced; of repeats, the medians count.
    """
    cells: dict[tuple[object, ...], dict[str, list[tuple[float, float]]]] = {}
    for forced, source, setting, measured, modelled, *cell in zip(
        rows.forced.tolist(),
        rows.source.tolist(),
        rows.settings.tolist(),
        rows.time_us.tolist(),
        modelled_us.tolist(),
        rows.collective.tolist(),
        rows.nodes.tolist(),
        rows.gpus_per_node.tolist(),
        rows.nbytes.tolist(),
        strict=True,
    ):
        if forced:
            key = (calibrated.variants.get(source, ""), *cell)
            cells.setdefault(key, {}).setdefault(setting, []).append((measured, modelled))
    regrets = []
    for settings in cells.values():
        if len(settings) > 1:
            measured, modelled = np.array([np.median(pairs, axis=0) for pairs in settings.values()]).T
            regrets.append(measured[modelled.argmin()] / measured.min() - 1)
    return np.array(regrets)


def overall(reports: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """Over machines: the share within 20 %, and winners over all cells and per machine."""
    errors = [r["median_abs_rel_error"] for r in reports if r["rows"]]
    judged = [r for r in reports if r["winner_cells"]]
    cells = sum(r["winner_cells"] for r in judged)
    return {
        "machines": len(reports),
        "median_of_median_errors": _quantile(np.array(errors), 0.5),
        "machines_above_20_percent": sum(error > _MOST_ERROR for error in errors),
        "winner_cells": cells,
        "winner_accuracy": sum(r["winner_accuracy"] * r["winner_cells"] for r in judged) / cells if cells else None,
        "winner_regret_mean_of_machines": float(np.mean([r["winner_regret"] for r in judged])) if judged else None,
    }


def _quantile(values: Float64, q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What came of one machine."""

    machine: Machine
    calibrated: Calibrated | None = None
    held: Bool
    """(rows,) that calibration did not see."""
    report: dict[str, Any] | None = None
    reason: str = ""
    """Why there is no report."""


def _judge_half(machine: Machine) -> Judged:
    held = held_out(machine)
    if (rows := int(held.sum())) < _LEAST_ROWS:
        reason = f"{rows} rows lie between other sizes or rank counts and could be held out; {_LEAST_ROWS} are needed"
        return Judged(machine=machine, held=held, reason=reason)
    try:
        calibrated = Calibrated.of(machine.where(~held))
    except ValueError as error:
        return Judged(machine=machine, held=held, reason=str(error))
    return Judged(machine=machine, calibrated=calibrated, held=held, report=judge(calibrated, machine.where(held)))


def _calibrate(machine: Machine) -> Judged:
    held = np.zeros(len(machine), np.bool_)
    try:
        calibrated = Calibrated.of(machine)
    except ValueError as error:
        return Judged(machine=machine, held=held, reason=str(error))
    return Judged(machine=machine, calibrated=calibrated, held=held, report=judge(calibrated, machine))


def validate_halves(machines: Sequence[Machine]) -> Iterator[Judged]:
    """Calibrates each machine on half of its rows and judges it on the other half."""
    return _spread(_judge_half, machines)


def calibrate(machines: Sequence[Machine]) -> Iterator[Judged]:
    """Calibrates each machine on all of its rows; the report is on the same rows."""
    return _spread(_calibrate, machines)


def validate(machines: Sequence[Machine], parameters: Parameters) -> Iterator[Judged]:
    """Judges calibrations on all rows. Raises ConfigError for a machine that was not calibrated."""
    for machine in machines:
        calibrated = parameters.of(machine)
        held = np.ones(len(machine), np.bool_)
        yield Judged(machine=machine, calibrated=calibrated, held=held, report=judge(calibrated, machine))


def _spread(work: Callable[[Machine], Judged], machines: Sequence[Machine]) -> Iterator[Judged]:
    """In order, in as many processes as there are cores."""
    if len(machines) == 1:
        yield work(machines[0])
        return
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, machines)
