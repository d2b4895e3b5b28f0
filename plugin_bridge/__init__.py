"""The C plugin, the shared-memory channel and the NCCLs, emulated and real, that jobs without a GPU run on."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
from pathlib import Path
from urllib.parse import unquote, urlparse


@functools.cache
def native_dir() -> Path:
    """Where the built native parts are: ``DYNAMICCL_NATIVE_DIR``, or beside this file, or in the installed package.

    The last is for a working directory that Ray has shipped without what git ignores.
    """
    named = os.environ.get("DYNAMICCL_NATIVE_DIR")
    if named:
        return Path(named).resolve()
    beside = Path(__file__).resolve().parent / "lib"
    return beside if beside.is_dir() else _installed() or beside


def _installed() -> Path | None:
    try:
        distribution = importlib.metadata.distribution("dynamiccl-ray")
    except importlib.metadata.PackageNotFoundError:
        return None
    roots = [Path(str(distribution.locate_file("")))]
    origin = distribution.read_text("direct_url.json")
    if origin is not None:  # an editable install lives in its source tree
        roots.append(Path(unquote(urlparse(json.loads(origin)["url"]).path)))
    return next((found for root in roots if (found := root / "plugin_bridge" / "lib").is_dir()), None)


def plugin_path() -> Path:
    """The shared object that holds both the tuner and the profiler."""
    return native_dir() / "libnccl-tuner-dynamiccl.so"
