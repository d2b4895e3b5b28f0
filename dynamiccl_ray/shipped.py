"""The YAML files that come with the project, by kind and name."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dynamiccl_ray.errors import ConfigError, nearest
from dynamiccl_ray.settings import exists

_PACKAGE: Final = Path(__file__).parent
# An installed package carries a copy (setup.py); a checkout has the files themselves.
_ROOT: Final = next(d for d in (_PACKAGE / "data" / "experiments", _PACKAGE.parent / "experiments") if d.is_dir())
FOLDERS: Final = {
    "experiment": "online",
    "curriculum": "curricula",
    "sweep": "sweeps",
    "cluster": "clusters",
    "workload": "workloads",
    "trace": "traces",
}
"""Of each kind, below ``experiments``."""
_MODELINE: Final = "# yaml-language-server:"


def folder(kind: str) -> Path:
    """Where the files of a kind are."""
    return _ROOT / FOLDERS[kind]


def names(kind: str) -> list[str]:
    """Of all files of a kind, sorted."""
    return sorted(path.stem for path in folder(kind).glob("*.yaml"))


def find(kind: str, given: str | Path, directory: Path = Path()) -> Path:
    """The path of what is shipped under a name; else the path itself, which is relative to ``directory``.

    Raises ConfigError for what is neither a name that is shipped nor a path: it has no suffix, and nothing is there.
    """
    name = str(given)
    if name in names(kind):
        return folder(kind) / f"{name}.yaml"
    path = directory / given
    if Path(name).suffix or "/" in name or exists(path):
        return path
    known = names(kind)
    close = nearest(name, known) or ";"
    raise ConfigError(f"no {kind} {name!r}{close} give the path of a YAML, or one of {', '.join(known)}")


def first_comment(path: Path) -> str:
    """What a file says of itself in its first line; the line for editors is passed over."""
    for line in path.read_text().splitlines():
        if not line.startswith(_MODELINE):
            return line.removeprefix("#").strip()
    return ""
