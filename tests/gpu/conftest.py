"""Tests on GPUs; `make gpu NCCL_LIB=libnccl.so.2` runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.one_gpu.ranks import Ranks, environment

HERE = Path(__file__).parent
JOB = "gpu-tests"
_hung: list[bool] = []
N_RANKS = int(os.environ.get("GPU_RANKS", "4"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def nccl() -> Path:
    named = os.environ.get("NCCL_LIB")
    if not named:
        pytest.skip("NCCL_LIB names no libnccl.so.2 to test with")
    return Path(named)


@pytest.fixture(scope="session")
def ranks(nccl: Path) -> Iterator[Ranks]:
    with TemporaryDirectory(prefix="dynamiccl-gpu-", dir="/dev/shm") as shm:
        os.environ["DYNAMICCL_SHM_DIR"] = shm
        os.environ.update(environment(JOB))
        with Ranks(N_RANKS, nccl=nccl, job=JOB) as opened:
            yield opened
            if opened.hanging:
                _hung.append(True)


def pytest_unconfigure() -> None:
    # Python waits for every thread at its end.
    if _hung:
        os._exit(1)
