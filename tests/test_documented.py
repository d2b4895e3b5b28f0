"""Commands in the documentation exist, take what they are given, and work where that is quick."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
from documented import ROOT, Command, documented
from typer.testing import CliRunner

from dynamiccl_ray.cli.app import app

# Typer brings its own click; with either, this is the error of a command line that is wrong.
UsageError: Any = typer.BadParameter.__base__
COMMANDS = list(documented())
QUICK = (("list",), ("schema",), ("plugin", "env", "--job"), ("init", "my-job"), ("fabric", "show"), ("workload",))
"""What these words begin is also run."""


def _found(words: tuple[str, ...]) -> tuple[Any, Any, list[str]]:
    """The command, its context, and the words that are left for it. Raises UsageError where there is none."""
    command: Any = typer.main.get_command(app)
    context, rest = command.context_class(command, info_name="dynamiccl"), list(words)
    while hasattr(command, "resolve_command") and rest and not rest[0].startswith("-"):
        _, command, rest = command.resolve_command(context, rest)
        context = command.context_class(command, info_name=command.name, parent=context)
    return command, context, rest


def _check(command: Command) -> None:
    # Square brackets are around what may be left out.
    words = tuple(word.strip("[]") if re.match(r"\[-|[^{=]*\]$", word) else word for word in command.words)
    of, context, rest = _found(words)
    if command.whole and not hasattr(of, "resolve_command"):
        of.make_context(of.name, list(rest), parent=context.parent)
    known = {name for param in of.get_params(context) for name in (*param.opts, *param.secondary_opts)}
    given = {word.partition("=")[0] for word in takewhile(lambda word: word != "--", rest) if word.startswith("-")}
    if given - known:
        raise UsageError(f"no such option: {min(given - known)}")


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_documented_command_is_one(command: Command) -> None:
    try:
        _check(command)
    except UsageError as e:
        pytest.fail(f"{command}: {e.format_message()}")


@pytest.mark.parametrize(
    "words",
    [("onlin",), ("online", "x.yaml", "--seriell"), ("demo", "--seed", "many"), ("fabric", "show")],
    ids=" ".join,
)
def test_the_check_finds_mistakes(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        _check(Command(page="a", line=1, words=words, whole=True))


def test_those_that_are_quick_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("experiments", "dynamiccl_ray", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    quick = dict.fromkeys(c.words for c in COMMANDS if c.whole and any(c.words[: len(of)] == of for of in QUICK))
    # What a reader would have to bring.
    ran = [words for words in quick if all((tmp_path / word).exists() for word in words if re.search(r"\.\w+$", word))]
    assert len(ran) >= 6
    for words in ran:
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, f"dynamiccl {' '.join(words)}: {result.output}{result.exception}"
