"""The report of a run as a table for terminals."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dynamiccl_ray.report.data import mean_speedup, speedup, verdict


def terminal_table(summary: dict[str, Any]) -> Table:
    """Per key: times in us, speedup and actions; then geometric means. Takes a summary or an entry of its ``after``."""
    rows = summary["keys"]
    vendor = any(r.get("vendor_us") is not None for r in rows)
    title = f"after {summary['event']}" if "event" in summary else str(summary.get("name", "run"))
    table = Table(
        title=title,
        title_style="bold",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    # A run of one collective names it once, and one of one communicator does not name that.
    kinds = {row["key"].partition("/")[0] for row in rows}
    several = len({row["comm"] for row in rows}) > 1
    table.add_column(kinds.pop() if len(kinds) == 1 else "key", no_wrap=True)
    for name in ("NCCL", *(("vendor",) if vendor else ()), "learned", "best", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("configuration", no_wrap=True)
    for row in rows:
        exploited = row["learned_us"] is not None
        times = [row["default_us"], *((row.get("vendor_us"),) if vendor else ()), row["learned_us"], row["oracle_us"]]
        action, best = (row["action"] if exploited else "-"), row.get("oracle_action", "-")
        agrees = exploited and action == best
        table.add_row(
            (f"{row['communicator'] or row['comm']} " if several else "")
            + (row["key"] if kinds else row["key"].partition("/")[2]),
            *(_time(t) for t in times),
            _speedup_text(speedup(row)),
            Text(action, style="green") if agrees or best == "-" else Text(f"{action}, best {best}", style="yellow"),
        )
    table.add_section()
    means = summary["geomean_vs_oracle"] or {}
    shown = ["default", *(("vendor",) if vendor else ()), "learned"]
    table.add_row(
        Text("over best", style="bold"),
        *(Text(f"{means[m]:.3f}x" if m in means else "-", style="bold") for m in shown),
        Text("1.000x" if means else "-", style="bold"),
        _speedup_text(mean_speedup(rows), bold=True),
        "geometric means",
    )
    return table


def _time(us: float | None) -> str:
    """Three significant digits with a unit: narrow enough for a terminal of 80 columns."""
    if us is None:
        return "-"
    for scale, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= scale:
            return f"{us / scale:.3g}{unit}"
    return f"{us:.3g}us"


def _speedup_text(ratio: float | None, *, bold: bool = False) -> Text:
    if ratio is None:
        return Text("-")
    style = {"faster": "green", "slower": "red"}.get(verdict(ratio), "")
    return Text(f"{ratio:.2f}x", style=f"bold {style}".strip() if bold or style else style)
