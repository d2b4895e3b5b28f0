"""Decisions that are over, next to what was expected of them: for whoever asks later why something was done."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynamiccl_ray.arrays import Bool, Float64, Int64
from dynamiccl_ray.control.columns import Closed
from dynamiccl_ray.control.evidence import Evidence


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdicts:
    """Decisions (R,) that are over: what was expected of them, and what came of them."""

    rows: Int64
    actions: Int64
    """(R,) flat."""
    samples: Int64
    phase: Int64
    """(R,) of the key while it ran."""
    ordinal: Int64
    """(R,) decisions since the key began to learn."""
    drawn: Bool
    """(R,) whether the policy drew it, where the key learns; later decisions compare what may be the best."""
    expected: Float64
    """(R,) mean log time (us) of the action before; NaN where it had never been measured since the last shift."""
    got: Float64
    """(R,) mean log time."""
    baseline: Float64
    """(R,) mean log time of NCCL's own choice, as it was known before; NaN where it was not."""


def verdicts(of: Closed, evidence: Evidence, *, phase: Int64, ordinal: Int64, drawn: Bool) -> Verdicts:
    """Of decisions (R,) that are not recorded yet."""
    known = evidence.samples[of.rows, of.actions] > 0
    return Verdicts(
        rows=of.rows,
        actions=of.actions,
        samples=of.samples.astype(np.int64),
        phase=phase,
        ordinal=ordinal,
        drawn=drawn,
        expected=np.where(known, evidence.mean(of.rows, of.actions), np.nan),
        got=of.mean,
        baseline=evidence.baseline[of.rows],
    )


def no_verdicts() -> Verdicts:
    none = np.zeros(0)
    return Verdicts(
        rows=np.zeros(0, np.int64),
        actions=np.zeros(0, np.int64),
        samples=np.zeros(0, np.int64),
        phase=np.zeros(0, np.int64),
        ordinal=np.zeros(0, np.int64),
        drawn=np.zeros(0, np.bool_),
        expected=none,
        got=none,
        baseline=none,
    )
