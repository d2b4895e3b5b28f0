"""What the commands share: the ``--json`` option and what it prints."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Final

import typer
from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Without = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="TERM", help="Leave this term out of the reward; may be given several times."),
]

# Progress and complaints go to stderr, so that stdout can be piped.
console: Final = Console(stderr=True)


def emit(document: Any) -> None:
    """The document as JSON, alone on stdout."""
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=False) + "\n")


def show(document: dict[str, Any], as_json: bool) -> None:
    """A line for each entry, or JSON."""
    if as_json:
        emit(document)
        return
    for name, value in document.items():
        Console().print(f"{name}: {value}", highlight=False)
