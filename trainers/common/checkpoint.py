"""What a run leaves to go on from: numbers, text and arrays in one file, and nothing that can be run.

A checkpoint may come from anybody, so that it is read with PyTorch's restricted loader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamiccl_ray.errors import DAMAGED, ConfigError, short
from dynamiccl_ray.tensors import read_tensors


def write(path: Path, state: dict[str, Any]) -> None:
    """Whole or not at all: a run may be killed at any time. Raises TypeError for what is no number, text, array, or
    dict or list of these; OSError or RuntimeError where there is no room.
    """
    unfinished = path.with_suffix(".tmp")
    try:
        torch.save(_plain(state), unfinished)
        unfinished.replace(path)
    except (OSError, RuntimeError):
        unfinished.unlink(missing_ok=True)
        raise


def read(path: Path) -> dict[str, Any]:
    """The inverse of ``write``, with NumPy arrays. Raises ConfigError for a file that is missing, damaged, or holds
    something else.
    """
    try:
        state = read_tensors(path)
        if not isinstance(state, dict):
            raise TypeError(f"it holds a {type(state).__name__}")
        found: dict[str, Any] = _arrays(state)
        return found
    except FileNotFoundError as e:
        raise ConfigError(f"{path}: not a run to resume from: {e.strerror}") from None
    except DAMAGED as e:
        raise ConfigError(f"{path}: not a checkpoint of this version: {short(repr(e))}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(of) for key, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(of) for of in value]
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a checkpoint holds no {type(value).__name__}")


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays(of) for key, of in value.items()}
    if isinstance(value, list):
        return [_arrays(of) for of in value]
    return value.numpy() if isinstance(value, torch.Tensor) else value
