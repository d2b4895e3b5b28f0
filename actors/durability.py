"""State as bytes that hold numbers and text, and nothing that can be run: whoever opens them is safe."""

from __future__ import annotations

import io
import json
from typing import Any, Final

import numpy as np

from dynamiccl_ray.errors import DAMAGED, RunError, short

FORMAT: Final = 7


def pack(said: dict[str, Any], arrays: dict[str, Any]) -> bytes:
    """JSON and arrays of numbers."""
    file = io.BytesIO()
    text = json.dumps({"format": FORMAT, **said}).encode()
    np.savez_compressed(file, said=np.frombuffer(text, np.uint8), **arrays)
    return file.getvalue()


def unpack(raw: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inverse of ``pack``. Raises RunError for bytes of another format, or that it did not make."""
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        said = json.loads(arrays.pop("said").tobytes())
        found = said["format"]
    except DAMAGED as e:
        raise RunError(f"the state of the run is damaged: {short(repr(e))}; start without --resume") from None
    if found != FORMAT:
        raise RunError(
            f"the state of the run is of format {short(repr(found))}, this version reads {FORMAT}; start without "
            "--resume"
        )
    return said, arrays
