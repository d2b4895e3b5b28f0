"""Files of tensors and numbers that may come from anybody."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch


def read_tensors(path: Path) -> Any:
    """What ``torch.save`` wrote, read with PyTorch's restricted loader, which runs nothing. Raises what libraries raise
    for a file that is missing or damaged (``errors.DAMAGED``), and ValueError for one that holds anything else.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files that are refused below
            return torch.load(path, weights_only=True)
    except pickle.UnpicklingError:
        # PyTorch's own words advise to read it without the restriction, which would run what a stranger wrote.
        raise ValueError("it is damaged, or holds something else than tensors and numbers") from None
