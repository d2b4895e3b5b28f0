"""``dynamiccl demo``, ``online`` and ``explain``: the loop on a job, and what it decided."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from dynamiccl_ray.cli.output import AsJson, Set, Without, console, directory_for, emit, say_where, stdout

Out = Annotated[Path | None, typer.Option("--out", help="Directory of the run; runs/NAME-TIME by default.")]
Nccl = Annotated[
    Path | None,
    typer.Option("--nccl", help="Play the job on NCCL's own host code: a source tree of NCCL, or a tarball of one."),
]
Warm = Annotated[
    list[Path] | None,
    typer.Option("--warm", help="An earlier run on this cluster; what it measured is expected. Repeatable."),
]
Serial = Annotated[bool, typer.Option("--serial", help="One process, no Ray, repeatable to the last decision.")]


def _run(experiment: Any, out: Path | None, *, serial: bool, resume: Path | None, as_json: bool) -> None:
    from dynamiccl_ray.report.page import write_report
    from dynamiccl_ray.report.terminal import terminal_table
    from dynamiccl_ray.trainers.online.ending import Ending
    from dynamiccl_ray.trainers.online.run import run_online

    directory = directory_for(out, experiment.name)
    with console.status("starting") as status:
        summary = run_online(
            experiment,
            directory,
            serial=serial,
            resume=resume,
            progress=_progress(status.update),
            say=lambda what: console.print(what, highlight=False),
        )
    # Whoever tells a run to end may do so twice.
    with Ending():
        with console.status("writing the report"):
            try:
                report = str(write_report(directory))
            except OSError as e:
                report = f"not written: {e}"
        summary["report"] = report
        if as_json:
            emit(summary)
            return
        out_console = stdout()
        out_console.print(terminal_table(summary))
        for line in _verdict(summary):
            out_console.print(line, highlight=False)
        out_console.print(f"report: {report}", highlight=False, soft_wrap=True)
        say_where(directory, f"dynamiccl report {experiment.job}")


def _progress(show: Callable[[str], None]) -> Callable[[dict[str, Any]], None]:
    """One line that says where the run is; phases and events stay on the screen. In a log, a line now and then."""
    seen: dict[str, Any] = {"phase": "", "events": 0, "said_s": 0.0}

    def update(status: dict[str, Any]) -> None:
        last = status["history"][-1] if status["history"] else {"phase": status["phase"], "entropy": None}
        if last["phase"] != seen["phase"]:
            console.print(f"[{status['seconds']:6.1f} s] {_PHASE_NEWS[last['phase']]}", highlight=False)
            seen["phase"] = last["phase"]
        if len(status["events"]) > seen["events"]:
            event = status["events"][-1]
            when = f"at collective {event['at']:,}"
            console.print(f"[{status['seconds']:6.1f} s] the fabric changes {when}: {event['name']}", highlight=False)
            seen["events"] = len(status["events"])
        entropy = "" if last["entropy"] is None else f", entropy {last['entropy']:.2f}"
        where = (
            f"round {status['round']}, {status['collectives']:,} collectives, {last['phase']}{entropy}, "
            f"{status['switches']} table switches"
        )
        show(where)
        if not console.is_terminal and status["seconds"] - seen["said_s"] >= _LOG_EVERY_S:
            console.print(f"[{status['seconds']:6.1f} s] {status['ranks']} ranks, {where}", highlight=False)
            seen["said_s"] = status["seconds"]

    return update


_LOG_EVERY_S: Final = 30.0

_PHASE_NEWS = {
    "baseline": "measuring NCCL's own choice",
    "learn": "learning",
    "exploit": "using what was learned; no updates, watching for drift",
    "adapt": "the network has changed: learning again from what is known",
}


def _verdict(summary: dict[str, Any]) -> list[str | Text]:
    lines: list[str | Text] = []
    ratio = summary["geomean_vs_oracle"]
    if ratio:
        vendor = f", the vendor's tuner {ratio['vendor']:.3f}x" if "vendor" in ratio else ""
        lines.append(
            f"time over the best static choice per size: learned {ratio['learned']:.3f}x, "
            f"NCCL's default {ratio['default']:.3f}x{vendor}"
        )
    for after in summary["after"]:
        ratio = after["geomean_vs_oracle"]
        if ratio:
            delay = summary["detection_delay"]
            lines.append(
                f'after "{after["event"]}": learned {ratio["learned"]:.3f}x, NCCL\'s default {ratio["default"]:.3f}x'
                + (f"; noticed after {delay} collectives" if delay is not None else "")
            )
    false = summary["false_alarms"]
    if false is not None and (false["anew"] or false["checks"]):
        cost = "what that cost is not known"
        if false["cost_percent"] is not None:
            cost = f"that cost {false['cost_percent']:.2f} % of communication"
        lines.append(
            f"false alarms before anything had changed: {false['anew']} keys learned anew, {false['checks']} were "
            f"checked; {cost}"
        )
    if summary["agreement_violations"] is not None:
        lines.append(
            f"{summary['switches']} table switches; collectives on which two ranks differed: "
            f"{summary['agreement_violations']}"
        )
    for comm, why in summary["off"].items():
        lines.append(Text(f"communicator {comm}: tuning is off: {why}", style="yellow"))
    return lines


def demo(
    out: Out = None,
    serial: Serial = False,
    seed: Annotated[int, typer.Option(help="Seed of everything that is random.", min=0, max=2**31 - 1)] = 0,
    nccl: Nccl = None,
    override: Set = None,
    as_json: AsJson = False,
) -> None:
    """Learn on measured H200 times, survive a congestion event, and report; or a whole job on NCCL's own code."""
    from dynamiccl_ray.config.experiment import load

    with resources.as_file(resources.files("dynamiccl_ray") / "data") as data:
        path = data / ("demo.yaml" if nccl is None else "demo-nccl.yaml")
        experiment = load(path, [f"seed={seed}", *(override or ())])
    if nccl is not None:
        experiment = experiment.on_nccl(nccl)
    _run(experiment, out, serial=serial, resume=None, as_json=as_json)


