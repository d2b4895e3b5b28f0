"""How wide the interval of a gain has to be, and whether it holds: ``python benchmarks/gain_interval.py DIR OUT.json``.

DIR has measurements of many machines (docs/calibration.md). On those of which NCCL's own choice and forced settings
were measured, the forced rows are hidden, the gain is forecast with the quantiles of the machines of all other files,
and compared with what was measured. ``interval`` are the quantiles over all machines: what ``calibration/gains.py`` and
``calibration/advice.py`` keep.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.calibration.advice import forced_collectives, forecast_best
from dynamiccl_ray.calibration.calibrated import Calibrated
from dynamiccl_ray.calibration.cells import cells, joined
from dynamiccl_ray.calibration.gains import Forecast, Quantiles, Scored, by_shape, others
from dynamiccl_ray.calibration.samples import Machine, read_library
from dynamiccl_ray.calibration.validate import held_out


def judged(directory: Path) -> dict[str, Any]:
    """The document: of NCCL's own times alone, and of the model."""
    machines = joined(read_library(directory).machines)
    return {"own_times": of_own_times(machines), "model": of_the_model(machines)}


def of_own_times(machines: Sequence[Machine]) -> dict[str, Any]:
    """All forced rows are hidden."""
    scored = [Scored.of(machine) for machine in machines]
    said = [machine for machine in scored if len(machine.gain)]
    rows, held, width = [], [], []
    for machine in said:
        quantiles = others(machine, said)
        forecasts = machine.forecasts(quantiles)
        inside = [f.low <= gain <= f.high for f, gain in zip(forecasts, machine.gain.tolist(), strict=True)]
        wide = [f.high / f.low for f in forecasts]
        rows.append(
            {
                "machine": machine.name,
                "cells": len(inside),
                "held": float(np.mean(inside)),
                "median_width": float(np.median(wide)),
                "median_gain": float(np.median(machine.gain)),
                "most_gain": float(machine.gain.max()),
                "quantiles_of_others": vars(quantiles),
            }
        )
        held += inside
        width += wide
    return {
        "machines": rows,
        "cells": len(held),
        "held": float(np.mean(held)),
        "median_width": float(np.median(width)),
        "p90_width": float(np.quantile(width, 0.9)),
        "silent": {machine.name: machine.silent for machine in scored if machine.silent},
        "interval": vars(Quantiles.of(np.concatenate([machine.scores for machine in said]))),
    }


def of_the_model(machines: Sequence[Machine]) -> dict[str, Any]:
    """The forced rows of every other size, or third rank count, are hidden."""
    found = {machine.name: (machine.file, _hidden(machine)) for machine in machines}
    found = {name: (file, gains) for name, (file, gains) in found.items() if len(gains)}
    rows, held, width = [], [], []
    for name, (file, gains) in found.items():
        true, said, spread = gains.T
        quantiles = Quantiles.of(np.concatenate([_scores(of) for other, of in found.values() if other != file]))
        forecasts = [Forecast.at(p, s, quantiles) for p, s in zip(said.tolist(), spread.tolist(), strict=True)]
        inside = [f.low <= gain <= f.high for f, gain in zip(forecasts, np.exp(true).tolist(), strict=True)]
        rows.append({"machine": name, "cells": len(gains), "held": float(np.mean(inside))})
        held += inside
        width += [f.high / f.low for f in forecasts]
    return {
        "machines": rows,
        "cells": len(held),
        "held": float(np.mean(held)),
        "median_width": float(np.median(width)),
        "interval": vars(Quantiles.of(np.concatenate([_scores(gains) for _, gains in found.values()]))),
    }


def _scores(gains: NDArray[np.float64]) -> NDArray[np.float64]:
    true, said, spread = gains.T
    return np.asarray((true - said) / spread)


def _hidden(machine: Machine) -> NDArray[np.float64]:
    """(hidden cells, 3): logs of the measured gain and of the model's, and the spread of NCCL's own times."""
    true = {(cell.shape[1:], cell.nbytes): cell.gain for cell in cells(machine) if cell.gain is not None}
    seen = machine.where(~(machine.forced & held_out(machine)))
    found = cells(seen)
    forced, own = forced_collectives(found), by_shape(found)
    hidden = [
        cell
        for cell in found
        if cell.own_us is not None
        and not cell.forced_us
        and cell.shape[:2] in forced
        and (cell.shape[1:], cell.nbytes) in true
    ]
    if not hidden:
        return np.empty((0, 3))
    best = forecast_best(Calibrated.of(seen), seen, hidden, forced)
    return np.array(
        [
            (
                np.log(true[cell.shape[1:], cell.nbytes]),
                max(0.0, np.log((cell.own_us or 0.0) / best[cell.shape, cell.nbytes][1])),
                own[cell.shape].spread,
            )
            for cell in hidden
        ]
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(judged(Path(sys.argv[1])), indent=1) + "\n")
