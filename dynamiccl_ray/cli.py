"""The command line. Every command takes ``--json`` and then prints one JSON document on stdout and nothing else.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dynamiccl_ray import cli_learning
from dynamiccl_ray.cli_fabric import fabric_app
from dynamiccl_ray.cli_output import AsJson, Without, console, emit, show
from dynamiccl_ray.cli_workload import workload_app
from dynamiccl_ray.errors import DynamicclError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Learns, while a PyTorch job trains, which NCCL configuration each collective should use.",
)
plugin_app = typer.Typer(no_args_is_help=True, help="The NCCL plugin of this installation.")
bench_app = typer.Typer(no_args_is_help=True, help="The budgets, measured on this machine.")
app.add_typer(plugin_app, name="plugin")
app.add_typer(bench_app, name="bench")
app.add_typer(fabric_app, name="fabric")
app.add_typer(workload_app, name="workload")
cli_learning.register(app)

Out = Annotated[Path | None, typer.Option("--out", help="Directory of the run; runs/NAME-TIME by default.")]
Nccl = Annotated[
    Path | None,
    typer.Option("--nccl", help="Play the job on NCCL's own host code: a source tree of NCCL, or a tarball of one."),
]
Serial = Annotated[bool, typer.Option("--serial", help="One process, no Ray, repeatable to the last decision.")]


def main() -> None:
    """Entry point: users' mistakes end with one line and exit code 2."""
    try:
        app()
    except DynamicclError as e:
        console.print(f"[bold red]error:[/] {e}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _run(experiment: Any, out: Path | None, *, serial: bool, resume: Path | None, as_json: bool) -> None:
    from dynamiccl_ray.report import terminal_table, write_report
    from trainers.online import run_online

    directory = out or Path("runs") / f"{experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with console.status("starting") as status:
        summary = run_online(
            experiment,
            directory,
            serial=serial,
            resume=resume,
            progress=_progress(status.update),
            say=lambda what: console.print(what, highlight=False),
        )
        status.update("writing the report")
        report = write_report(directory)
    summary["report"] = str(report)
    if as_json:
        emit(summary)
        return
    out_console = Console()
    out_console.print(terminal_table(summary))
    for line in _verdict(summary):
        out_console.print(line, highlight=False)
    out_console.print(f"report: {report}", highlight=False)


def _progress(show: Callable[[str], None]) -> Callable[[dict[str, Any]], None]:
    """One line that says where the run is; phases and events stay on the screen."""
    seen: dict[str, Any] = {"phase": "", "events": 0}

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
        show(
            f"round {status['round']}, {status['collectives']:,} collectives, {last['phase']}{entropy}, "
            f"{status['switches']} table switches"
        )

    return update


_PHASE_NEWS = {
    "baseline": "measuring NCCL's own choice",
    "learn": "learning",
    "exploit": "using what was learned; no updates, watching for drift",
    "adapt": "drift found: learning again from what is known",
}


def _verdict(summary: dict[str, Any]) -> list[str]:
    lines = []
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
    if summary["agreement_violations"] is not None:
        lines.append(
            f"{summary['switches']} table switches; collectives on which two ranks differed: "
            f"{summary['agreement_violations']}"
        )
    for comm, why in summary["off"].items():
        lines.append(f"[yellow]communicator {comm}: tuning is off: {why}[/]")
    return lines


@app.command()
def demo(
    out: Out = None,
    serial: Serial = False,
    seed: Annotated[int, typer.Option(help="Seed of everything that is random.")] = 0,
    nccl: Nccl = None,
    as_json: AsJson = False,
) -> None:
    """Learn on measured H200 times, survive a congestion event, and report; or a whole job on NCCL's own code."""
    from dynamiccl_ray.experiment import load

    with resources.as_file(resources.files("dynamiccl_ray") / "data") as data:
        experiment = load(data / ("demo.yaml" if nccl is None else "demo-nccl.yaml"))
    experiment = experiment.model_copy(update={"seed": seed})
    if nccl is not None:
        experiment = experiment.on_nccl(nccl)
    _run(experiment, out, serial=serial, resume=None, as_json=as_json)


@app.command()
def online(
    experiment: Annotated[Path, typer.Argument(help="An online experiment YAML.")],
    out: Out = None,
    serial: Serial = False,
    resume: Annotated[Path | None, typer.Option(help="Directory of a run to go on from.")] = None,
    nccl: Nccl = None,
    without: Without = None,
    as_json: AsJson = False,
) -> None:
    """Run the loop beside a job, or on a played one."""
    from dynamiccl_ray.experiment import load

    settings = load(experiment)
    if nccl is not None:
        settings = settings.on_nccl(nccl)
    settings = settings.model_copy(update={"reward": settings.reward.without(without or ())})
    _run(settings, out, serial=serial, resume=resume, as_json=as_json)


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="Directory of a run.")],
    key: Annotated[str, typer.Option(help="Only keys whose name contains this.")] = "",
    as_json: AsJson = False,
) -> None:
    """What is in force per communicator and size, why, and what it gains."""
    from trainers.explain import explain_run, explanation_table

    explanation = explain_run(run, key)
    if as_json:
        emit(explanation)
    else:
        for table in explanation_table(explanation):
            Console().print(table)


