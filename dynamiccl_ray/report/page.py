"""The report of a run: one HTML file that explains itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import jinja2
import numpy as np

from dynamiccl_ray.actions import Action
from dynamiccl_ray.agent.reward import TERMS
from dynamiccl_ray.figures import inlined
from dynamiccl_ray.keys import bytes_name
from dynamiccl_ray.knobs import pair_name
from dynamiccl_ray.report.data import (
    ROLES,
    Regime,
    Run,
    detections,
    mean_speedup,
    read_run,
    speedup,
    verdict,
)

# Below this size the default's measured times may be late connection set-up (data/measured/README.md).
SMALL_BYTES: Final = 128 << 10


def write_report(run: Path) -> Path:
    """Writes report.html and summary.png into the directory of a finished run and returns the page's path.

    The page needs no other file. Whatever the run lacks (events, an oracle, exploitation, samples) is said there.
    Raises ConfigError if ``run`` is not the directory of a finished run.
    """
    # Matplotlib takes a second to import, which tables in a terminal need not pay for.
    from dynamiccl_ray.report.plots import draw

    data = read_run(run)
    figures = draw(data)
    if "summary" in figures:
        (run / "summary.png").write_bytes(figures["summary"])
    page = run / "report.html"
    page.write_text(_render(data, figures), encoding="utf-8")
    return page


def page_environment(filters: Mapping[str, Callable[..., str]]) -> jinja2.Environment:
    """The package's templates, with these filters beside those that all pages use: ratio, times, count and bytes."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (files("dynamiccl_ray") / "templates" / name).read_text("utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    common: dict[str, Callable[..., str]] = {
        "ratio": lambda x: "-" if x is None else f"{x:.3f}",
        "times": lambda x: "-" if x is None else f"{x:.2f}\u00d7",
        "count": lambda n: f"{n:,}",
        "bytes": bytes_name,
    }
    environment.filters |= {**common, **filters}
    return environment


def _render(run: Run, figures: dict[str, bytes]) -> str:
    environment = page_environment({"us": _us, "verdict": verdict, "seconds": _seconds})
    return environment.get_template("report.html.j2").render(
        run=run,
        summary=run.summary,
        experiment=run.experiment,
        stages=run.stages,
        roles=ROLES,
        images=inlined(figures),
        detections=detections(run.summary),
        safety=_safety(run),
        means=[(s, *_means(s)) for s in run.stages],
        small=SMALL_BYTES,
        speedup=speedup,
        mean_speedup=mean_speedup,
        tally=_tally,
        own=pair_name(Action().pair),
        terms=TERMS,
        settings=json.dumps(run.experiment, indent=2),
    )


def _safety(run: Run) -> dict[str, Any]:
    """What the agreement box says, as numbers; None where the run cannot know."""
    fabric = run.experiment.get("fabric", {})
    processes = fabric.get("processes")
    ranks = processes["nodes"] * processes["ranks_per_node"] if processes else None
    false = run.summary["false_alarms"]
    return {
        "ranks": ranks,
        "calls": int(run.samples.dseq.max(initial=0)),
        "false_alarms": false["anew"] if false is not None else 0,
        "false_checks": false["checks"] if false is not None else 0,
        "false_cost_percent": false["cost_percent"] if false is not None else None,
        "controlled": false is not None,
    }


def _means(stage: Regime) -> tuple[dict[str, float], dict[str, float], int]:
    """Geometric means of time over the best: of all keys, of those from ``SMALL_BYTES``, and how many are smaller."""
    rows = [r for r in stage.rows if r["oracle_us"] is not None and r["learned_us"] is not None]
    large = [r for r in rows if r["bytes"] >= SMALL_BYTES]
    means = {
        role: float(np.exp(np.mean([np.log(r[f"{role}_us"] / r["oracle_us"]) for r in large])))
        for role in ROLES
        if large and all(r.get(f"{role}_us") is not None for r in large)
    }
    return {role: stage.geomean[role] for role in ROLES if role in stage.geomean}, means, len(rows) - len(large)


def _tally(stage: Regime) -> tuple[int, int, int]:
    """Keys on which the learned choice is faster than NCCL's own, as fast within ``TIE``, and slower."""
    verdicts = [verdict(speedup(r)) for r in stage.rows]
    return verdicts.count("faster"), verdicts.count("same"), verdicts.count("slower")


def _seconds(s: float | None) -> str:
    """Three significant digits, in s or ms."""
    if s is None:
        return "-"
    return f"{s:.3g} s" if s >= 1 else f"{1e3 * s:.3g} ms"


def _us(time_us: float | None) -> str:
    """Four significant digits below 10 ms, whole us above."""
    if time_us is None:
        return "-"
    return f"{time_us:,.0f}" if time_us >= 1000 else f"{time_us:.4g}"
