"""The cluster YAMLs that come with the project, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric.cluster_config import Cluster, load_cluster

_PACKAGE: Final = Path(__file__).parents[1]
# An installed package carries a copy (setup.py); a checkout has the files themselves.
DIRECTORY: Final = next(
    d for d in (_PACKAGE / "data" / "clusters", _PACKAGE.parent / "experiments" / "clusters") if d.is_dir()
)
"""Where the presets are."""


def preset_names() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def find_cluster(name: str) -> Cluster:
    """The cluster of a preset, or of a YAML if ``name`` ends in .yaml or .yml. Raises ConfigError for neither."""
    if name.endswith((".yaml", ".yml")):
        return load_cluster(Path(name))
    if name not in preset_names():
        raise ConfigError(f"no cluster {name!r}; give the path of a YAML, or one of {', '.join(preset_names())}")
    return load_cluster(DIRECTORY / f"{name}.yaml")
