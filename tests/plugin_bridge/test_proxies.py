"""A host that waits for NCCL's proxy threads: those that have work, and no other thread."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "plugin_bridge" / "job_host" / "proxies.c"
BUSY = Path(__file__).parent / "native" / "busy_thread.c"
LONG_MS = 2000  # more than a wait for others, less than proxies_wait's limit


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("proxies") / "proxies.so"
    subprocess.run(["gcc", "-std=c11", "-fPIC", "-shared", "-o", path, SOURCE, BUSY, "-lpthread"], check=True)
    library = ctypes.CDLL(str(path))
    library.busy_start.restype = ctypes.c_void_p
    library.busy_rests.argtypes = library.busy_end.argtypes = [ctypes.c_void_p]
    return library


@pytest.fixture
def thread(library: ctypes.CDLL) -> Iterator[Callable[[bytes, int], int]]:
    """Starts a thread of a name that works for so many milliseconds, then sleeps."""
    threads: list[int] = []

    def make(name: bytes, work_ms: int) -> int:
        threads.append(library.busy_start(name, work_ms))
        return threads[-1]

    yield make
    for it in threads:
        library.busy_end(it)


def test_a_proxy_thread_that_has_work_is_waited_for(library: ctypes.CDLL, thread: Callable[[bytes, int], int]) -> None:
    busy = thread(b"NCCL Progress 3", 500)
    library.proxies_wait()
    assert library.busy_rests(busy)


def test_no_other_thread_is_waited_for(library: ctypes.CDLL, thread: Callable[[bytes, int], int]) -> None:
    idle, other = thread(b"NCCL Progress 0", 0), thread(b"NCCL Service 0", LONG_MS)
    while not library.busy_rests(idle):
        pass
    library.proxies_wait()
    assert not library.busy_rests(other)
