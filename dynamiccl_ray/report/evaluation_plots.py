"""The figures of an evaluation: regret over collectives, speedups by size and tier, maps of decisions.

Colours are those of Okabe and Ito, and lines differ in their dashes and markers too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, PercentFormatter
from numpy.typing import NDArray

from dynamiccl_ray.actions import action_parts
from dynamiccl_ray.baselines.run import Trace
from dynamiccl_ray.figures import pair_colour, png, style
from dynamiccl_ray.keys import bytes_name
from dynamiccl_ray.knobs import OWN_PAIR, Collective, pair_name

_STYLES: Final[Mapping[str, tuple[str, Any, str]]] = {
    "nccl": ("#767676", (0, (4, 2)), "s"),
    "static pair": ("#E69F00", (0, (1, 1)), "^"),
    "csv table": ("#56B4E9", (0, (6, 1, 1, 1)), "v"),
    "coordinate descent": ("#009E73", (0, (3, 1, 1, 1, 1, 1)), "D"),
    "exhaustive probing": ("#CC79A7", (0, (8, 2)), "P"),
    "bandit": ("#D55E00", (0, (2, 1)), "X"),
    "uniform": ("#999933", (0, (1, 3)), "<"),
    "thompson": ("#882255", (0, (5, 1)), ">"),
    "elimination": ("#44AA99", (0, (2, 2)), "p"),
    "oracle": ("black", "-", "_"),
}
# Whatever is not a baseline is what is being evaluated.
_SUBJECT: Final = ("#0072B2", "-", "o")


def regret_curves(traces: Mapping[str, Sequence[Trace]], title: str = "") -> bytes:
    """PNG: cumulative regret by method, over runs on one scenario: the mean, and a band from least to most.

    In per cent of the oracle's time for the whole run; what a sweep took before the job is where its curve begins.
    """
    return _drawn(lambda: _regret(traces, title))


def speedup_by_size(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    """PNG: speedup over NCCL's own choice with its 95% interval, by size; a panel for each tier.

    ``rows`` has the ``key_rows`` of each method.
    """
    return _drawn(lambda: _speedups(rows))


def decision_map(traces: Sequence[Trace], name: str, collective: Collective, measured: int) -> bytes:
    """PNG: the pairs that a method chose in the end, the oracle's and NCCL's, over sizes and nodes.

    One trace for each number of nodes of a cluster; what counts is the most frequent pair of the last ``measured``
    steps, in the last phase. A method that leaves a key to NCCL has NCCL's pair. Raises ValueError where no trace has
    the collective.
    """
    return _drawn(lambda: _map(traces, name, collective, measured))


def _drawn(draw: Callable[[], Figure]) -> bytes:
    with style():
        return png(draw())


def _regret(traces: Mapping[str, Sequence[Trace]], title: str) -> Figure:
    figure = Figure(figsize=(9, 4.6))
    axes = figure.subplots()
    axes.set_title(title or "Regret")
    first = next(iter(traces.values()))[0]
    scenario, steps = first.scenario, len(first.actions)
    whole = float((scenario.oracle_us[first.phases] @ scenario.weight).sum())
    x = np.arange(steps)
    for name, runs in traces.items():
        colour, dashes, marker = _STYLES.get(name, _SUBJECT)
        curves = np.stack([t.cumulative_regret_us for t in runs]) / whole
        axes.fill_between(x, curves.min(0), curves.max(0), color=colour, alpha=0.2, lw=0)
        style: dict[str, Any] = {"color": colour, "ls": dashes, "marker": marker, "markevery": max(1, steps // 8)}
        axes.plot(x, curves.mean(0), ms=5, label=name, **style)
    for start in scenario.starts[1:]:
        axes.axvline(start, color="black", lw=1.2)
        axes.annotate("shift", (start, 1), (3, -3), ("data", "axes fraction"), "offset points", va="top", fontsize=8)
    axes.set_xlim(0, steps)
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.set_xlabel("collectives of each key")
    axes.set_ylabel("time lost so far,\nof the oracle's time for the run")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    return figure


def _speedups(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    tiers = sorted({row["tier"] for of in rows.values() for row in of})
    figure = Figure(figsize=(11, 1.1 + 2.6 * len(tiers)))
    panels = figure.subplots(len(tiers), 1, squeeze=False, sharex=True)[:, 0]
    for axes, tier in zip(panels, tiers, strict=True):
        axes.set_title(f"tier {tier}")
        for i, (name, of) in enumerate(rows.items()):
            here = [row for row in of if row["tier"] == tier]
            at, speedup, low, high = (np.array([row[c] for row in here]) for c in ("bytes", "speedup", "low", "high"))
            colour, _, marker = _STYLES.get(name, _SUBJECT)
            # Side by side, so that methods at the same size do not hide each other.
            aside = at * 2 ** (0.22 * (i - (len(rows) - 1) / 2))
            # The percentiles of resamples may lie a rounding error beside the mean.
            ends = np.maximum(0, [speedup - low, high - speedup])
            axes.errorbar(aside, speedup, ends, color=colour, fmt=marker, ms=4.5, lw=1, capsize=2, label=name)
        axes.axhline(1, color=_STYLES["nccl"][0], lw=1.6, ls=_STYLES["nccl"][1])
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: bytes_name(int(x))))
        axes.set_ylabel("speedup over NCCL")
    panels[-1].set_xlabel("message size")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(rows))
    return figure


def _map(traces: Sequence[Trace], name: str, collective: Collective, measured: int) -> Figure:
    traces = sorted(traces, key=lambda t: t.scenario.nodes)
    sizes = np.unique([b for t in traces for b in t.scenario.nbytes[t.scenario.collective == collective].tolist()])
    if not sizes.size:
        known = sorted({Collective(int(c)).name.lower() for t in traces for c in t.scenario.collective})
        raise ValueError(f"no trace has {collective.name.lower()}; there are {', '.join(known)}")
    maps = {
        name: [_most_chosen(t, measured) for t in traces],
        "oracle": [action_parts(t.scenario.oracle[t.phases[-1]])[0] for t in traces],
        "nccl": [np.full(len(t.scenario.nbytes), OWN_PAIR) for t in traces],
    }
    figure = Figure(figsize=(12, 1.6 + 0.33 * len(traces)))
    used: set[int] = set()
    for axes, (title, pairs) in zip(figure.subplots(1, 3, sharey=True), maps.items(), strict=True):
        grid = np.full((len(traces), len(sizes)), -1)
        for row, trace, found in zip(grid, traces, pairs, strict=True):
            scenario = trace.scenario
            keys = np.flatnonzero(scenario.collective == collective)
            own = scenario.own_pair[keys]
            row[np.searchsorted(sizes, scenario.nbytes[keys])] = np.where(found[keys] == OWN_PAIR, own, found[keys])
        used |= set(grid[grid >= 0].tolist())
        _grid(axes, grid, [t.scenario.nodes for t in traces], sizes)
        axes.set_title(f"{collective.name.lower().replace('_', '-')}: {title}")
    figure.axes[0].set_ylabel("nodes")
    handles = [Patch(color=pair_colour(pair_name(p)), label=pair_name(p)) for p in sorted(used)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)))
    return figure


def _most_chosen(trace: Trace, measured: int) -> NDArray[np.int64]:
    """(K,) the pair that was chosen most often in the last ``measured`` steps."""
    pairs = action_parts(trace.actions[-measured:])[0]
    values = np.unique(pairs)
    return np.asarray(values[(pairs[..., None] == values).sum(0).argmax(-1)])


def _grid(axes: Axes, pairs: NDArray[np.int64], nodes: Sequence[int], sizes: NDArray[np.int64]) -> None:
    colours = [[(1.0, 1.0, 1.0) if p < 0 else pair_colour(pair_name(p)) for p in row] for row in pairs.tolist()]
    axes.imshow(np.array(colours), aspect="auto", origin="lower")
    every = max(1, len(sizes) // 5)
    axes.set_xticks(range(0, len(sizes), every), [bytes_name(int(b)) for b in sizes[::every]], rotation=30)
    axes.set_yticks(range(len(nodes)), [str(n) for n in nodes])
    axes.grid(visible=False)
