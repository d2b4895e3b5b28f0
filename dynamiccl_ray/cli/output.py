"""What the commands share: the ``--json`` option and what it prints."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer
from rich.console import Console

from dynamiccl_ray.errors import ConfigError, short

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Without = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="TERM", help="Leave this term out of the reward; may be given several times."),
]

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Instead of what the YAML says, such as ppo.lr=3e-4; a value is YAML. May be given several times.",
    ),
]

# A log, such as that of `ray job logs`, has no width: lines and tables keep all of their words there.
_LOG_COLUMNS: Final = 160


def _width(stream: TextIO) -> int | None:
    """Columns; None for what the terminal or ``COLUMNS`` says."""
    return None if stream.isatty() or "COLUMNS" in os.environ else _LOG_COLUMNS


# Progress and complaints go to stderr, so that stdout can be piped. What is printed holds names and paths of others:
# Rich's markup in them is text. What has a colour of ours is a ``Text``.
console: Final = Console(stderr=True, width=_width(sys.stderr), markup=False, emoji=False)


def stdout() -> Console:
    """Where results are printed."""
    return Console(width=_width(sys.stdout), markup=False, emoji=False)


def directory_for(out: Path | None, name: str) -> Path:
    """Where results go, made: ``out``, or a runs/NAME-TIME that nobody else has. Raises ConfigError where it cannot be
    written.

    Ray deletes the working directory of a submitted job: there, the home directory has runs.
    """
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--out {short(repr(str(out)))}: not UTF-8, and Parquet wants that; name another") from None
    directory = out or (Path.home() if _is_rays(Path.cwd()) else Path()) / "runs"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if out is None:
            directory = _new(directory, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as e:
        raise ConfigError(f"--out {short(str(directory))}: cannot write there: {e.strerror}; name another") from None
    return directory


def _new(parent: Path, name: str) -> Path:
    """A directory of this name, or of this name and a number: several runs may begin in one second."""
    directory, number = parent / name, 1
    while True:
        try:
            directory.mkdir()
        except FileExistsError:
            number += 1
            directory = parent / f"{name}-{number}"
        else:
            return directory


def _is_rays(directory: Path) -> bool:
    """Whether Ray has unpacked it for a job."""
    return "working_dir_files" in directory.parts


def say_where(directory: Path, fetched_by: str) -> None:
    """On a Ray cluster, on whose node the outputs are, and the command that fetches them."""
    if os.environ.get("RAY_ADDRESS"):
        stdout().print(
            f"outputs: {directory.resolve()} on node {os.uname().nodename}; `{fetched_by}` fetches them from anywhere "
            "on this Ray cluster",
            highlight=False,
            soft_wrap=True,
        )


def emit(document: Any) -> None:
    """The document as JSON, alone on stdout."""
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=False) + "\n")


def show(document: dict[str, Any], as_json: bool) -> None:
    """A line for each entry, or JSON."""
    if as_json:
        emit(document)
        return
    for name, value in document.items():
        stdout().print(f"{name}: {value}", highlight=False)
