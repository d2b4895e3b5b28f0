"""The figures of a report.

Colours are those of Okabe and Ito, told apart with any colour vision. A role (NCCL's choice, the vendor's tuner, the
learned choice) and an algorithm have the same colour in every figure; protocols are shades of the algorithm's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dynamiccl_ray.agent.reward import PRIMARY
from dynamiccl_ray.figures import ALGORITHM_COLOURS, pair_colour, png, style
from dynamiccl_ray.keys import bytes_name
from dynamiccl_ray.report.data import ROLES, Doubles, Regime, Run

_COLOURS: Final = {"default": "#767676", "vendor": "#E69F00", "learned": "#0072B2"}
_MARKERS: Final = {"default": "s", "vendor": "^", "learned": "o"}
_PHASES: Final = {"baseline": "#e3e3e3", "learn": "#fdf1cd", "exploit": "#d5ecd9", "adapt": "#f9dccb"}
_TERMS: Final = {
    "reward": "black",
    PRIMARY: "#0072B2",
    "iteration": "#D55E00",
    "switch": "#E69F00",
    "congestion": "#CC79A7",
    "probe": "#009E73",
    "convergence": "#999999",
    "found": "#332288",
    "sm": "#56B4E9",
    "tier": "#B8A800",
    "fault": "#CC3311",
}
_ALARM: Final = "#CC3311"
_RATIO_TICKS: Final = (
    0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, 3, 4, 5, 7, 10, 20, 50, 100,
)  # fmt: skip
_DASHES: Final = (0, (4, 2))
_LABELLED_CELLS: Final = 60


def draw(run: Run) -> dict[str, bytes]:
    """Name -> PNG of every figure that this run has the data for."""
    with style():
        figures = {
            "summary": _summary(run),
            "timeline": _timeline(run),
            "sizes": _sizes(run),
            "decisions": _decisions(run),
            "learning": _learning(run),
            "reward": _reward(run),
        }
        return {name: png(figure) for name, figure in figures.items() if figure is not None}


# ---- figures ----


def _summary(run: Run) -> Figure | None:
    stages = [s for s in run.stages if s.geomean]
    if not len(run.samples.time_us):
        return None
    figure = Figure(figsize=(11, 3.7))
    if stages:
        left, right = figure.subplots(1, 2, width_ratios=(1, 2.1))
        _bars(left, stages)
    else:
        right = figure.subplots()
    right.set_title("... and when: every collective of the run" if stages else "Every collective of the run")
    _ratio_over_time(right, run)
    _legend(figure, run, lines=True)
    return figure


def _bars(axes: Axes, stages: Sequence[Regime]) -> None:
    """Per cent of time over the best static choice, by stage and role."""
    axes.set_title("How far from the best static choice")
    at, ticks, top = 0.0, [], max(100 * (v - 1) for s in stages for v in s.geomean.values())
    for stage in stages:
        first = at
        for role, label in ROLES.items():
            if role in stage.geomean:
                excess = 100 * (stage.geomean[role] - 1)
                axes.barh(at, excess, height=0.8, color=_COLOURS[role])
                axes.text(max(excess, 0) + top * 0.02, at, f"{excess:+.1f}%  {label}", va="center", fontsize=8.5)
                at += 1
        ticks.append((first + at - 1) / 2)
        at += 0.8
    axes.set_yticks(ticks, [s.name.replace(" at ", "\nat ") for s in stages])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(min(0, *(100 * (v - 1) for s in stages for v in s.geomean.values())), top * 1.9)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("time over best, %, geometric mean of keys")


def _timeline(run: Run) -> Figure | None:
    if not len(run.samples.time_us):
        return None
    events = run.summary["events"]
    figure = Figure(figsize=(11, 6.2 if events else 3.6))
    heights = (1.25, 1) if events else (1,)
    parts: Any = np.ravel(figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights))
    if events:
        for axes, event in zip(np.ravel(parts[1].subplots(1, len(events), squeeze=False)), events, strict=True):
            _around(axes, run, event)
    axes = parts[0].subplots()
    axes.set_title("The whole run")
    _ratio_over_time(axes, run)
    _legend(parts[0], run, lines=True)
    return figure


def _ratio_over_time(axes: Axes, run: Run) -> None:
    """Smoothed time over the reference, by order of measurement."""
    samples = run.samples
    log_ratio = np.log(samples.time_us / samples.reference_us)
    window = 10 * max(1, len(np.unique(samples.series)))
    top = 0.0
    for start, end in _segments(samples.phase, samples.stage):
        _shade(axes, str(samples.phase[start]), start / 1e3, end / 1e3)
        values = _smooth(log_ratio[start:end], window)
        step = max(1, len(values) // 600)
        axes.plot(np.arange(start, end)[::step] / 1e3, np.exp(values[::step]), color=_COLOURS["learned"], lw=1.3)
        top = max(top, float(np.nanmax(values, initial=0.0)))
    for index, stage in enumerate(run.stages):
        span = np.flatnonzero(samples.stage == index)
        for role in ("default", "vendor"):
            if role in stage.geomean and len(span):
                edges = (span[0] / 1e3, (span[-1] + 1) / 1e3)
                axes.plot(edges, [stage.geomean[role]] * 2, color=_COLOURS[role], lw=1.6, ls=_DASHES, zorder=1.9)
                top = max(top, float(np.log(stage.geomean[role])))
    axes.axhline(1, color="black", lw=0.9, zorder=1.8)
    axes.set_yscale("log")
    axes.set_ylim(None, np.exp(top * 1.18 + 0.03))
    _ratio_axis(axes, f"time over {run.reference_name}")
    _marks(axes, run)
    axes.set_xlim(0, len(log_ratio) / 1e3)
    axes.set_xlabel("measured collectives, thousands")
    axes.grid(visible=False, axis="x")


def _marks(axes: Axes, run: Run) -> None:
    """Events as lines with their name, alarms as triangles on the upper edge."""
    samples = run.samples
    for index, event in enumerate(run.summary["events"]):
        at = int(np.searchsorted(samples.stage, index + 1)) / 1e3
        axes.axvline(at, color="black", lw=1.2)
        axes.annotate(
            event["name"], (at, 0.97), (4, 0), ("data", "axes fraction"), "offset points", va="top", weight="bold"
        )
    for alarm in run.summary["alarms"]:
        at = int(np.count_nonzero(samples.epoch <= alarm["epoch"] - 1)) / 1e3
        axes.plot(at, 1, "v", ms=8, color=_ALARM, transform=axes.get_xaxis_transform(), clip_on=False, zorder=5)


def _around(axes: Axes, run: Run, event: dict[str, Any]) -> None:
    """Single collectives around an event, against what each key took while exploited before it."""
    samples, call, alarms = run.samples, run.since(event), run.alarms_since(event)
    reach = max(150, 2 * alarms[0]) if alarms else 600
    near = np.flatnonzero((np.abs(call) <= reach) & (samples.phase == "exploit"))
    before = (samples.phase == "exploit") & (samples.stage == event["phase"] - 1)
    ratio = np.full(len(near), np.nan)
    for series in np.unique(samples.series[near]):
        usual = samples.time_us[before & (samples.series == series)]
        if len(usual):
            mine = samples.series[near] == series
            ratio[mine] = samples.time_us[near][mine] / np.exp(np.log(usual).mean())
    axes.scatter(call[near], ratio, s=9, color=_COLOURS["learned"], lw=0)
    axes.axvline(0, color="black", lw=1.2)
    axes.set_xlim(-reach, reach)
    _ratio_axis(axes, "time over usual time")
    axes.set_xlabel(f"single collectives, counted from the event: {event['name']}")
    axes.set_title("Detection")
    text = "not detected"
    if alarms:
        axes.axvline(alarms[0], color=_ALARM, lw=1.2)
        text = f"alarm, {alarms[0]:,} collectives later"
    axes.annotate(
        text, (alarms[0] if alarms else 0, 1), (0, 3), ("data", "axes fraction"), "offset points", color=_ALARM
    )


def _sizes(run: Run) -> Figure | None:
    stages = [s for s in run.stages if s.measured]
    groups = list(dict.fromkeys(r["group"] for s in stages for r in s.measured))
    if not stages:
        return None
    figure = Figure(figsize=(max(11, 5.5 * len(stages)), 0.9 + 2.9 * len(groups)))
    grid = figure.subplots(len(groups), len(stages), squeeze=False, sharey=True, sharex=True)
    for row, group in zip(grid, groups, strict=True):
        for axes, stage in zip(row, stages, strict=True):
            axes.set_title(f"{group}, {stage.name}")
            _size_lines(axes, stage, [r for r in stage.measured if r["group"] == group])
        row[0].set_ylabel(f"time over {run.reference_name}")
    figure.supxlabel("message size", fontsize=9)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _size_lines(axes: Axes, stage: Regime, rows: list[dict[str, Any]]) -> None:
    nbytes = np.array([r["bytes"] for r in rows])
    for z, (role, label) in enumerate(ROLES.items()):
        there = [r for r in rows if r.get(f"{role}_us") is not None and r[stage.reference] is not None]
        known = [(r["bytes"], r[f"{role}_us"] / r[stage.reference]) for r in there]
        if known:
            x, y = zip(*sorted(known), strict=True)
            axes.plot(x, y, color=_COLOURS[role], marker=_MARKERS[role], ms=4, label=label, lw=1.2, zorder=2 + z)
    axes.axhline(1, color="black", lw=0.9, zorder=1.8)
    axes.set_xscale("log", base=2)
    if len(nbytes):
        low, high = np.floor(np.log2(np.maximum((nbytes.min(), nbytes.max()), 1)))
        every = 2 ** np.arange(low, high + 1, max(1, round((high - low) / 6)))
        axes.xaxis.set_major_locator(FixedLocator(list(every)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: bytes_name(int(x))))
    axes.xaxis.set_minor_locator(NullLocator())
    _ratio_axis(axes, None)


def _decisions(run: Run) -> Figure | None:
    lines = []
    for stage in run.stages:
        chosen = {r["name"]: (r["action"], _loss(r)) for r in stage.rows if r["learned_us"] is not None}
        best = {r["name"]: (r["oracle_action"], 0.0) for r in stage.rows if "oracle_action" in r}
        lines += [(stage.name, name, line) for name, line in (("learned", chosen), ("best", best)) if line]
    rows = {r["name"]: r for s in run.stages for r in s.rows}
    keys = sorted(rows, key=lambda k: (rows[k]["group"], rows[k]["bytes"]))
    if not any(name == "learned" for _, name, _ in lines):
        return None
    figure = Figure(figsize=(11, 1.2 + 0.92 * len(lines)))
    axes = figure.subplots()
    seen: set[str] = set()
    # A gap wherever the next stage begins.
    rises = [i > 0 and lines[i][0] != lines[i - 1][0] for i in range(len(lines))]
    ys = np.arange(len(lines)) + 0.3 * np.cumsum(rises)
    for y, (_, _, line) in zip(ys, lines, strict=True):
        for x, key in enumerate(keys):
            if key in line:
                seen.add(line[key][0].partition(" ")[0])
                _cell(axes, x, y, *line[key], n_keys=len(keys))
    axes.set_xlim(-0.5, len(keys) - 0.5)
    axes.set_ylim(ys[-1] + 0.5, -0.5)
    several = len({r["group"] for r in rows.values()}) > 1
    names = [(f"{rows[k]['group']} " if several else "") + bytes_name(rows[k]["bytes"]) for k in keys]
    fontsize = 7.5 if len(keys) <= _LABELLED_CELLS else 5
    axes.set_xticks(range(len(keys)), names, rotation=90 if len(keys) > 10 else 0, fontsize=fontsize)
    axes.set_yticks(ys, [f"{stage}\n{name}" for stage, name, _ in lines])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    order = sorted(seen, key=lambda p: (list(ALGORITHM_COLOURS).index(p.partition("/")[0]), p))
    patches = [Patch(color=pair_colour(p), label="NCCL's own" if p == "nccl" else p) for p in order]
    figure.legend(handles=patches, loc="outside upper center", ncols=min(9, len(patches)))
    return figure


def _loss(row: dict[str, Any]) -> float:
    """How much longer the learned action takes than the best, without noise."""
    table = row.get("learned_table_us")
    return table / row["oracle_us"] - 1 if table is not None and row["oracle_us"] else 0.0


def _cell(axes: Axes, x: int, y: float, action: str, loss: float, *, n_keys: int) -> None:
    colour = pair_colour(action.partition(" ")[0])
    axes.add_patch(Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, facecolor=colour, lw=0))
    if n_keys <= _LABELLED_CELLS:
        dark = np.dot(colour, (0.299, 0.587, 0.114)) < 0.55
        text = action + (f"\n+{loss:.0%}" if loss >= 0.005 else "")
        fit: dict[str, Any] = {"fontsize": 8} if n_keys <= 10 else {"fontsize": 6.3, "rotation": 90}
        axes.text(x, y, text, ha="center", va="center", color="white" if dark else "black", **fit)


def _learning(run: Run) -> Figure | None:
    history = run.summary["history"]
    if not history or not len(run.samples.time_us):
        return None
    figure = Figure(figsize=(11, 4.6))
    upper, lower = figure.subplots(2, 1, sharex=True)
    rounds = np.array([h["round"] for h in history])
    entropy = np.array([np.nan if h["entropy"] is None else h["entropy"] for h in history], float)
    upper.plot(rounds, entropy, color=_COLOURS["learned"], marker="o", ms=2.5)
    upper.set_ylabel("policy entropy,\nnats per key")
    upper.set_ylim(0, None)
    epochs = np.array([h["epoch"] for h in history])
    samples = run.samples
    of = np.searchsorted(epochs, samples.epoch, side="right")
    _speedups(lower, run, rounds, of)
    for axes in (upper, lower):
        for start, end in _segments(np.array([h["phase"] for h in history])):
            _shade(axes, history[start]["phase"], rounds[start] - 0.5, rounds[end - 1] + 0.5)
        for event in run.summary["events"]:
            axes.axvline(event["round"] - 0.5, color="black", lw=1.2)
        axes.grid(visible=False, axis="x")
    upper.set_xlim(rounds[0] - 0.5, rounds[-1] + 0.5)
    lower.set_xlabel(f"round ({run.experiment.get('epochs', {}).get('per_round', 'several')} decision epochs each)")
    figure.legend(*lower.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    _legend(figure, run, lines=False)
    return figure


def _speedups(axes: Axes, run: Run, rounds: npt.NDArray[np.int64], of: npt.NDArray[np.int64]) -> None:
    """Mean of log(NCCL's own time / time) in each round, and what the best static choice would reach."""
    samples, lines = run.samples, {"measured": run.samples.time_us}
    if run.reference_name == "best static choice":
        lines["best static choice"] = samples.reference_us
    for name, time_us in lines.items():
        speedup = np.log(samples.default_us / time_us)
        inside = (of < len(rounds)) & np.isfinite(speedup)
        count = np.bincount(of[inside], minlength=len(rounds))
        total = np.bincount(of[inside], weights=speedup[inside], minlength=len(rounds))
        mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        colour, marker = (_COLOURS["learned"], "o") if name == "measured" else ("black", "")
        axes.plot(rounds, mean, color=colour, marker=marker, ms=2.5, label=name)
    axes.axhline(0, color=_COLOURS["default"], lw=1.6, ls=_DASHES, label="NCCL's own choice")
    axes.set_ylabel("mean log speedup\nover NCCL's own choice")


def _reward(run: Run) -> Figure | None:
    """The reward and its terms by epoch, smoothed over a round."""
    rewards = run.rewards
    if not rewards.terms:
        return None
    figure = Figure(figsize=(11, 4.6))
    upper, lower = figure.subplots(2, 1, sharex=True)
    window = run.experiment.get("epochs", {}).get("per_round", 8)
    for name, values in rewards.terms.items():
        axes = upper if name in ("reward", PRIMARY) else lower
        dashes = _DASHES if name == "reward" else "-"
        axes.plot(rewards.epoch, _smooth(values, window), color=_TERMS.get(name), lw=1.3, ls=dashes, label=name)
    for axes, label in ((upper, "reward and\nprimary term"), (lower, "other terms")):
        for start, end in _segments(rewards.phase):
            _shade(axes, str(rewards.phase[start]), rewards.epoch[start] - 0.5, rewards.epoch[end - 1] + 0.5)
        for event in run.summary["events"]:
            after = run.samples.epoch[run.since(event) >= 0]
            if len(after):
                axes.axvline(after.min() - 0.5, color="black", lw=1.2)
        axes.axhline(0, color="black", lw=0.9, zorder=1.8)
        axes.set_ylabel(label)
        axes.grid(visible=False, axis="x")
    lower.set_xlabel("decision epoch")
    lines = [line for axes in (upper, lower) for line in axes.get_legend_handles_labels()[0]]
    figure.legend(handles=lines, loc="outside lower left", ncols=6)
    _legend(figure, run, lines=False)
    return figure


# ---- parts ----


def _segments(*columns: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """[start, end) of the stretches in which no column changes."""
    n = len(columns[0])
    if not n:
        return []
    changed = np.zeros(n - 1, np.bool_)
    for column in columns:
        changed |= column[1:] != column[:-1]
    edges = [0, *(np.flatnonzero(changed) + 1).tolist(), n]
    return list(itertools.pairwise(edges))


def _smooth(values: Doubles, window: int) -> Doubles:
    """Centred moving mean that ignores NaN; at the ends the window stays inside, so that all keys count alike."""
    known = np.isfinite(values)
    total = np.concatenate(([0.0], np.cumsum(np.where(known, values, 0.0))))
    count = np.concatenate(([0], np.cumsum(known)))
    at = np.arange(len(values))
    low = np.clip(at - window // 2, 0, max(0, len(values) - window))
    high = np.minimum(len(values), low + window)
    n = count[high] - count[low]
    return np.where(n > 0, (total[high] - total[low]) / np.maximum(n, 1), np.nan)


def _shade(axes: Axes, phase: str, start: float, end: float) -> None:
    axes.axvspan(start, end, color=_PHASES.get(phase, "white"), lw=0, zorder=0)


def _ratio_axis(axes: Axes, label: str | None) -> None:
    axes.set_yscale("log")
    low, high = np.log(axes.get_ylim())
    inside: list[float] = []
    for tick in sorted(_RATIO_TICKS, key=lambda t: abs(np.log(t))):
        if low <= np.log(tick) <= high and all(abs(np.log(tick / t)) > 0.07 * (high - low) for t in inside):
            inside.append(tick)
    axes.yaxis.set_major_locator(FixedLocator(inside))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}x"))
    axes.yaxis.set_minor_locator(NullLocator())
    if label is not None:
        axes.set_ylabel(label)


def _legend(figure: Any, run: Run, *, lines: bool) -> None:
    """Under the figure: the phases and, for plots of time over the reference, lines and marks."""
    present = set(run.samples.phase.tolist()) if lines else {h["phase"] for h in run.summary["history"]}
    handles: list[Any] = [Patch(color=colour, label=phase) for phase, colour in _PHASES.items() if phase in present]
    if lines and run.summary["alarms"]:
        handles.append(Line2D([], [], ls="", marker="v", ms=7, color=_ALARM, label="alarm"))
    for role, label in ROLES.items() if lines else ():
        if role == "learned":
            handles.append(Line2D([], [], color=_COLOURS[role], label="measured, smoothed"))
        elif any(role in s.geomean for s in run.stages):
            handles.append(Line2D([], [], color=_COLOURS[role], lw=1.6, ls=_DASHES, label=label))
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), columnspacing=1.3)
