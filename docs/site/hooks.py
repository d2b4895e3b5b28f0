"""What mkdocs is told beside the pages: the README as the first one, the examples, and the reference."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


def linked(text: str, at: str) -> str:
    """The page ``at``, as a path in the repository, with its links as they are in ``docs``. The site has no other
    files: a link to one becomes its path."""

    def replaced(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        path = (ROOT / at).parent.joinpath(target).resolve().relative_to(ROOT)
        if str(path) == "examples/README.md":
            return f"[{words}](examples.md{anchor})"
        if str(path) == "README.md":
            return f"[{words}](index.md{anchor})"
        if path.parts[0] == "docs":
            return f"[{words}]({path.relative_to('docs')}{anchor})"
        return f"`{path}`"

    return _LINK.sub(replaced, text)


def on_files(files: Any, config: Any) -> Any:
    pages = {"index.md": linked((ROOT / "README.md").read_text(), "README.md")}
    pages["examples.md"] = linked((ROOT / "examples" / "README.md").read_text(), "examples/README.md")
    pages |= reference.pages()
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    generated = page.file.generated_by is not None
    return markdown if generated else linked(markdown, f"docs/{page.file.src_uri}")
