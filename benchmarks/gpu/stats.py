"""Numbers about numbers: what the evaluation protocol reports, spreads of alternating runs, and growth per cycle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TypedDict

import numpy as np


class Summary(TypedDict):
    """Of one figure in several runs. ``run_std`` is the spread of the runs' means; None of a single run."""

    mean: float
    std: float
    p99: float
    median: float
    run_std: float | None
    runs: int
    samples: int


class Spread(TypedDict):
    """Of one figure per run."""

    median: float
    low: float
    high: float
    runs: int


def summary(runs: Sequence[Sequence[float]]) -> Summary:
    """Mean, sample standard deviation, p99 and median over all samples of all runs.

    Raises ValueError if there is no sample.
    """
    samples = np.concatenate([np.asarray(run, float) for run in runs]) if runs else np.zeros(0)
    if not len(samples):
        raise ValueError("no samples to summarise; every run must have measured something")
    means = [float(np.mean(run)) for run in runs if len(run)]
    return {
        "mean": float(samples.mean()),
        "std": float(samples.std(ddof=1)) if len(samples) > 1 else 0.0,
        "p99": float(np.percentile(samples, 99)),
        "median": float(np.median(samples)),
        "run_std": float(np.std(means, ddof=1)) if len(means) > 1 else None,
        "runs": len(means),
        "samples": len(samples),
    }


def spread(values: Sequence[float]) -> Spread:
    """Median, least and largest. Raises ValueError if there is no value."""
    if not values:
        raise ValueError("no values: every configuration must have run at least once")
    return {
        "median": float(np.median(values)),
        "low": float(min(values)),
        "high": float(max(values)),
        "runs": len(values),
    }


def slope(values: Sequence[float]) -> float:
    """Growth per step: the median of the slopes of all pairs (Theil 1950, Sen 1968). One jump does not move it."""
    if len(values) < 2:
        return 0.0
    return float(np.median([(values[j] - values[i]) / (j - i) for i, j in combinations(range(len(values)), 2)]))


def geomean(values: Sequence[float]) -> float:
    """Geometric mean. Raises ValueError if there is no value or one is not positive."""
    if not values or min(values) <= 0:
        raise ValueError(f"a geometric mean needs positive values, not {list(values)}")
    return float(np.exp(np.mean(np.log(values))))
