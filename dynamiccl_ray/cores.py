"""How many threads a process computes with."""

from __future__ import annotations

import torch
from threadpoolctl import threadpool_limits


def one_core() -> None:
    """From here on PyTorch, and the BLAS that NumPy calls, compute with one thread in this process.

    Networks and matrices are so small that threads wait for each other longer than they compute; where cores are
    shared, by a multiple.
    """
    torch.set_num_threads(1)
    threadpool_limits(1, "blas")
