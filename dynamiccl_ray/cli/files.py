"""``dynamiccl list``, ``schema`` and ``init``: which YAML files there are, what may be in one, some to begin with."""

from __future__ import annotations

from enum import Enum
from importlib import import_module
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from dynamiccl_ray.cli.output import AsJson, console, emit, stdout
from dynamiccl_ray.errors import ConfigError


class Kind(Enum):
    """Of YAML files."""

    EXPERIMENT = "experiment"
    CURRICULUM = "curriculum"
    SWEEP = "sweep"
    CLUSTER = "cluster"
    WORKLOAD = "workload"
    TRACE = "trace"


_MODELS: Final = {
    Kind.EXPERIMENT: "config.experiment:Online",
    Kind.CURRICULUM: "config.curriculum:Curriculum",
    Kind.SWEEP: "config.sweep:Sweep",
    Kind.CLUSTER: "fabric.cluster_config:Cluster",
    Kind.WORKLOAD: "workloads.workload:Workload",
    Kind.TRACE: "workloads.recorded:Trace",
}


def schema_of(kind: Kind) -> dict[str, Any]:
    """The JSON Schema of a kind of YAML."""
    module, _, name = _MODELS[kind].partition(":")
    model = getattr(import_module(f"dynamiccl_ray.{module}"), name)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}


def schema(
    kind: Annotated[Kind, typer.Argument(help="Of YAML file.")],
    as_json: Annotated[bool, typer.Option("--json", help="It always is.")] = False,
) -> None:
    """The JSON Schema of a kind of YAML file, for editors."""
    emit(schema_of(kind))


def list_shipped(as_json: AsJson = False) -> None:
    """The shipped experiments, curricula, sweeps, clusters, workloads and traces; commands take their names."""
    from dynamiccl_ray.shipped import first_comment, folder, names

    found = {
        kind.value: {name: first_comment(folder(kind.value) / f"{name}.yaml") for name in names(kind.value)}
        for kind in Kind
    }
    if as_json:
        emit(found)
        return
    for kind, about in found.items():
        table = Table(kind, "what it is", title_justify="left")
        for name, words in about.items():
            table.add_row(name, words)
        stdout().print(table)


def init(
    directory: Annotated[Path, typer.Argument(help="Where to write them.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files of these names.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write YAML files to begin with: an experiment on a modelled cluster, that cluster, and a curriculum."""
    with as_file(files("dynamiccl_ray") / "data") as data:
        wanted = {directory / p.name: p.read_text() for p in sorted((data / "start").glob("*.yaml"))}
        schemas = {directory / "schema" / p.name: p.read_text() for p in sorted((data / "schema").glob("*.json"))}
    if not force and (there := [str(path) for path in wanted if path.exists()]):
        raise ConfigError(f"{', '.join(there)}: there already; name another directory, or --force overwrites")
    (directory / "schema").mkdir(parents=True, exist_ok=True)
    for path, text in (wanted | schemas).items():
        path.write_text(text)
    if as_json:
        emit({"written": [str(path) for path in wanted]})
        return
    for path in wanted:
        print(path)
    console.print(f"try: dynamiccl online {directory / 'experiment.yaml'} --serial", highlight=False)
