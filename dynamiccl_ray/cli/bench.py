"""``dynamiccl bench``: the budgets, measured on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynamiccl_ray.cli.output import AsJson, Set, console, emit, show, stdout

bench_app = typer.Typer(no_args_is_help=True, help="The budgets, measured on this machine.")


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
    in_band: Annotated[
        bool, typer.Option("--in-band", help="With a table that was put in force at a step boundary.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Nanoseconds that the plugin adds to a collective."""
    if nccl is not None:
        if in_band:
            raise typer.BadParameter(
                "--in-band is not for --nccl, where tables come from a coordinator; leave out one of them"
            )
        from dynamiccl_ray.plugin_bridge.bench_nccl import bench_plugin_on_nccl, render

        with console.status("starting") as status:
            document = bench_plugin_on_nccl(nccl, rounds=rounds, say=status.update)
        if as_json:
            emit(document)
            return
        stdout().print(render(document))
        show({name: document[name] for name in ("targets", "played", "hardware")}, as_json)
        return
    from dynamiccl_ray.plugin_bridge.bench import bench_plugin as bench

    show(bench(in_band=in_band), as_json)


@bench_app.command("channel")
def bench_channel(as_json: AsJson = False) -> None:
    """Records per second through the shared-memory ring."""
    from dynamiccl_ray.plugin_bridge.bench import bench_channel as bench

    show(bench(), as_json)


@bench_app.command("activation")
def bench_activation(
    repeats: Annotated[int, typer.Option(help="Switches to time.", min=1)] = 60, as_json: AsJson = False
) -> None:
    """From new weights to the new table in force on all ranks."""
    from dynamiccl_ray.trainers.bench.activation import bench_activation as bench

    show(bench(repeats), as_json)


@bench_app.command("train")
def bench_train(
    curriculum: Annotated[Path, typer.Argument(help="A curriculum YAML, or the name of one that is shipped.")] = Path(
        "default"
    ),
    override: Set = None,
    as_json: AsJson = False,
) -> None:
    """Environment steps per second, learner included, beside RLlib's stock runner."""
    from dynamiccl_ray.config.curriculum import load_curriculum
    from dynamiccl_ray.shipped import find
    from dynamiccl_ray.trainers.bench.train import bench_train as bench

    show(bench(load_curriculum(find("curriculum", curriculum), override or ())), as_json)


@bench_app.command("fabric")
def bench_fabric(as_json: AsJson = False) -> None:
    """Configurations per second that the physical model prices, and the memory that takes."""
    from dynamiccl_ray.fabric.bench import bench_fabric as bench

    show(bench(), as_json)
