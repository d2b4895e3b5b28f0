"""``dynamiccl workload``: what a workload asks of the network, and how well the models meet published figures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dynamiccl_ray.cli.output import AsJson, Set, console, emit, stdout
from dynamiccl_ray.errors import ConfigError

workload_app = typer.Typer(no_args_is_help=True, help="Training jobs as streams of collectives.")


@workload_app.command("show")
def show(
    workload: Annotated[
        Path, typer.Argument(help="A workload or trace YAML, the name of a shipped workload, or a TRACE.jsonl.")
    ],
    rank: Annotated[int, typer.Option(help="Whose calls.", min=0)] = 0,
    step: Annotated[int, typer.Option(help="Which step, from 0: some exchange every tau steps only.", min=0)] = 0,
    override: Set = None,
    as_json: AsJson = False,
) -> None:
    """The calls of one rank in one iteration, or of a trace, per communicator and collective."""
    if workload.suffix == ".jsonl":
        if rank or step or override:
            raise ConfigError(
                f"{workload}: a trace is of one rank and has no steps or settings; leave out --rank, --step, --set"
            )
        _show_trace(workload, as_json)
        return
    from dynamiccl_ray.shipped import find
    from dynamiccl_ray.workloads.recorded import is_trace, load_trace
    from dynamiccl_ray.workloads.stream import iteration
    from dynamiccl_ray.workloads.workload import load_workload

    path = find("workload", workload)
    if is_trace(path):
        if rank or step:
            raise ConfigError(f"{workload}: a trace has one step, the same on all ranks; leave out --rank and --step")
        trace = load_trace(path, override or ())
        rows = trace.stream().summary()
        if as_json:
            emit({"name": trace.name, "calls": rows})
            return
        _calls(f"{trace.name}: a step, recorded", rows)
        return
    loaded = load_workload(path, override or ())
    if rank >= loaded.degrees.ranks:
        raise ConfigError(f"--rank {rank}: {workload} has ranks 0 to {loaded.degrees.ranks - 1}")
    stream = iteration(loaded, rank=rank, step=step)
    rows = stream.summary()
    compute_us = float(stream.calls["gap_us"].sum()) + stream.tail_us
    if as_json:
        emit({"name": loaded.name, "parallelism": loaded.parallelism, "compute_us": compute_us, "calls": rows})
        return
    _calls(f"{loaded.name}: {loaded.parallelism}, {compute_us / 1e3:.1f} ms of compute", rows)


@workload_app.command("record")
def record(
    run: Annotated[Path, typer.Argument(help="The directory of a run, of any mode but off.")],
    out: Annotated[Path, typer.Option(help="The trace YAML to write.")],
    as_json: AsJson = False,
) -> None:
    """The communicators of a run and the collectives of one step on each, as a YAML that can be played again."""
    from dynamiccl_ray.trainers.online.recording import record_run, write_trace_yaml

    found = record_run(run)
    write_trace_yaml(found.trace, out)
    if as_json:
        emit({"trace": str(out), "notes": found.notes})
        return
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    print(f"trace: {out}")


def _show_trace(path: Path, as_json: bool) -> None:
    from dynamiccl_ray.workloads.trace import read_trace, replay

    stream = replay(read_trace(path))
    rows = stream.summary()
    # A trace's clock may start anywhere.
    span_us = float(stream.calls["gap_us"][1:].sum())
    if as_json:
        emit({"name": path.name, "span_us": span_us, "calls": rows})
        return
    _calls(f"{path.name}: {len(stream.calls)} calls in {span_us / 1e3:.1f} ms", rows)


def _calls(title: str, rows: list[dict[str, Any]]) -> None:
    columns = ("group", "ranks", "collective", "calls", "smallest", "median", "largest", "total", "share")
    sizes = ("min_bytes", "median_bytes", "max_bytes", "effective_bytes")
    cells = [
        [
            r["communicator"],
            # A trace does not say.
            str(len(r["ranks"]) or ""),
            r["operation"],
            str(r["count"]),
            *(_size(r[s]) for s in sizes),
            f"{r['share']:.1%}",
        ]
        for r in rows
    ]
    _table(title, columns, cells)


@workload_app.command("reproduce")
def reproduce_facts(
    facts: Annotated[
        Path | None, typer.Option(help="Facts CSV; the shipped rows of Shi et al. 2020 by default.")
    ] = None,
    networks: Annotated[Path | None, typer.Option(help="Networks YAML; the shipped one by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Published throughputs of seven schedules against the model."""
    from dynamiccl_ray.workloads.reproduce import reproduce

    result = reproduce(facts, networks).document()
    if as_json:
        emit(result)
        return
    columns = ("model", "network", "GPUs", "schedule", "measured/s", "predicted/s", "error")
    cells = [
        [
            r["model"],
            r["network"],
            str(r["gpus"]),
            r["schedule"],
            f"{r['measured_samples_per_s']:.1f}",
            f"{r['predicted_samples_per_s']:.1f}",
            f"{r['error']:+.1%}",
        ]
        for r in result["rows"]
    ]
    _table("samples per second", columns, cells)
    found = result["order"]
    print(f"median error {result['median_error']:.1%} over {len(cells)} rows")
    print(f"order right in {found['right']} of {found['pairs']} pairs ({result['order_accuracy']:.1%})")
    print(f"without ties {found['untied_right']} of {found['untied']} ({result['order_accuracy_without_ties']:.1%})")
    for line in result["skipped"]:
        console.print(f"left out: {line}", highlight=False, soft_wrap=True)


@workload_app.command("reference")
def reference(as_json: AsJson = False) -> None:
    """Published reference points and the model's values."""
    from dynamiccl_ray.workloads.reference_points import reference_points

    points = reference_points()
    if as_json:
        emit({"points": [asdict(p) | {"error": p.error} for p in points]})
        return
    cells = [[p.name, f"{p.published:g}", f"{p.model:.4g}", p.unit, f"{p.error:+.1%}"] for p in points]
    _table("reference points", ("what", "published", "model", "unit", "error"), cells)


def _table(title: str, columns: tuple[str, ...], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    stdout().print(table)


def _size(nbytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"
