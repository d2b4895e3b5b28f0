"""``dynamiccl train`` and ``evaluate``: a policy from the fabric model, and what it is worth beside all baselines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dynamiccl_ray.cli.output import AsJson, Set, Without, console, directory_for, emit

Curriculum = Annotated[Path, typer.Argument(help="A curriculum YAML, or the name of one that is shipped.")]
Out = Annotated[Path | None, typer.Option("--out", help="Directory of the results; runs/NAME-TIME by default.")]


def train(
    curriculum: Curriculum,
    out: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Directory of a run to go on from.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the curriculum's.", min=0, max=2**31 - 1)] = None,
    runners: Annotated[int, typer.Option(min=0, help="Ray actors that sample; 0: this process.")] = 0,
    learners: Annotated[int, typer.Option(min=0, help="Ray actors that update; 0: this process.")] = 0,
    without: Without = None,
    override: Set = None,
    as_json: AsJson = False,
) -> None:
    """Learn on the fabric model, stage by stage, without a job."""
    from dynamiccl_ray.config.curriculum import load_curriculum
    from dynamiccl_ray.shipped import find
    from dynamiccl_ray.trainers.model.curriculum import run_curriculum

    lessons = load_curriculum(find("curriculum", curriculum), override or ())
    if seed is not None:
        lessons = lessons.model_copy(update={"seed": seed})
    lessons = lessons.model_copy(update={"reward": lessons.reward.without(without or ())})
    directory = directory_for(out, lessons.name)
    with console.status("sampling scenarios") as status:
        summary = run_curriculum(
            lessons,
            directory,
            resume=resume,
            runners=runners,
            learners=learners,
            progress=_lesson(status.update),
        )
    if as_json:
        emit(summary)
        return
    for stage in summary["stages"]:
        ended = "promoted" if stage["promoted"] else "ended at its last round, not promoted"
        Console().print(f"{stage['name']}: {ended} after {stage['rounds']} rounds; {_reached(stage)}", highlight=False)
    Console().print(f"policy: {summary['policy']}", highlight=False)


def _lesson(show: Callable[[str], None]) -> Callable[[dict[str, Any]], None]:
    """One line that says where the run is; what was validated stays on the screen."""
    seen = 0

    def update(status: dict[str, Any]) -> None:
        nonlocal seen
        for entry in status["history"][seen:]:
            words = f"{entry['stage']}, round {entry['round']}: {_reached(entry)}"
            console.print(f"[{status['seconds']:6.1f} s] {words}", highlight=False)
        seen = len(status["history"])
        rate = status["steps"] / max(1e-9, status["seconds"])
        show(f"round {status['round']}, stage {status['stage']}, {status['steps']:,} steps, {rate:,.0f}/s")

    return update


def _reached(entry: dict[str, Any]) -> str:
    return (
        f"gap closed {entry['gap_closed']:.1%}, {entry['geomean_vs_oracle']:.3f}x the oracle's time, "
        f"NCCL's default {entry['default_vs_oracle']:.3f}x"
    )


def evaluate(
    curriculum: Curriculum,
    checkpoint: Annotated[
        list[Path],
        typer.Option(
            help="A policy that `dynamiccl train` wrote; repeated, further seeds to show how much they differ."
        ),
    ],
    out: Out = None,
    scenarios: Annotated[int, typer.Option(min=1, help="Jobs in each modelled split.")] = 10,
    runs: Annotated[int, typer.Option(min=1, help="Independent runs of each job and method.")] = 5,
    learn: Annotated[int, typer.Option(min=0, help="Collectives of each key before any is measured.")] = 2000,
    override: Set = None,
    as_json: AsJson = False,
) -> None:
    """Judge a policy on every stage, on held-out clusters and on measured tables, beside all baselines."""
    from dynamiccl_ray.agent import policy
    from dynamiccl_ray.config.curriculum import load_curriculum
    from dynamiccl_ray.evaluation.measures import Procedure
    from dynamiccl_ray.evaluation.samples import SampleFile
    from dynamiccl_ray.evaluation.suite import assess
    from dynamiccl_ray.report.evaluation import terminal_table, write_evaluation_report
    from dynamiccl_ray.shipped import find

    lessons = load_curriculum(find("curriculum", curriculum), override or ())
    nets = [policy.load(path) for path in checkpoint]
    directory = directory_for(out, f"{lessons.name}-evaluation")
    procedure = Procedure(learn=learn, runs=runs)
    with console.status("starting") as status, SampleFile(directory / "samples.parquet", procedure) as samples:
        assessment = assess(
            lessons,
            nets,
            scenarios=scenarios,
            procedure=procedure,
            progress=status.update,
            played=samples.write,
        )
        status.update("writing the report")
    words: list[Any] = [
        "dynamiccl",
        "evaluate",
        curriculum,
        *(word for path in checkpoint for word in ("--checkpoint", path)),
    ]
    words += [
        "--scenarios",
        scenarios,
        "--runs",
        runs,
        "--learn",
        learn,
        *(word for said in override or () for word in ("--set", said)),
    ]
    about = {"curriculum": lessons.name, "checkpoint": checkpoint[0].name, "command": shlex.join(map(str, words))}
    report = write_evaluation_report(assessment, about, directory)
    document = {**assessment.summary, "report": str(report)}
    (directory / "evaluation.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if as_json:
        emit(document)
        return
    Console().print(terminal_table(document))
    Console().print(f"report: {report}", highlight=False)
