"""The reference, from the code: commands, settings, metrics, environment variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from dynamiccl_ray.actors.metrics import series
from dynamiccl_ray.cli.app import app

SCHEMAS = Path(__file__).parents[2] / "dynamiccl_ray" / "data" / "schema"

ENVIRONMENT = {
    "NCCL_TUNER_PLUGIN": "The plugin, as a tuner. `dynamiccl plugin env` prints it.",
    "NCCL_PROFILER_PLUGIN": "The same file, as a profiler.",
    "DYNAMICCL_JOB_ID": "In training processes: the job that a run looks for; `default` if it is not set.",
    "DYNAMICCL_TABLE": "In training processes: a static table that decides. It wins over `DYNAMICCL_JOB_ID`.",
    "DYNAMICCL_SHM_DIR": "Where segments are, for plugin and runner alike; `/dev/shm` if it is not set.",
    "DYNAMICCL_NATIVE_DIR": "Where the built plugin is, if not in the installation.",
    "DYNAMICCL_CACHE": "Where builds of NCCL on a virtual GPU are kept.",
    "NCCL_ALGO": "NCCL's own. It wins over everything here.",
    "NCCL_PROTO": "The same.",
    "RAY_ADDRESS": "Ray's own: the cluster of the run, for commands on other nodes.",
    "RAY_AUTH_TOKEN": "Ray's own: the token of a cluster.",
    "RAY_AUTH_MODE": "Ray's own: `disabled` for a cluster without tokens.",
}


def pages() -> dict[str, str]:
    """Path below ``docs`` -> Markdown."""
    return {f"reference/{name}.md": text for name, text in _pages()}


def _pages() -> list[tuple[str, str]]:
    return [("cli", _commands()), ("yaml", _settings()), ("metrics", _metrics()), ("environment", _environment())]


def _commands() -> str:
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="dynamiccl")
    return get_docs_for_click(obj=command, ctx=context, name="dynamiccl", title="Commands")


def _settings() -> str:
    text = [
        "# YAML files",
        "",
        "The schemas that `dynamiccl schema` prints; [Settings](../settings.md) says how to use them.",
        "",
    ]
    for path in sorted(SCHEMAS.glob("*.json")):
        schema = json.loads(path.read_text())
        sections = [
            (path.stem, schema),
            *((f"{path.stem}: {name}", of) for name, of in schema.get("$defs", {}).items()),
        ]
        for name, of in sections:
            text += [f"## {name}" if of is schema else f"### {name}", "", _cell(of.get("description", "")), ""]
            text += _table(["key", "what it may be", "default", "meaning"], map(_row, of.get("properties", {}).items()))
    return "\n".join(text)


def _row(setting: tuple[str, dict[str, Any]]) -> list[str]:
    name, of = setting
    default = f"`{_cell(json.dumps(of['default']))}`" if "default" in of else ""
    return [f"`{name}`", _type(of), default, _cell(of.get("description", ""))]


def _type(of: dict[str, Any]) -> str:
    if "$ref" in of:
        return of["$ref"].rpartition("/")[2]
    if "enum" in of or "const" in of:
        return ", ".join(f"`{value}`" for value in of.get("enum", [of.get("const")]))
    for several in ("anyOf", "oneOf"):
        if several in of:
            return " or ".join(_type(one) for one in of[several])
    limits = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    words = [str(of.get("type", "any")), *(f"{word} {of[key]}" for key, word in limits.items() if key in of)]
    items = [f"of {_type(of['items'])}"] if isinstance(of.get("items"), dict) else []
    return " ".join([*words, *items])


def _metrics() -> str:
    rows = [
        [f"`{m['name']}`", m["kind"], ", ".join(f"`{label}`" for label in m["labels"]), _cell(m["help"])]
        for m in series()
    ]
    text = ["# All metrics", "", "[Metrics](../metrics.md) says how to scrape them.", ""]
    return "\n".join([*text, *_table(["series", "kind", "labels", "meaning"], rows)])


def _environment() -> str:
    rows = [[f"`{name}`", meaning] for name, meaning in ENVIRONMENT.items()]
    return "\n".join(["# Environment variables", "", *_table(["variable", "meaning"], rows)])


def _table(head: list[str], rows: Any) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *lines, ""] if lines else []


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("``", "`").split())
