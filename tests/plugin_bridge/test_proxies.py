"""A host that waits for NCCL's proxy threads: those that have work, and no other thread."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "plugin_bridge" / "job_host" / "proxies.c"


@pytest.fixture(scope="module")
def proxies_wait(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], None]:
    path = tmp_path_factory.mktemp("proxies") / "proxies.so"
    subprocess.run(["gcc", "-std=c11", "-fPIC", "-shared", "-o", path, SOURCE], check=True)
    wait: Callable[[], None] = ctypes.CDLL(str(path)).proxies_wait
    return wait


class Thread:
    """One of this process that has work until it is told that there is none; then it sleeps."""

    def __init__(self, name: bytes) -> None:
        self._name, self._told, self._over = name, False, threading.Event()
        self.sleeps = False
        self._busy = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._busy.wait()

    def _run(self) -> None:
        libc = ctypes.CDLL(None)
        libc.prctl(15, self._name)  # PR_SET_NAME
        self._busy.set()
        while not self._told:
            pass
        self.sleeps = True
        self._over.wait()

    def end_work(self) -> None:
        self._told = True

    def close(self) -> None:
        self.end_work()
        self._over.set()
        self._thread.join()


@pytest.fixture
def thread() -> Iterator[Callable[[bytes], Thread]]:
    threads: list[Thread] = []

    def make(name: bytes) -> Thread:
        threads.append(Thread(name))
        return threads[-1]

    yield make
    for it in threads:
        it.close()


def test_a_proxy_thread_that_has_work_is_waited_for(
    proxies_wait: Callable[[], None], thread: Callable[[bytes], Thread]
) -> None:
    busy = thread(b"NCCL Progress 3")
    timer = threading.Timer(0.5, busy.end_work)
    timer.start()
    proxies_wait()
    assert busy.sleeps
    timer.join()


def test_no_other_thread_is_waited_for(proxies_wait: Callable[[], None], thread: Callable[[bytes], Thread]) -> None:
    idle, other = thread(b"NCCL Progress 0"), thread(b"NCCL Service 0")
    idle.end_work()
    while not idle.sleeps:
        pass
    proxies_wait()
    assert not other.sleeps
