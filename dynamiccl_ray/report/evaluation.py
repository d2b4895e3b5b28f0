"""The report of an evaluation: one HTML file, and the same numbers as a table for terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dynamiccl_ray.evaluation.suite import SUBJECT, Assessment
from dynamiccl_ray.figures import inlined
from dynamiccl_ray.report.data import TIE
from dynamiccl_ray.report.page import page_environment

# Of the oracle's time: regrets closer than this are not told apart.
_EVEN: Final = 0.002


def write_evaluation_report(assessment: Assessment, about: Mapping[str, str], directory: Path) -> Path:
    """Writes report.html, which needs no other file, and returns its path. ``about`` names what was evaluated."""
    summary = assessment.summary
    environment = page_environment({"percent": percent, "verdict": _verdict})
    page = environment.get_template("evaluation.html.j2").render(
        summary=summary,
        about=about,
        findings={row["name"]: findings(row) for row in summary["splits"]},
        standing={row["name"]: _standing(row) for row in summary["splits"]},
        methods=list(summary["splits"][0]["regret"]),
        subject=SUBJECT,
        least=summary["least_regret"],
        tiers=_by_tier(summary["tiers"]),
        distinct=_distinct(summary["tiers"]),
        images=inlined(_figures(assessment)),
        version=version("dynamiccl-ray"),
    )
    path = directory / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def terminal_table(summary: Mapping[str, Any]) -> Table:
    """A row for each split, 80 columns wide."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="policy, nccl, vendor: time over the best, geometric mean over keys; closed: share of the gap between "
        "nccl and the best; worst: the key's time over nccl's; regret: of the policy over whole runs, and the least of "
        "any baseline",
    )
    for head in ("split", "policy", "nccl", "vendor", "closed", "worst", "regret", "least"):
        table.add_column(head, justify="left" if head == "split" else "right", no_wrap=True)
    for row in summary["splits"]:
        table.add_row(
            row["name"],
            f"{row['geomean_vs_oracle']:.3f}",
            f"{row['default_vs_oracle']:.3f}",
            "-" if row.get("vendor_vs_oracle") is None else f"{row['vendor_vs_oracle']:.3f}",
            percent(row["gap_closed"]),
            f"{row['worst_key_vs_default']:.3f}",
            percent(row["regret"][SUBJECT]),
            percent(min(row["regret"][method] for method in _rivals(row))),
        )
    return table


def findings(row: Mapping[str, Any]) -> list[str]:
    """A split in words: what was gained, what it cost, and where the policy loses."""
    policy, default, regret = row["geomean_vs_oracle"], row["default_vs_oracle"], row["regret"]
    said = [
        f"In the end, collectives take {policy:.3f} times the best configuration's time; NCCL's own choice takes "
        f"{default:.3f} (geometric means over keys). {_gap(row['gap_closed'])}"
    ]
    vendor = row.get("vendor_vs_oracle")
    if vendor is not None:
        # The vendor's tuner has channel counts that the table of static choices lacks.
        order = "ahead of" if policy < vendor * (1 - TIE) else "behind" if policy > vendor * (1 + TIE) else "level with"
        said.append(f"The vendor's tuner takes {vendor:.3f}: the policy is {order} it.")
    worst, tail = row["worst_key_vs_default"], row["p99_key_vs_default"]
    if worst > 1 + TIE:
        said.append(
            f"Its worst key takes {worst:.3f} times what NCCL's own choice does there; 99% of keys take at most "
            f"{tail:.3f} times as long."
        )
    else:
        said.append("No key ends more than 1% slower than under NCCL's own choice.")
    own = regret[SUBJECT]
    better = [m for m in _rivals(row) if regret[m] < own - _EVEN]
    worse = [m for m in _rivals(row) if regret[m] > own + _EVEN]
    cost = f"Over whole runs, with what it took to learn, it loses {percent(own)} of the oracle's time."
    if better:
        cost += f" Less is lost by {_named(better, regret)}."
    if worse:
        cost += f" More is lost by {_named(worse, regret)}."
    said.append(cost)
    if row["adapted"] is not None:
        delay = row["steps_to_adapt"]
        within = "" if delay is None else f", after {delay:.0f} collectives of each key in the median"
        said.append(f"After {percent(row['adapted'])} of the shifts it closed 90% of the new gap{within}.")
    return said


def percent(share: float | None) -> str:
    """One decimal; a dash for None."""
    return "-" if share is None else f"{100 * share:.1f}%"


def _gap(closed: float | None) -> str:
    if closed is None:
        return "NCCL's own choice is the best throughout, so there is no gap to close."
    if closed < 0:
        return f"By summed time it is worse than leaving NCCL alone: {percent(closed)} of the gap."
    return f"By summed time {percent(closed)} of the gap is closed."


def _named(methods: Sequence[str], regret: Mapping[str, float]) -> str:
    return ", ".join(f"{m} ({percent(regret[m])})" for m in sorted(methods, key=lambda m: regret[m]))


def _rivals(row: Mapping[str, Any]) -> list[str]:
    return [method for method in row["regret"] if method not in (SUBJECT, "oracle")]


def _standing(row: Mapping[str, Any]) -> str:
    """The policy against leaving NCCL alone: "behind" if it is worse in the end or over the whole run."""
    closed, ahead_by = row["gap_closed"], row["regret"]["nccl"] - row["regret"][SUBJECT]
    if (closed is not None and closed < 0) or ahead_by < -_EVEN:
        return "behind"
    return "ahead" if ahead_by > _EVEN else "level"


def _verdict(ratio: float) -> str:
    """The style of a time over NCCL's own."""
    return "faster" if ratio < 1 - TIE else "slower" if ratio > 1 + TIE else "same"


def _by_tier(rows: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    return {tier: [row for row in rows if row["tier"] == tier] for tier in sorted({row["tier"] for row in rows})}


def _distinct(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Sizes at which the policy's configuration is not the same on all tiers, and sizes in all."""
    chosen: dict[int, set[str]] = {}
    for row in rows:
        chosen.setdefault(row["bytes"], set()).add(row["policy"])
    return sum(len(names) > 1 for names in chosen.values()), len(chosen)


def _figures(assessment: Assessment) -> dict[str, bytes]:
    # Matplotlib takes a second to import, which tables in a terminal need not pay for.
    from dynamiccl_ray.knobs import Collective
    from dynamiccl_ray.report.evaluation_plots import decision_map, regret_curves, speedup_by_size

    measured = assessment.summary["procedure"]["measured"]
    figures = {
        "speedup": speedup_by_size(assessment.tier_rows),
        "decisions": decision_map(assessment.scale, SUBJECT, Collective.ALL_REDUCE, measured),
    }
    for name, traces in assessment.examples.items():
        of = next(iter(traces.values()))[0].scenario
        # The name of a measured split says where it is.
        where = "" if name.startswith("measured") else f": {of.cluster}, {of.nodes} nodes"
        figures[f"regret {name}"] = regret_curves(traces, name + where)
    return figures
