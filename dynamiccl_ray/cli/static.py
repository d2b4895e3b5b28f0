"""``dynamiccl export``, ``merge`` and ``table``: what runs have learned as files, for jobs without a control plane."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from dynamiccl_ray.cli.output import AsJson, console, emit, stdout

if TYPE_CHECKING:
    from dynamiccl_ray.static.blocks import Block

table_app = typer.Typer(no_args_is_help=True, help="Static tables, which decide without a control plane.")


class Format(StrEnum):
    """What a table is written for."""

    TABLE = "table"
    NCCL_CSV = "nccl-csv"
    NCCLX_JSON = "ncclx-json"


class Prefer(StrEnum):
    """Whose word counts where tables contradict each other."""

    FIRST = "first"


Out = Annotated[Path, typer.Option("--out", help="File to write.", dir_okay=False)]


def export(
    run: Annotated[Path, typer.Argument(help="Directory of a finished or interrupted run.")],
    out: Out,
    format: Annotated[
        Format, typer.Option(help="A table for our plugin, CSV for NCCL's example tuner, or JSON for NCCLX.")
    ] = Format.TABLE,
    everything: Annotated[
        bool, typer.Option("--all", help="What was in force of keys that had not settled, too.")
    ] = False,
    any_name: Annotated[
        bool, typer.Option("--any-name", help="For communicators of any name: of a job that was only played.")
    ] = False,
    between: Annotated[
        bool, typer.Option("--between", help="Also for sizes between two neighbours that settled on the same.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write what a run has learned to a file, for jobs that run without Ray."""
    from dynamiccl_ray.trainers.online.export import export_run

    exported = export_run(run, everything=everything, any_name=any_name, between=between)
    _write(exported.blocks, out, format, exported.warnings, as_json=as_json)


def merge(
    tables: Annotated[list[Path], typer.Argument(help="Static tables.")],
    out: Out,
    prefer: Annotated[
        Prefer | None,
        typer.Option(help="Whose word counts where two contradict each other; without, an error."),
    ] = None,
    format: Annotated[Format, typer.Option(help="As for export.")] = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Join static tables of several runs."""
    from dynamiccl_ray.static.blocks import read_blocks
    from dynamiccl_ray.static.merging import merge as join

    blocks = join([(str(path), read_blocks(path)) for path in tables], prefer_first=prefer is Prefer.FIRST)
    _write(blocks, out, format, [], as_json=as_json)


def _write(blocks: list[Block], out: Path, format: Format, warnings: list[str], *, as_json: bool) -> None:
    from dynamiccl_ray.static.blocks import text_of, write_text
    from dynamiccl_ray.static.formats import nccl_csv, ncclx_json

    if format is Format.TABLE:
        text = text_of(blocks)
    else:
        written = (nccl_csv if format is Format.NCCL_CSV else ncclx_json)(blocks)
        text, warnings = written.text, warnings + written.warnings
    write_text(out, text)
    document = {"out": str(out), "format": format.value, "warnings": warnings, "communicators": _about(blocks)}
    if as_json:
        emit(document)
        return
    for warning in warnings:
        console.print(Text.assemble(("warning:", "yellow"), f" {warning}"), soft_wrap=True)
    _show(str(out), blocks)


@table_app.command("check")
def check(
    tables: Annotated[list[Path], typer.Argument(help="Static tables.")],
    as_json: AsJson = False,
) -> None:
    """Read static tables as the plugin does: what each block matches, and the digest that the plugin logs of it."""
    checked = [(path, *_checked(path)) for path in tables]
    if as_json:
        emit(
            [
                {"table": str(path), "refused": problem or None, "communicators": _about(blocks)}
                for path, blocks, problem in checked
            ]
        )
    for path, blocks, problem in checked:
        if not as_json:
            _show(str(path), blocks)
        if problem:
            # One in a line has its number before it.
            said = f" {path}:{problem}" if problem[0].isdecimal() else f" {path}: {problem}"
            console.print(Text.assemble(("error:", "bold red"), said), soft_wrap=True)
    raise typer.Exit(2 if any(problem for _, _, problem in checked) else 0)


def _checked(path: Path) -> tuple[list[Block], str]:
    """A table's blocks, and why the plugin refuses it, if it does."""
    from dynamiccl_ray.errors import ConfigError
    from dynamiccl_ray.static.blocks import read_blocks, unsafe

    try:
        return read_blocks(path), unsafe(path.absolute())
    except ConfigError as e:
        return [], str(e).removeprefix(f"{path}:").strip()


def _about(blocks: list[Block]) -> list[dict[str, Any]]:
    return [
        {
            "ranks": block.ranks,
            "nodes": block.nodes,
            "name": block.name,
            "max_channels": block.max_channels,
            "keys": int((block.entries["set"] != 0).sum()),
            "digest": block.digest,
        }
        for block in blocks
    ]


def _show(path: str, blocks: list[Block]) -> None:
    out = stdout()
    for block in blocks:
        keys = int((block.entries["set"] != 0).sum())
        out.print(f"{path}: {block.about}: {keys} keys, digest {block.digest}", highlight=False, soft_wrap=True)
