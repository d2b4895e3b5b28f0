"""The `dynamiccl` commands that the documentation shows, as words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Command:
    """``words`` after ``dynamiccl``; of a page and a line, from 1. ``whole`` if they are there to be copied, not only
    to name the command."""

    page: str
    line: int
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: dynamiccl {' '.join(self.words)}"


def documented() -> Iterator[Command]:
    """Those in blocks, indented or fenced, and those in spans of code."""
    for page in PAGES:
        fenced = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
                continue
            block = fenced or line.startswith("    ")
            for text in [line] if block else _SPAN.findall(line):
                if (words := _words(text)) is not None:
                    yield Command(str(page.relative_to(ROOT)), number, words, block)


def _words(text: str) -> tuple[str, ...] | None:
    """What a shell would hand to ``dynamiccl``; None where the text does not call it."""
    text = re.sub(r"\\\|", "|", text)
    lexer = shlex.shlex(text.replace('"$(', " ; ").replace(')"', " ; "), posix=True, punctuation_chars=";|&()<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        words = list(lexer)
    except ValueError:
        return None
    for at, word in enumerate(words):
        begins = at == 0 or set(words[at - 1]) <= set(";|&(") or words[at - 1] == "--"
        if begins and word.rpartition("/")[2] == "dynamiccl":
            rest = words[at + 1 :]
            end = next((i for i, w in enumerate(rest) if set(w) <= set(";|&()<>")), len(rest))
            return tuple(rest[:end])
    return None
