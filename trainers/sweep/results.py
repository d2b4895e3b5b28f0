"""What came of a sweep: its trials, the best of them, and whether that is more than luck."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from ray.tune import ResultGrid

from dynamiccl_ray.config.sweep import METRICS, Sweep, Values
from dynamiccl_ray.config.sweep_target import Target, best_yaml
from dynamiccl_ray.trainers.sweep.trials import SEEDS, WHOLE, number_of

_CURVE: Final = "curve"
_SURE: Final = 2.0
"""Standard errors."""


@dataclass(frozen=True)
class Row:
    """A trial."""

    id: int
    """0 has the target's own values, at least to begin with."""
    values: Values
    status: str
    """``done``; ``stopped`` by the scheduler or the limit; ``failed``; ``unfinished``."""
    scores: list[dict[str, Any]]
    """Of each seed."""
    metrics: dict[str, float | None]
    """Means over the seeds."""
    seconds: float
    curve: list[list[float]]
    """[x, metric] pairs: a report each, or collectives of the first seed's run."""
    failure: str | None = None


def rows_of(sweep: Sweep, grid: ResultGrid) -> list[Row]:
    """The trials, in the order in which they were made."""
    rows = [_row(sweep, number_of(Path(result.path).name, result.config), result) for result in grid]
    return sorted(rows, key=lambda row: row.id)


def _row(sweep: Sweep, number: int, result: Any) -> Row:
    metrics = result.metrics or {}
    scores = metrics.get(SEEDS, [])
    failure = None if result.error is None else _words(result.error)
    if failure is not None:
        status = "failed"
    elif not scores:
        status = "unfinished"
    else:
        status = "done" if metrics.get(WHOLE) else "stopped"
    if scores and _CURVE in scores[0]:
        curve = scores[0][_CURVE]
    else:
        frame = result.metrics_dataframe
        known = frame is not None and sweep.metric in frame
        # A trial that went on from another's weights has that one's reports behind it, too.
        at = dict(zip(frame["training_iteration"], frame[sweep.metric], strict=True)) if known else {}
        curve = [[int(i), float(y)] for i, y in sorted(at.items())]
    return Row(
        id=number,
        values=result.config["values"],
        status=status,
        scores=[{name: value for name, value in score.items() if name != _CURVE} for score in scores],
        metrics={name: metrics.get(name) for name in scores[0] if name != _CURVE} if scores else {},
        seconds=metrics.get("time_total_s", 0.0),
        curve=curve,
        failure=failure,
    )


def _words(error: BaseException) -> str:
    """The last line of what Ray has wrapped up, which is what was wrong."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def best_of(sweep: Sweep, target: Target, rows: Sequence[Row]) -> Row | None:
    """Of the trials that came to their end; None where none did."""
    ended = [row for row in rows if row.status == "done" and row.metrics.get(sweep.metric) is not None]
    sign = 1 if METRICS[target.kind][sweep.metric] == "min" else -1
    return min(ended, key=lambda row: sign * (row.metrics[sweep.metric] or 0.0), default=None)


def compared(sweep: Sweep, target: Target, default: Row, best: Row) -> dict[str, Any]:
    """By how much the best is better than the target as it is: mean over seeds, whose noise both share, and its
    standard error; whether that is beyond noise, which one seed cannot say.
    """
    sign = 1 if METRICS[target.kind][sweep.metric] == "min" else -1
    pairs = list(zip(default.scores, best.scores, strict=True))
    better = np.array([sign * (d[sweep.metric] - b[sweep.metric]) for d, b in pairs])
    error = float(better.std(ddof=1) / math.sqrt(len(better))) if len(better) > 1 else None
    return {
        "default": default.metrics[sweep.metric],
        "best": best.metrics[sweep.metric],
        "better_by": float(better.mean()),
        "standard_error": error,
        "seeds": len(better),
        "beyond_noise": None if error is None else bool(better.mean() > _SURE * error),
    }


def document(
    sweep: Sweep, target: Target, default: Values, rows: Sequence[Row], best: Row, again: Sequence[Row]
) -> dict[str, Any]:
    """What results.json holds: JSON. ``default`` has the target's own values; ``again``, that trial and the best once
    more."""
    first = rows[0]
    # Population based training may have changed it.
    comparable = first.status == "done" and first.values == default
    whole = len(again) == 2 and all(row.status == "done" for row in again)
    return {
        "name": sweep.name,
        "of": str(target.path),
        "kind": target.kind,
        "metric": sweep.metric,
        "goal": METRICS[target.kind][sweep.metric],
        "seeds": list(sweep.seeds),
        "trials": [
            {
                "id": row.id,
                "params": row.values,
                "metric": row.metrics.get(sweep.metric),
                "error": standard_error(sweep, row),
                "status": row.status,
                "metrics": row.metrics,
                "seconds": row.seconds,
                "curve": row.curve,
                "failure": row.failure,
            }
            for row in rows
        ],
        "best": {"id": best.id, "params": best.values, "metric": best.metrics[sweep.metric]},
        "compared": compared(sweep, target, first, best) if comparable else None,
        "confirmed": compared(sweep, target, again[0], again[1]) if whole else None,
    }


def standard_error(sweep: Sweep, row: Row) -> float | None:
    """Of a trial's metric, over its seeds; None with one."""
    if len(row.scores) < 2:
        return None
    return float(np.std([score[sweep.metric] for score in row.scores], ddof=1) / math.sqrt(len(row.scores)))


def write_files(sweep: Sweep, target: Target, result: dict[str, Any], out: Path) -> None:
    """results.csv, a line for each trial, and best.yaml."""
    best = result["best"]
    measured = list(dict.fromkeys(name for trial in result["trials"] for name in trial["metrics"]))
    with (out / "results.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["trial", "status", *sweep.space, *measured, f"{sweep.metric}_error", "seconds"])
        for trial in result["trials"]:
            values = [trial["params"][key] for key in sweep.space]
            scores = [trial["metrics"].get(name) for name in measured]
            table.writerow([trial["id"], trial["status"], *values, *scores, trial["error"], f"{trial['seconds']:.1f}"])
    comments = [
        f"The best of {len(result['trials'])} trials of the sweep {sweep.name}: {sweep.metric} {best['metric']:.6g}",
        f"It is {target.path.name} with {', '.join(f'{key}={value}' for key, value in best['params'].items())}.",
    ]
    (out / "best.yaml").write_text(best_yaml(target, best["params"], comments), encoding="utf-8")
