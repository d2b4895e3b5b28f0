"""A policy and its rivals on anybody's measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dynamiccl_ray.agent.policy import PolicyNetwork
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.baselines.method import Factory
from dynamiccl_ray.baselines.registry import beside
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.evaluation.measures import Procedure, judged, relative_regret
from dynamiccl_ray.evaluation.players import Progress, players
from dynamiccl_ray.evaluation.suite import SUBJECT
from dynamiccl_ray.simulation.tables import Table


def judge_tables(
    tables: Sequence[Table],
    net: PolicyNetwork,
    procedure: Procedure,
    *,
    control: Control,
    processes: int = 1,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """A row for each table, as ``measures.judged`` has them, with ``options``, ``sessions`` and ``default_known``; and
    over all tables the median and mean regret of each method, and the worst key of the policy over NCCL's own choice.
    Where that was not measured, nothing is said of it: None.
    """
    methods: dict[str, Factory] = {**beside(control), SUBJECT: learned(net, control)}
    rows = []
    with players(processes) as play_all:
        runs = play_all([table.scenario for table in tables], methods, procedure, progress)
    for i, table in enumerate(tables):
        regret = {method: relative_regret(of[i : i + 1]) for method, of in runs.items()}
        row = judged(table.name, runs[SUBJECT][i : i + 1], regret, procedure)
        row |= {
            "sizes": len(table.scenario.nbytes),
            "options": int(table.scenario.valid.sum(1).max()) - (not table.default_known),
            "sessions": table.sessions,
            "default_known": table.default_known,
        }
        if not table.default_known:
            row |= dict.fromkeys(
                ("gap_closed", "default_vs_oracle", "worst_key_vs_default", "p99_key_vs_default"), None
            )
            row["regret"]["nccl"] = None
        rows.append(row)
    worst = [row["worst_key_vs_default"] for row in rows if row["default_known"]]
    said = {m: [row["regret"][m] for row in rows if row["regret"][m] is not None] for m in methods}
    return {
        "tables": rows,
        "median_regret": {m: float(np.median(of)) if of else None for m, of in said.items()},
        "mean_regret": {m: float(np.mean(of)) if of else None for m, of in said.items()},
        "worst_key_vs_default": max(worst, default=None),
        "procedure": dict(vars(procedure)),
    }
