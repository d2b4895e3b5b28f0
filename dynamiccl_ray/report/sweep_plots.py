"""The figures of a sweep: parallel coordinates, the metric over each key, learning curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from dynamiccl_ray.figures import png, style
from dynamiccl_ray.report.values import value_name

_DEFAULT: Final = "#D55E00"
_WIDE: Final = 20.0
"""From this ratio of the most to the least on, an axis is logarithmic."""
_MOST_TICKS: Final = 8


class _Axis:
    """Where the values of one key lie, from 0 to 1: by their logarithm where they span much, one after the other where
    they are no numbers."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.named = not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if self.named:
            self._names = list(dict.fromkeys(map(value_name, values)))
            return
        self.log = min(values) > 0 and max(values) / min(values) >= _WIDE
        self.least, self.most = self._scaled(min(values)), self._scaled(max(values))
        self._values = sorted(set(values))

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def place(self, value: Any) -> float:
        """Of one of the values."""
        if self.named:
            return (self._names.index(value_name(value)) + 0.5) / len(self._names)
        return (self._scaled(value) - self.least) / (self.most - self.least) if self.most > self.least else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        """Places and what stands there."""
        if self.named:
            return [((i + 0.5) / len(self._names), name) for i, name in enumerate(self._names)]
        if len(self._values) <= _MOST_TICKS:
            return [(self.place(v), value_name(v)) for v in self._values]
        steps = np.linspace(self.least, self.most, 5)
        return [(i / 4, f"{10**x if self.log else x:.3g}") for i, x in enumerate(steps)]


def parallel_coordinates(result: Mapping[str, Any]) -> bytes | None:
    """PNG: a line for each trial through its values to its metric; None where no trial has one."""
    trials = _scored(result)
    if not trials:
        return None
    keys = list(trials[0]["params"])
    columns = [*([t["params"][key] for t in trials] for key in keys), [t["metric"] for t in trials]]
    axes_of = [_Axis(column) for column in columns]
    with style():
        figure = Figure(figsize=(max(7.0, 1.9 * len(columns)), 4.4))
        axes = figure.subplots()
        axes.grid(False)
        axes.set_axis_off()
        colour = _colours(result, trials)
        for trial in reversed(_by_rank(result, trials)):
            row = [*trial["params"].values(), trial["metric"]]
            places = [axis.place(value) for axis, value in zip(axes_of, row, strict=True)]
            axes.plot(range(len(columns)), places, **_line(result, trial, colour))
        for x, (axis, name) in enumerate(zip(axes_of, [*keys, result["metric"]], strict=True)):
            axes.axvline(x, color="#555555", lw=0.8)
            axes.text(x, 1.06, name, ha="center", weight="bold", fontsize=9)
            for place, words in axis.ticks():
                axes.text(x + 0.02, place, words, fontsize=8, va="center", backgroundcolor=(1, 1, 1, 0.6))
        axes.set_ylim(-0.05, 1.12)
        return png(figure)


def each_key(result: Mapping[str, Any]) -> bytes | None:
    """PNG: a panel for each key, the metric of every trial over its value, with its standard error."""
    trials = _scored(result)
    if not trials:
        return None
    keys = list(trials[0]["params"])
    columns = min(3, len(keys))
    rows = -(-len(keys) // columns)
    with style():
        figure = Figure(figsize=(3.1 * columns + 0.6, 2.7 * rows))
        panels: list[Axes] = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
        for panel, key in zip(panels, keys, strict=False):
            axis = _Axis([t["params"][key] for t in trials])
            for trial in trials:
                own = trial["id"] == 0
                panel.errorbar(
                    axis.place(trial["params"][key]),
                    trial["metric"],
                    yerr=trial["error"],
                    fmt="D" if own else "o",
                    ms=6 if own else 4,
                    color=_DEFAULT if own else "#0072B2",
                    elinewidth=0.8,
                )
            ticks = axis.ticks()
            panel.set_xticks([place for place, _ in ticks], [words for _, words in ticks], rotation=30, ha="right")
            panel.set_title(key)
        for panel in panels[len(keys) :]:
            panel.set_axis_off()
        for panel in panels[::columns]:
            panel.set_ylabel(result["metric"])
        return png(figure)


def curves(result: Mapping[str, Any]) -> bytes | None:
    """PNG: the metric of each trial over its reports or collectives; None where none has two points."""
    trials = [t for t in _scored(result) if len(t["curve"]) > 1]
    if not trials:
        return None
    with style():
        figure = Figure(figsize=(9, 4.2))
        axes = figure.subplots()
        colour = _colours(result, trials)
        for trial in reversed(_by_rank(result, trials)):
            x, y = zip(*trial["curve"], strict=True)
            axes.plot(x, y, **_line(result, trial, colour))
        online = result["kind"] == "experiment"
        axes.set_xlabel("collectives of the first seed's run" if online else "reports")
        axes.set_ylabel("regret so far, over all collectives" if online else result["metric"])
        return png(figure)


def _scored(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [trial for trial in result["trials"] if trial["metric"] is not None]


def _by_rank(result: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The best first; the target as it is before all, to be drawn last."""
    sign = 1 if result["goal"] == "min" else -1
    return sorted(trials, key=lambda t: (t["id"] != 0, t["id"] != result["best"]["id"], sign * t["metric"]))


def _colours(result: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> Any:
    """Metric -> colour: dark is good."""
    metrics = [trial["metric"] for trial in trials]
    scale = Normalize(min(metrics), max(metrics))
    shades = matplotlib.colormaps["viridis" if result["goal"] == "min" else "viridis_r"]
    return lambda metric: shades(0.9 * float(scale(metric)))


def _line(result: Mapping[str, Any], trial: Mapping[str, Any], colour: Any) -> dict[str, Any]:
    if trial["id"] == 0:
        return {"color": _DEFAULT, "ls": (0, (4, 2)), "lw": 2.0}
    best = trial["id"] == result["best"]["id"]
    return {"color": colour(trial["metric"]), "lw": 2.6 if best else 1.1, "alpha": 1.0 if best else 0.75}
