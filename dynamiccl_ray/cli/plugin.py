"""``dynamiccl doctor`` and ``plugin``: the NCCL plugin of this installation."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from dynamiccl_ray.cli.output import AsJson, emit, stdout

plugin_app = typer.Typer(no_args_is_help=True, help="The NCCL plugin of this installation.")


def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Remove segments of dead processes.")] = False,
    as_json: AsJson = False,
) -> None:
    """What is wrong here, and the fix."""
    from dynamiccl_ray.plugin_bridge.doctor import diagnose

    checks = diagnose(fix=fix)
    if as_json:
        emit({"checks": [c.__dict__ for c in checks], "ok": all(c.status != "fail" for c in checks)})
    else:
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}
        for check in checks:
            stdout().print(Text.assemble((f"{check.status:>4}", colour[check.status]), f" {check.name}: {check.found}"))
            if check.fix:
                stdout().print(f"     {check.fix}", highlight=False)
    raise typer.Exit(1 if any(c.status == "fail" for c in checks) else 0)


@plugin_app.command("path")
def plugin_path(as_json: AsJson = False) -> None:
    """Where the shared object is."""
    from dynamiccl_ray.plugin_bridge.doctor import require_plugin

    path = str(require_plugin())
    emit({"path": path}) if as_json else print(path)


@plugin_app.command("env")
def plugin_env(
    job: Annotated[str, typer.Option(help="Job id that the run will look for.")] = "default",
    table: Annotated[
        Path | None, typer.Option(help="Static table that decides, in place of a run; at the same path on every node.")
    ] = None,
    threads: Annotated[
        int, typer.Option(help="Of NCCL's kernels, for all communicators: 64, 128, 256 or 512. 0: NCCL's own.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """The variables to export in every training process: eval "$(dynamiccl plugin env --job NAME)"."""
    from dynamiccl_ray.plugin_bridge.doctor import plugin_variables, static_variables

    variables = plugin_variables(job, threads) if table is None else static_variables(table, threads)
    if as_json:
        emit(variables)
    else:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
