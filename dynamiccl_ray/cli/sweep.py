"""``dynamiccl sweep``: settings of an experiment or a curriculum, tried on Ray Tune."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from dynamiccl_ray.cli.output import AsJson, Set, console, directory_for, emit, say_where, stdout


def sweep(
    sweep: Annotated[Path, typer.Argument(help="A sweep YAML, or the name of one that is shipped.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Directory of the results; runs/NAME-TIME by default. A sweep in it goes on."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Directory of a sweep to go on with; trials that are done are kept.")
    ] = None,
    override: Set = None,
    as_json: AsJson = False,
) -> None:
    """Try settings of an experiment or a curriculum, and write the best back as a YAML."""
    from dynamiccl_ray.config.sweep import load_sweep
    from dynamiccl_ray.config.sweep_target import find_target
    from dynamiccl_ray.errors import ConfigError
    from dynamiccl_ray.report.sweep import findings, terminal_table, write_sweep_report
    from dynamiccl_ray.shipped import find

    path = find("sweep", sweep)
    settings = load_sweep(path, override or ())
    target = find_target(settings, path)
    if resume is not None and out is not None and resume != out:
        raise ConfigError(f"--resume {resume} and --out {out} name two directories; give one")
    if resume is not None and not (resume / "sweep.json").exists():
        raise ConfigError(f"--resume {resume}: no sweep is there; give the directory that --out named")
    from dynamiccl_ray.trainers.sweep.results import write_files
    from dynamiccl_ray.trainers.sweep.run import run_sweep

    directory = directory_for(resume or out, settings.name)
    console.print(f"results: {directory}", highlight=False)
    result = run_sweep(settings, target, directory, console)
    write_files(settings, target, result, directory)
    words = ["dynamiccl", "sweep", str(sweep), *(word for said in override or () for word in ("--set", said))]
    report = write_sweep_report(result, shlex.join(words), directory)
    if as_json:
        emit({**result, "report": str(report), "best_yaml": str(directory / "best.yaml")})
        return
    stdout().print(terminal_table(result))
    for sentence in findings(result):
        stdout().print(sentence, highlight=False)
    stdout().print(f"settings of the best: {directory / 'best.yaml'}", highlight=False, soft_wrap=True)
    stdout().print(f"report: {report}", highlight=False, soft_wrap=True)
    say_where(directory, f"dynamiccl report --sweep {settings.name}")