def online(
    experiment: Annotated[Path, typer.Argument(help="An online experiment YAML, or the name of one that is shipped.")],
    out: Out = None,
    serial: Serial = False,
    resume: Annotated[Path | None, typer.Option(help="Directory of a run to go on from.")] = None,
    nccl: Nccl = None,
    warm: Warm = None,
    without: Without = None,
    override: Set = None,
    as_json: AsJson = False,
) -> None:
    """Run the loop beside a job, or on a played one."""
    from dynamiccl_ray.config.experiment import load
    from dynamiccl_ray.shipped import find

    settings = load(find("experiment", experiment), override or ())
    if nccl is not None:
        settings = settings.on_nccl(nccl)
    settings = settings.warmed(warm or ())
    settings = settings.model_copy(update={"reward": settings.reward.without(without or ())})
    _run(settings, out, serial=serial, resume=resume, as_json=as_json)


def release(
    job: Annotated[str, typer.Option(help="DYNAMICCL_JOB_ID of the training processes.")] = "default",
    as_json: AsJson = False,
) -> None:
    """Give the ranks of a job back to NCCL when their control plane is gone; all of them must be on this machine."""
    from dataclasses import asdict

    from dynamiccl_ray.actors.release import release as give_back

    released = give_back(job)
    if as_json:
        emit({"job": job, "communicators": [asdict(of) | {"comm": f"{of.comm:x}"} for of in released]})
        return
    if not released:
        console.print(f"no ranks of job {job!r} here", highlight=False)
    for of in released:
        was = "NCCL's own choice was in force" if not of.was_in_force else f"table {of.was_in_force} was taken back"
        waited = ""
        if of.was_open:
            waited = f"; version {of.was_open} was open and {'committed' if of.committed else 'aborted'}"
        console.print(f"communicator {of.comm:x}, {of.ranks} ranks: {was}{waited}", highlight=False)


def explain(
    run: Annotated[Path, typer.Argument(help="Directory of a run.")],
    key: Annotated[str, typer.Option(help="Only keys whose name contains this.")] = "",
    observation: Annotated[bool, typer.Option("--observation", help="Also what the policy sees of each key.")] = False,
    as_json: AsJson = False,
) -> None:
    """What is in force per communicator and size, why, and what it gains."""
    from dynamiccl_ray.trainers.online.explain import explain_run, explanation_table, observation_table

    explanation = explain_run(run, key)
    if as_json:
        emit(explanation)
        return
    tables = explanation_table(explanation)
    if observation:
        tables += [observation_table(comm, of) for comm in explanation["communicators"] for of in comm["keys"]]
    for table in tables:
        stdout().print(table)
