"""A picture of what tuning gains, measured or forecast, over sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from dynamiccl_ray.calibration.advice import WORTH, Row
from dynamiccl_ray.figures import png
from dynamiccl_ray.keys import bytes_name

_COLUMNS: Final = 3
# More panels cannot be read; those with the largest gains are shown.
_MOST_PANELS: Final = 12


def draw_gains(rows: Sequence[Row]) -> bytes:
    """PNG: NCCL's own time over the best by size, a panel for each collective, scale and machine; bars are 90 %
    intervals of what is a forecast."""
    panels: dict[tuple[str, str, str, int, int], list[Row]] = {}
    for row in rows:
        if row.gain is not None:
            panels.setdefault((row.machine, row.run, row.collective, row.nodes, row.gpus_per_node), []).append(row)
    kept = sorted(panels, key=lambda shape: -max(row.gain or 1 for row in panels[shape]))[:_MOST_PANELS]
    columns = max(1, min(_COLUMNS, len(kept)))
    lines = max(1, -(-len(kept) // columns))
    figure = Figure(figsize=(4.4 * columns, 3.2 * lines), layout="constrained")
    figure.supylabel("NCCL's own time over the best; bars: 90 %", fontsize=9)
    axes = figure.subplots(lines, columns, squeeze=False)
    for unused in axes.flat[len(kept) :]:
        unused.axis("off")
    for axis, shape in zip(axes.flat, kept, strict=False):
        of = panels[shape]
        known = [row for row in of if row.basis == "measured"]
        guess = [row for row in of if row.basis != "measured"]
        axis.plot([r.bytes for r in known], [r.gain for r in known], "o-", markersize=3, color="#0072B2")
        for row in guess:
            assert row.low is not None
            assert row.high is not None
            axis.plot([row.bytes] * 2, [row.low, row.high], color="#D55E00", linewidth=2, alpha=0.6)
        axis.plot([r.bytes for r in guess], [r.gain for r in guess], ".", color="#D55E00")
        axis.axhline(WORTH, color="#888888", linewidth=0.8, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda size, _: bytes_name(max(1, round(size))))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.tick_params(axis="x", labelrotation=45)
        axis.set_title(f"{shape[0]}\n{shape[2]}, {shape[3]} x {shape[4]} GPUs", fontsize=8)
        axis.set_ylim(bottom=0.97)
    return png(figure)
