"""The cluster YAMLs that come with the project, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, GetJsonSchemaHandler, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from dynamiccl_ray import shipped
from dynamiccl_ray.fabric.cluster_config import Cluster, load_cluster
from dynamiccl_ray.settings import DIRECTORY as BESIDE

DIRECTORY: Final = shipped.folder("cluster")
"""Where the presets are."""


def preset_names() -> list[str]:
    """The names of all presets, sorted."""
    return shipped.names("cluster")


def find_cluster(name: str, overrides: Sequence[str] = ()) -> Cluster:
    """The cluster of a preset, of a YAML's path, or of a machine that was calibrated (``params.yaml#machine``). Raises
    ConfigError for none of these."""
    file, _, machine = name.partition("#")
    return load_cluster(shipped.find("cluster", file), overrides, machine)


def _named(given: Any, info: ValidationInfo) -> Any:
    """Anything but a name or a path is for Cluster to judge."""
    if not isinstance(given, str | Path):
        return given
    file, _, machine = str(given).partition("#")
    return load_cluster(shipped.find("cluster", file, (info.context or {}).get(BESIDE, Path())), machine=machine)


class _OrName:
    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


NamedCluster = Annotated[Cluster, BeforeValidator(_named), _OrName()]
"""In a YAML: a preset's name, the path of a cluster YAML, relative to that file, a machine of what `fabric calibrate`
wrote (params.yaml#machine), or the settings, in place."""
