"""``dynamiccl train``, ``offline`` and ``evaluate``: a policy from the fabric model, or from earlier runs, and what it
is worth beside all baselines."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dynamiccl_ray.cli.output import AsJson, Set, Without, console, directory_for, emit, stdout
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.trainers.offline import Method

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

    lessons = load_curriculum(find("curriculum", curriculum), override or ())
    if seed is not None:
        lessons = lessons.model_copy(update={"seed": seed})
    lessons = lessons.model_copy(update={"reward": lessons.reward.without(without or ())})
    # RLlib takes seconds to import. What is wrong with the settings is said before.
    from dynamiccl_ray.trainers.model.curriculum import run_curriculum

    directory = directory_for(out, lessons.name)
    with console.status("sampling scenarios") as status:
        summary = run_curriculum(
            lessons,
            directory,
            resume=resume,
            runners=runners,
            learners=learners,
            processes=len(os.sched_getaffinity(0)),
            progress=_lesson(status.update),
        )
    if as_json:
        emit(summary)
        return
    for stage in summary["stages"]:
        ended = "promoted" if stage["promoted"] else "ended at its last round, not promoted"
        stdout().print(f"{stage['name']}: {ended} after {stage['rounds']} rounds; {_reached(stage)}", highlight=False)
    stdout().print(f"policy: {summary['policy']}", highlight=False, soft_wrap=True)


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


def offline(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs of `dynamiccl online`.")],
    method: Annotated[
        Method, typer.Option(help="Behaviour cloning, cloning of what brought more than was expected, or PPO.")
    ] = Method.PPO,
    start: Annotated[
        Path | None, typer.Option("--from", help="A policy to go on from. By default the one that ships.")
    ] = None,
    out: Out = None,
    seed: Annotated[int, typer.Option(help="Of the order of what is learned from.", min=0, max=2**31 - 1)] = 0,
    as_json: AsJson = False,
) -> None:
    """Learn from what earlier runs have recorded, without a job and without the model."""
    from dynamiccl_ray.config.experiment import DEFAULT_POLICY
    from dynamiccl_ray.trainers.offline.run import run_offline

    directory = directory_for(out, f"offline-{method.value}")
    with console.status("reading what was recorded") as status:
        summary = run_offline(
            runs,
            directory,
            method=method,
            start=start or DEFAULT_POLICY,
            seed=seed,
            progress=lambda of: status.update(f"pass {of['pass']} of {of['passes']}; {_likelihood(of)}"),
        )
    if as_json:
        emit(summary)
        return
    said = f"{summary['decisions']:,} decisions, {summary['passes']} passes in {summary['seconds']:.1f} s"
    stdout().print(said, highlight=False)
    for when in ("before", "after"):
        stdout().print(f"{when}: {_likelihood(summary[when])}", highlight=False)
    stdout().print(f"policy: {summary['policy']}", highlight=False, soft_wrap=True)


def _likelihood(of: dict[str, Any]) -> str:
    return f"log-probability of what was drawn {of['log_prob']:.4f}, of the better half {of['better']:.4f}"


def evaluate(
    curriculum: Annotated[str | None, typer.Argument(help="A curriculum YAML, or the name of one that ships.")] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            help="A policy that `dynamiccl train` wrote; repeated, further seeds to show how much they differ. By "
            "default the one that ships."
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="Instead of a curriculum: a directory of CSV tables, or of logs of nccl-tests."),
    ] = None,
    out: Out = None,
    scenarios: Annotated[int | None, typer.Option(min=1, help="Jobs in each modelled split; 10 by default.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Independent runs of each job and method.")] = 5,
    learn: Annotated[int, typer.Option(min=0, help="Collectives of each key before any is measured.")] = 2000,
    override: Set = None,
    as_json: AsJson = False,
) -> None:
    """Judge a policy on every stage, on held-out clusters and on measured tables, beside all baselines; or on your own
    measurements."""
    from dynamiccl_ray.agent import policy
    from dynamiccl_ray.config.curriculum import load_curriculum
    from dynamiccl_ray.config.experiment import DEFAULT_POLICY
    from dynamiccl_ray.evaluation.measures import Procedure
    from dynamiccl_ray.evaluation.samples import SampleFile
    from dynamiccl_ray.evaluation.suite import assess
    from dynamiccl_ray.report.evaluation import terminal_table, write_evaluation_report
    from dynamiccl_ray.shipped import find

    checkpoint = checkpoint or [DEFAULT_POLICY]
    nets = [policy.load(path) for path in checkpoint]
    procedure = Procedure(learn=learn, runs=runs)
    if (curriculum is None) == (measured is None):
        raise ConfigError("evaluate: name either a curriculum, or with --measured a directory of measurements")
    if measured is not None:
        if scenarios is not None or override:
            raise ConfigError(
                f"evaluate: {'--set' if override else '--scenarios'} is for a curriculum, and --measured has none; "
                "leave it out"
            )
        _on_measured(measured, nets, procedure, out, as_json)
        return
    assert curriculum is not None
    scenarios = 10 if scenarios is None else scenarios
    lessons = load_curriculum(find("curriculum", curriculum), override or ())
    directory = directory_for(out, f"{lessons.name}-evaluation")
    with console.status("starting") as status, SampleFile(directory / "samples.parquet", procedure) as samples:
        assessment = assess(
            lessons,
            nets,
            scenarios=scenarios,
            procedure=procedure,
            processes=len(os.sched_getaffinity(0)),
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
    stdout().print(terminal_table(document))
    stdout().print(f"report: {report}", highlight=False)


def _on_measured(directory: Path, nets: Any, procedure: Any, out: Path | None, as_json: bool) -> None:
    from rich.table import Table

    from dynamiccl_ray.calibration.cells import joined
    from dynamiccl_ray.calibration.samples import read_library
    from dynamiccl_ray.config.control import Control
    from dynamiccl_ray.evaluation.suite import horizon_of
    from dynamiccl_ray.evaluation.tables import judge_tables
    from dynamiccl_ray.simulation.tables import LEAST_OPTIONS, tables

    if len(nets) > 1:
        raise ConfigError("--measured: one --checkpoint is judged at a time")
    library = read_library(directory)
    found, left_out = tables(joined(library.machines), horizon=horizon_of(procedure))
    left_out |= library.skipped
    if not found:
        why = "".join(f"; left out, {count}: {reason}" for reason, count in left_out.items())
        raise ConfigError(
            f"{directory}: no size has {LEAST_OPTIONS} measured options, NCCL's own choice or one pair each; measure "
            f"more of them{why}"
        )
    if out is not None:
        directory_for(out, "")
    with console.status("starting") as status:
        document = judge_tables(
            found,
            nets[0],
            procedure,
            control=Control(),
            processes=len(os.sched_getaffinity(0)),
            progress=status.update,
        )
    document["left_out"] = left_out
    if out is not None:
        (out / "evaluation.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if as_json:
        emit(document)
        return
    page = Table(title=f"regret on what was measured in {directory}")
    for column in ("machine", "sizes", "options", "NCCL over best", "policy over best", "policy", "least of a rival"):
        page.add_column(column, overflow="fold")
    for row in document["tables"]:
        rivals = {m: of for m, of in row["regret"].items() if m not in ("policy", "oracle") and of is not None}
        least = min(rivals, key=lambda m: rivals[m])
        default = row["default_vs_oracle"]
        page.add_row(
            row["name"] + (", then another session" if row["sessions"] > 1 else ""),
            str(row["sizes"]),
            str(row["options"]),
            "not measured" if default is None else f"{default:.3f}",
            f"{row['geomean_vs_oracle']:.3f}",
            f"{row['regret']['policy']:.2%}",
            f"{rivals[least]:.2%} {least}",
        )
    stdout().print(page)
    median = document["median_regret"]
    shown = {m: of for m, of in median.items() if m != "oracle" and of is not None}
    said = ", ".join(f"{m} {shown[m]:.2%}" for m in sorted(shown, key=lambda m: shown[m]))
    stdout().print(f"median regret: {said}", highlight=False)
    if (worst := document["worst_key_vs_default"]) is not None:
        stdout().print(f"worst size of the policy over NCCL's own choice: {worst:.3f}x", highlight=False)
    for reason, count in left_out.items():
        console.print(f"left out, {count}: {reason}", highlight=False)
