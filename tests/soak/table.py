"""What is printed at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
from accounting import Span
from attacking import Attack
from rich.console import Console
from rich.table import Table

PHASES = ("idle", "PREPARE", "COMMIT")


def stalls(attacks: list[Attack], spans: list[Span]) -> list[dict[str, Any]]:
    """Each attack with the longest span that was on at it, or began before the next one."""
    out = []
    for i, attack in enumerate(attacks):
        next_at = attacks[i + 1].at if i + 1 < len(attacks) else float("inf")
        followed = [span.seconds for span in spans if span.end > attack.at and span.begin < next_at]
        out.append({"part": attack.part, "deed": attack.deed, "phase": attack.phase, "s": max(followed, default=0.0)})
    return out


def by_part(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """p50, p99 and the worst by part, deed and phase."""
    out = []
    for part, deed, phase in sorted({(r["part"], r["deed"], r["phase"]) for r in rows}):
        s = [r["s"] for r in rows if (r["part"], r["deed"], r["phase"]) == (part, deed, phase)]
        p50, p99 = np.percentile(s, [50, 99])
        out.append({"part": part, "deed": deed, "phase": phase, "n": len(s), "p50": p50, "p99": p99, "worst": max(s)})
    return out


def show(results: list[dict[str, Any]]) -> None:
    console = Console(width=120)
    for result in results:
        table = Table(title=f"stalls, {result['name']}: seconds that a rank waited in the plugin after an attack")
        for name in ("part", "deed", "phase", "n", "p50", "p99", "worst"):
            table.add_column(name, justify="left" if name in ("part", "deed", "phase") else "right")
        for row in result["stalls"]:
            seconds = [f"{row[name]:.2f}" for name in ("p50", "p99", "worst")]
            table.add_row(row["part"], row["deed"], row["phase"], str(row["n"]), *seconds)
        console.print(table)
    table = Table(title="soak")
    table.add_column("")
    names: dict[str, None] = {}
    for result in results:
        table.add_column(result["name"], justify="right")
        names |= dict.fromkeys(result["totals"])
    for name in names:
        values = [result["totals"].get(name, "") for result in results]
        table.add_row(name, *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values))
    console.print(table)
    grown = Table(title="the longest-lived process of each part")
    for name in ("run", "part", "lived, s", "MiB", "MiB at the end", "files", "files at the end"):
        grown.add_column(name, justify="left" if name in ("run", "part") else "right")
    for result in results:
        for part, use in result["growth"].items():
            grown.add_row(result["name"], part, *(f"{value:.0f}" for value in use.values()))
    console.print(grown)
    for result in results:
        for line in result["wrong"]:
            console.print(f"[red]{result['name']}: {line}", highlight=False)
