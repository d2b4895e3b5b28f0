"""The report of a sweep: one HTML file, and the same numbers as a table for terminals."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dynamiccl_ray.figures import inlined
from dynamiccl_ray.report.page import page_environment
from dynamiccl_ray.report.values import number, value_name


def write_sweep_report(result: Mapping[str, Any], command: str, out: Path) -> Path:
    """Writes report.html, which needs no other file, and returns its path. ``result`` is results.json."""
    # Matplotlib takes a second to import, which tables in a terminal need not pay for.
    from dynamiccl_ray.report.sweep_plots import curves, each_key, parallel_coordinates

    figures = {"parallel": parallel_coordinates(result), "keys": each_key(result), "curves": curves(result)}
    environment = page_environment({"number": number, "value": value_name})
    page = environment.get_template("sweep.html.j2").render(
        result=result,
        keys=list(result["trials"][0]["params"]),
        findings=findings(result),
        images=inlined({name: png for name, png in figures.items() if png is not None}),
        command=command,
        version=version("dynamiccl-ray"),
    )
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def terminal_table(result: Mapping[str, Any]) -> Table:
    """A row for each trial, the best first."""
    keys = list(result["trials"][0]["params"])
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption="trial 0 begins with the target's own settings")
    for head in ("trial", *keys, result["metric"], "error", "state", "seconds"):
        table.add_column(head, justify="right")
    for trial in ranked(result):
        bold = "bold" if trial["id"] == result["best"]["id"] else None
        table.add_row(
            str(trial["id"]),
            *(value_name(trial["params"][key]) for key in keys),
            number(trial["metric"]),
            number(trial["error"]),
            trial["status"],
            f"{trial['seconds']:.0f}",
            style=bold,
        )
    return table


def ranked(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The trials, the best first, and last those that have no result."""
    sign = 1 if result["goal"] == "min" else -1
    order = {"done": 0, "stopped": 1}
    return sorted(
        result["trials"],
        key=lambda t: (t["metric"] is None, order.get(t["status"], 2), sign * (t["metric"] or 0.0)),
    )


def findings(result: Mapping[str, Any]) -> list[str]:
    """What the sweep says, in words."""
    said = []
    metric, best = result["metric"], result["best"]
    compared, confirmed = result["compared"], result["confirmed"]
    settings = ", ".join(f"{key} = {value_name(value)}" for key, value in best["params"].items())
    if best["id"] == 0:
        said.append(f"Nothing that was tried is better than the target as it is: {metric} {number(best['metric'])}.")
    else:
        said.append(f"The best is trial {best['id']}, with {settings}: {metric} {number(best['metric'])}.")
        if compared is not None:
            said.append(f"The target as it is has {number(compared['default'])}. {_verdict(compared)}")
        if confirmed is not None:
            said.append(
                f"Once more, with seeds that no trial had: {number(confirmed['best'])} against "
                f"{number(confirmed['default'])}. {_verdict(confirmed)}"
            )
    failed = [trial for trial in result["trials"] if trial["status"] == "failed"]
    if failed:
        said.append(f"{len(failed)} trials failed, the first because: {failed[0]['failure']}")
    return said


def _verdict(compared: Mapping[str, Any]) -> str:
    by, error, seeds = compared["better_by"], compared["standard_error"], compared["seeds"]
    if error is None:
        return f"It is better by {number(by)}; one seed cannot say whether that is noise."
    sure = "beyond noise" if compared["beyond_noise"] else "not beyond noise"
    word = "better" if by >= 0 else "worse"
    return f"It is {word} by {number(abs(by))}, with a standard error of {number(error)} over {seeds} seeds: {sure}."
