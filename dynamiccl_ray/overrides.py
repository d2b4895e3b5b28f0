"""``--set KEY=VALUE``: one setting instead of the YAML's, as if it stood there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamiccl_ray.errors import ConfigError, short


@dataclass(frozen=True)
class Override:
    """One of them."""

    path: tuple[str | int, ...]
    value: Any
    said: str
    """As it was given."""


def parse_overrides(given: Sequence[str], parse: Callable[[str, str], Any]) -> list[Override]:
    """``parse(said, value)`` reads a value as YAML, and complains of what was said.

    Raises ConfigError for what has no key, no value or no YAML.
    """
    return [_parse(said, parse) for said in given]


def _parse(said: str, parse: Callable[[str, str], Any]) -> Override:
    key, equals, text = said.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set {short(said)}: expected KEY=VALUE, such as ppo.lr=3e-4 or stages.0.promote=0.8")
    return Override(tuple(int(p) if p.isdecimal() and p.isascii() else p for p in parts), parse(said, text), said)


def apply_overrides(document: dict[Any, Any], overrides: Sequence[Override]) -> None:
    """Into the plain values of a YAML; sections that it leaves out are made. Raises ConfigError for a place that
    cannot be."""
    for override in overrides:
        at: Any = document
        for depth, part in enumerate(override.path):
            last = depth == len(override.path) - 1
            name = ".".join(map(str, override.path[:depth]))
            if isinstance(at, list):
                if not isinstance(part, int) or part >= len(at):
                    raise _impossible(
                        override, f"{name} is a list of {len(at)}; give an index below that, or all of it"
                    )
            elif not isinstance(at, dict):
                raise _impossible(override, f"{name} is {short(repr(at))} here, which has no settings of its own")
            elif isinstance(part, int) and not (at and part in at):
                raise _impossible(override, f"the file has no list {name or 'there'}; give all of it, as in KEY=[A, B]")
            elif not last and at.get(part) is None:
                at[part] = {}
            if last:
                at[part] = override.value
            else:
                # Aliases in a YAML are one object: what is set in one place must not change the others.
                at[part] = at[part].copy() if isinstance(at[part], dict | list) else at[part]
                at = at[part]


def _impossible(override: Override, why: str) -> ConfigError:
    return ConfigError(f"--set {short(override.said)}: {why}")
