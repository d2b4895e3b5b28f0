"""A picture of how a calibration meets a machine's measured times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from dynamiccl_ray.calibration.calibrated import Calibrated
from dynamiccl_ray.calibration.model import scales
from dynamiccl_ray.calibration.samples import Machine
from dynamiccl_ray.figures import png
from dynamiccl_ray.keys import bytes_name
from dynamiccl_ray.knobs import Collective

Float64 = NDArray[np.float64]

# Okabe and Ito's colours, told apart with any colour vision.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# More panels, or more lines in one, cannot be read: the scales and settings with the most rows are shown.
_MOST_PANELS: Final = 4
_MOST_LINES: Final = len(_COLOURS)


def draw_machine(calibrated: Calibrated, machine: Machine, held: NDArray[np.bool_], report: Mapping[str, Any]) -> bytes:
    """PNG: measured and modelled time by size, a panel per collective and scale; below, modelled over measured.

    ``held`` marks the rows of ``machine`` that calibration did not see.
    """
    physics_us = calibrated.physics_us(machine)
    priced = np.isfinite(physics_us)
    rows, seen = machine.where(priced), ~held[priced]
    modelled_us = calibrated.corrected_us(rows, physics_us[priced])
    settings = rows.settings
    panels = _most(
        [
            ((c, *scale), int(np.sum((rows.collective == c) & _at(rows, scale))))
            for c in np.unique(rows.collective).tolist()
            for scale in scales(rows)
        ],
        _MOST_PANELS,
    )
    names = _most([(name, int(np.sum(settings == name))) for name in np.unique(settings).tolist()], _MOST_LINES)
    figure = Figure(figsize=(4.2 * len(panels) + 0.6, 6.4), layout="constrained")
    figure.suptitle(_title(report))
    axes = figure.subplots(2, len(panels), squeeze=False, sharex="col", sharey="row", height_ratios=(2, 1))
    for column, (collective, *scale) in enumerate(panels):
        here = (rows.collective == collective) & _at(rows, (scale[0], scale[1]))
        for colour, name in zip(_COLOURS, names, strict=False):
            _line(axes[:, column], rows, modelled_us, here & (settings == name), seen, colour)
        what = Collective(collective).name.lower().replace("_", "-")
        axes[0, column].set_title(f"{what}, {scale[0]} x {scale[1]} GPUs", fontsize=10)
        axes[1, column].set_xlabel("size")
        axes[1, column].xaxis.set_major_formatter(lambda size, _: bytes_name(max(1, round(size))))
        axes[1, column].tick_params(axis="x", labelrotation=45)
        axes[1, column].axhspan(0.8, 1.25, color="#eeeeee", zorder=0)
    axes[0, 0].set_ylabel("time, us")
    axes[1, 0].set_ylabel("modelled / measured")
    handles = [Line2D([], [], color=colour, label=name) for colour, name in zip(_COLOURS, names, strict=False)]
    handles.append(Line2D([], [], color="#777777", marker="o", linestyle="", label="measured, held out"))
    handles.append(
        Line2D([], [], color="#777777", marker="o", linestyle="", markerfacecolor="none", label="calibrated on")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False)
    return png(figure)


def _line(
    axes: NDArray[Any],
    rows: Machine,
    modelled_us: Float64,
    here: NDArray[np.bool_],
    seen: NDArray[np.bool_],
    colour: str,
) -> None:
    if not here.any():
        return
    times: Axes
    times, ratios = axes
    order = np.flatnonzero(here)[np.argsort(rows.nbytes[here], kind="stable")]
    times.loglog(rows.nbytes[order], modelled_us[order], color=colour, linewidth=1.2, base=2)
    times.set_yscale("log", base=10)
    for mask, face in ((here & seen, "none"), (here & ~seen, colour)):
        for panel, values in ((times, rows.time_us), (ratios, modelled_us / rows.time_us)):
            panel.scatter(rows.nbytes[mask], values[mask], s=14, edgecolors=colour, facecolors=face, linewidths=0.7)
    ratios.set_yscale("log", base=2)


def _at(rows: Machine, scale: tuple[int, int]) -> NDArray[np.bool_]:
    return np.asarray((rows.nodes == scale[0]) & (rows.gpus_per_node == scale[1]), np.bool_)


def _most(counted: list[tuple[Any, int]], limit: int) -> list[Any]:
    """The items with the most rows, in their own order."""
    kept = sorted((item for item in counted if item[1]), key=lambda item: -item[1])[:limit]
    return sorted(item for item, _ in kept)


def _title(report: Mapping[str, Any]) -> str:
    words = f"{report['machine']}: median error {report['median_abs_rel_error']:.1%} over {report['rows']} rows"
    if report["winner_accuracy"] is not None:
        words += f"; winner right in {report['winner_accuracy']:.0%} of {report['winner_cells']} cells"
    return words
