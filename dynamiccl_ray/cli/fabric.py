"""``dynamiccl fabric``: what NCCL believes about a cluster, and what the model says is best there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dynamiccl_ray.cli.output import AsJson, Set, console, emit, show, stdout
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import Collective

if TYPE_CHECKING:
    from dynamiccl_ray.calibration.validate import Judged

Name = Annotated[str | None, typer.Option(help="Of the machine whose logs these are; their directory's by default.")]

fabric_app = typer.Typer(no_args_is_help=True, help="NCCL's cost model and the models of what really happens.")


@fabric_app.command("belief")
def fabric_belief(
    cases: Annotated[Path, typer.Option(help="Communicators and their graphs, as in nccl_cost_model/cases.csv.")],
    out: Annotated[Path, typer.Option(help="Directory for latbw.csv and choice.csv.")],
    as_json: AsJson = False,
) -> None:
    """NCCL's own predictions and choices for communicators that a CSV describes."""
    from dynamiccl_ray.fabric.belief_files import write_belief

    try:
        write_belief(cases, out)
    except (OSError, ValueError) as e:
        raise ConfigError(f"fabric belief: {e}") from None
    show({"latbw": str(out / "latbw.csv"), "choice": str(out / "choice.csv")}, as_json)


@fabric_app.command("show")
def fabric_show(
    cluster: Annotated[str, typer.Argument(help="A cluster YAML, or the name of a preset.")],
    nodes: Annotated[int, typer.Option(help="Up to so many, in powers of two.", max=65_536)] = 32,
    collective: Annotated[str, typer.Option(help="broadcast, reduce, all_gather, reduce_scatter or all_reduce.")] = (
        "all_reduce"
    ),
    out: Annotated[Path | None, typer.Option("--out", help="PNG to write; CLUSTER-COLLECTIVE.png by default.")] = None,
    override: Set = None,
    as_json: AsJson = False,
) -> None:
    """Which configuration is best at which size and number of nodes, and what NCCL would do there."""
    from dynamiccl_ray.fabric.crossover import crossover, draw_crossover, node_counts
    from dynamiccl_ray.fabric.presets import find_cluster

    machine = find_cluster(cluster, override or ())
    try:
        which = Collective[collective.upper()]
    except KeyError:
        names = ", ".join(c.name.lower() for c in Collective)
        raise ConfigError(f"--collective is {collective!r}; it must be one of {names}") from None
    try:
        found = crossover(machine, node_counts(machine, nodes), which)
    except ValueError as e:
        raise ConfigError(f"fabric show: {e}") from None
    if out is not None or not as_json:
        out = out or Path(f"{machine.name}-{collective.lower()}.png")
        try:
            out.write_bytes(draw_crossover(found))
        except OSError as e:
            raise ConfigError(f"--out {out}: cannot write it: {e.strerror}") from None
    if as_json:
        emit({"cluster": machine.name, "collective": which.name.lower(), "cells": found.rows()})
        return
    show({"map": str(out)}, as_json)


@fabric_app.command("worth")
def fabric_worth(as_json: AsJson = False) -> None:
    """How much NCCL's own choice leaves on the presets, and how often the best configuration changes."""
    from dynamiccl_ray.fabric.worth import worth

    document = worth()
    if as_json:
        emit(document)
        return
    _print(document["clusters"], "NCCL's time over the best")
    _print(document["collectives"], "The same by collective")
    _print(document["tiers"], "The same by tier and load")
    _print(document["changes"], "How often the best configuration changes")


@fabric_app.command("calibrate")
def fabric_calibrate(
    directory: Annotated[Path, typer.Argument(help="CSV tables of measurements, or logs of nccl-tests.")],
    out: Annotated[Path, typer.Option(help="YAML to write the machines' numbers to.")],
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Fit the physical model to measured times, machine by machine."""
    from dynamiccl_ray.calibration.calibrated import write_parameters
    from dynamiccl_ray.calibration.samples import read_library
    from dynamiccl_ray.calibration.validate import calibrate

    library = read_library(directory, name)
    judged = _with_progress(calibrate(library.machines), len(library.machines), "calibrating")
    if not any(j.calibrated for j in judged):
        raise ConfigError(
            "no machine could be calibrated: " + "; ".join(f"{j.machine.name}: {j.reason}" for j in judged)
        )
    try:
        write_parameters([j.calibrated for j in judged if j.calibrated], out)
    except OSError as e:
        raise ConfigError(f"--out {out}: cannot write it: {e.strerror}") from None
    _report(
        judged, library.skipped, as_json, title="Calibrated, judged on the same rows", also={"parameters": str(out)}
    )


@fabric_app.command("validate")
def fabric_validate(
    directory: Annotated[Path, typer.Argument(help="CSV tables of measurements, or logs of nccl-tests.")],
    params: Annotated[
        Path | None, typer.Option(help="What calibrate wrote; without, half of the rows are held out.")
    ] = None,
    name: Name = None,
    plots: Annotated[Path | None, typer.Option(help="Directory for a PNG per machine.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge the model on measured times: those given, or the half that calibration did not see."""
    from dynamiccl_ray.calibration.calibrated import read_parameters
    from dynamiccl_ray.calibration.samples import read_library
    from dynamiccl_ray.calibration.validate import validate, validate_halves

    library = read_library(directory, name)
    results = validate(library.machines, read_parameters(params)) if params else validate_halves(library.machines)
    judged = _with_progress(results, len(library.machines), "validating")
    also = {}
    if plots:
        from dynamiccl_ray.calibration.plot import draw_machine

        plots.mkdir(parents=True, exist_ok=True)
        for j in judged:
            if j.calibrated and j.report and j.report["rows"]:
                picture = draw_machine(j.calibrated, j.machine, j.held, j.report)
                (plots / f"{j.machine.name.replace('#', '-')}.png").write_bytes(picture)
        also["plots"] = str(plots)
    title = f"Judged with {params}" if params else "Calibrated on half of the rows, judged on the other half"
    _report(judged, library.skipped, as_json, title=title, also=also)


def _with_progress(results: Iterator[Judged], total: int, what: str) -> list[Judged]:
    judged = []
    with console.status(f"{what} {total} machines") as status:
        for result in results:
            judged.append(result)
            status.update(f"{what}: {len(judged)} of {total} machines, last {result.machine.name}")
    return judged


def _report(
    judged: list[Judged], skipped: Mapping[str, int], as_json: bool, *, title: str, also: dict[str, str]
) -> None:
    from dynamiccl_ray.calibration.validate import overall

    reports = [j.report for j in judged if j.report]
    missing = {j.machine.name: j.reason for j in judged if not j.report}
    if as_json:
        emit(
            {"machines": reports, "overall": overall(reports), "not_judged": missing, "left_out": dict(skipped), **also}
        )
        return
    columns = {
        "machine": "machine",
        "rows": "rows",
        "median_abs_rel_error": "median error",
        "p90_abs_rel_error": "p90 error",
        "equations_median_abs_rel_error": "equations alone",
        "winner_accuracy": "winner right",
        "winner_regret": "regret",
        "winner_cells": "cells",
    }
    if reports:
        _print([{head: "-" if r[key] is None else r[key] for key, head in columns.items()} for r in reports], title)
    show({**overall(reports), **also}, False)
    for name, reason in missing.items():
        console.print(f"not judged: {name}: {reason}", highlight=False)
    for reason, count in skipped.items():
        console.print(f"left out, {count}: {reason}", highlight=False)


def _print(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    stdout().print(table)