@app.command()
def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Remove segments of dead processes.")] = False,
    as_json: AsJson = False,
) -> None:
    """What is wrong here, and the fix."""
    from plugin_bridge.doctor import diagnose

    checks = diagnose(fix=fix)
    if as_json:
        emit({"checks": [c.__dict__ for c in checks], "ok": all(c.status != "fail" for c in checks)})
    else:
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}
        for check in checks:
            Console().print(
                f"[{colour[check.status]}]{check.status:>4}[/] {check.name}: {check.found}", highlight=False
            )
            if check.fix:
                Console().print(f"     {check.fix}", highlight=False)
    raise typer.Exit(1 if any(c.status == "fail" for c in checks) else 0)


@plugin_app.command("path")
def plugin_path(as_json: AsJson = False) -> None:
    """Where the shared object is."""
    from plugin_bridge.doctor import require_plugin

    path = str(require_plugin())
    emit({"path": path}) if as_json else print(path)


@plugin_app.command("env")
def plugin_env(
    job: Annotated[str, typer.Option(help="Job id that the run will look for.")] = "default",
    as_json: AsJson = False,
) -> None:
    """The variables to export in every training process: eval "$(dynamiccl plugin env --job NAME)"."""
    from plugin_bridge.doctor import plugin_variables

    variables = plugin_variables(job)
    if as_json:
        emit(variables)
    else:
        for name, value in variables.items():
            print(f"export {name}={value}")


@bench_app.command("plugin")
def bench_plugin(
    nccl: Annotated[
        Path | None,
        typer.Option(
            "--nccl",
            help="Inside of NCCL's own host code, beside NVIDIA's plugins: a source tree of NCCL, or a tarball of one.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="With --nccl: turns of all set-ups.", min=1)] = 10,
    as_json: AsJson = False,
) -> None:
    """Nanoseconds that the plugin adds to a collective."""
    if nccl is not None:
        from plugin_bridge.bench_nccl import bench_plugin_on_nccl, render

        with console.status("starting") as status:
            document = bench_plugin_on_nccl(nccl, rounds=rounds, say=status.update)
        if as_json:
            emit(document)
            return
        Console().print(render(document))
        show({name: document[name] for name in ("targets", "played", "hardware")}, as_json)
        return
    from plugin_bridge.bench import bench_plugin as bench

    show(bench(), as_json)


@bench_app.command("channel")
def bench_channel(as_json: AsJson = False) -> None:
    """Records per second through the shared-memory ring."""
    from plugin_bridge.bench import bench_channel as bench

    show(bench(), as_json)


@bench_app.command("activation")
def bench_activation(
    repeats: Annotated[int, typer.Option(help="Switches to time.")] = 60, as_json: AsJson = False
) -> None:
    """From new weights to the new table in force on all ranks."""
    from trainers.bench_activation import bench_activation as bench

    show(bench(repeats), as_json)


@bench_app.command("train")
def bench_train(
    curriculum: Annotated[Path, typer.Argument(help="A curriculum YAML.")] = Path("experiments/curricula/default.yaml"),
    as_json: AsJson = False,
) -> None:
    """Environment steps per second, learner included, beside RLlib's stock runner."""
    from dynamiccl_ray.curriculum import load_curriculum
    from trainers.bench_train import bench_train as bench

    show(bench(load_curriculum(curriculum)), as_json)


@bench_app.command("fabric")
def bench_fabric(as_json: AsJson = False) -> None:
    """Configurations per second that the physical model prices, and the memory that takes."""
    from dynamiccl_ray.fabric.bench import bench_fabric as bench

    show(bench(), as_json)


if __name__ == "__main__":
    main()
