"""The C plugin, the shared-memory channel and the emulated NCCL host."""

from __future__ import annotations

import os
from pathlib import Path


def native_dir() -> Path:
    """Where the built native parts are. ``DYNAMICCL_NATIVE_DIR`` points elsewhere, at a sanitizer build say."""
    return Path(os.environ.get("DYNAMICCL_NATIVE_DIR") or Path(__file__).parent / "lib").resolve()


def plugin_path() -> Path:
    """The shared object that holds both the tuner and the profiler."""
    return native_dir() / "libnccl-tuner-dynamiccl.so"
