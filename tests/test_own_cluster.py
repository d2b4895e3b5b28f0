"""docs/own_cluster.md: from logs to a table, as the page tells it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from documented import ROOT, Command, documented
from typer.testing import CliRunner, Result

from dynamiccl_ray.cli.app import app
from dynamiccl_ray.static.blocks import entry_text, read_blocks

PAGE = ROOT / "docs" / "own_cluster.md"
STORY = [command for command in documented() if command.page == "docs/own_cluster.md" and command.whole]


def output_after(line: int) -> str:
    """What the page says that a command of a line (from 1) prints: the next block of text."""
    rest = PAGE.read_text().splitlines()[line:]
    begins = rest.index("```text") + 1
    return "\n".join(rest[begins : rest.index("```", begins)])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader would stand: the logs, the first one alone, and the experiment."""
    shutil.copytree(ROOT / "tests" / "data" / "p5en_logs", tmp_path / "logs")
    (tmp_path / "first").mkdir()
    shutil.copy(tmp_path / "logs" / "default.log", tmp_path / "first")
    text = PAGE.read_text()
    (tmp_path / "experiment.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    return tmp_path


def run(words: tuple[str, ...]) -> Result:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, f"dynamiccl {' '.join(words)}: {result.output}{result.exception}"
    return result


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_the_page_tells_the_whole_story() -> None:
    told = [command.words[:2] if command.words[0] in ("table", "plugin") else command.words[:1] for command in STORY]
    assert told == [
        *[("advise",), ("advise",), ("evaluate",), ("online",), ("export",)],
        *[("table", "check"), ("plugin", "env")],
    ]


@pytest.mark.parametrize("command", [c for c in STORY if c.words[0] == "advise"], ids=lambda c: c.words[1])
def test_advice_is_what_the_page_shows(here: Path, command: Command) -> None:
    assert plain(run(command.words).stdout) == plain(output_after(command.line))


@pytest.mark.slow
def test_every_command_of_the_page_works_and_ends_in_a_table(here: Path) -> None:
    said = {command.words[0]: run(command.words).stdout for command in STORY}
    assert "1.143" in said["evaluate"]
    assert "collectives on which two ranks differed: 0" in said["online"]
    (block,) = read_blocks(here / "my.table")
    assert (block.ranks, block.nodes, block.name) == (64, 8, "")
    assert f"{int((block.entries['set'] != 0).sum())} keys, digest {block.digest}" in said["table"]
    found = {entry_text(entry) for entry in block.entries[block.entries["set"] != 0]}
    assert {"tree/ll", "ring/simple"} <= found
    assert f"export DYNAMICCL_TABLE={here / 'my.table'}" in said["plugin"]
