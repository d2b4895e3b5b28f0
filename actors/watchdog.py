"""Ends a process where it stops on the way to a decision: training processes may be waiting for it.

A process that is killed gives its claims back, and another takes over; one that is stopped or hangs keeps them. So each
process of the control plane that takes part in agreement has a child that watches it while ranks may wait, and kills
it when it has been silent for too long.

Outside of an agreement no rank waits, but other actors do. There a thread says that the process runs at all, and the
child is more patient: a process that is stopped is killed, one that is busy is not.

Where the child itself had no time, neither had anybody: a virtual machine that is moved stands still for seconds. That
time does not count.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

_ARM, _DISARM, _RUNNING = b"a", b"d", b"r"
_NEVER = float("inf")

_LOOK_S = 0.25
"""The child looks at the clock so often, so that it knows when it had no time itself."""
STOPPED_S = 10.0
"""How long an actor may be stopped where no rank waits: the others hear nothing of it meanwhile."""


class Watchdog:
    """``limit_s``: how long this process may be silent while it is armed; one thread at a time arms it.
    ``stopped_s``: how long it may be stopped at any time; without, as long as it likes."""

    def __init__(self, limit_s: float, stopped_s: float | None = None) -> None:
        ours, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        # Isolated and without site packages: it starts in milliseconds and imports nothing of a working directory.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(limit_s), str(stopped_s or _NEVER)],
            stdin=ours,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ours)
        self._over = threading.Event()
        self._running: threading.Thread | None = None
        if stopped_s is not None:
            self._running = threading.Thread(target=self._run, args=(stopped_s / 10,), daemon=True)
            self._running.start()

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._child.pid

    def beat(self) -> None:
        """Armed from now on; asked again, alive still."""
        self._say(_ARM)

    def disarm(self) -> None:
        """Nobody waits for this process."""
        self._say(_DISARM)

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """While ranks may wait."""
        self.beat()
        try:
            yield
        finally:
            self.disarm()

    def close(self) -> None:
        """Ends the child."""
        self._over.set()
        if self._running is not None:
            self._running.join()
        with contextlib.suppress(OSError):
            os.close(self._pipe)
        self._child.wait()

    def _run(self, every_s: float) -> None:
        self._say(_RUNNING)
        while not self._over.wait(every_s):
            self._say(_RUNNING)

    def _say(self, what: bytes) -> None:
        # A child that is gone, or so slow that the pipe is full, cannot be helped from here.
        with contextlib.suppress(OSError):
            os.write(self._pipe, what)


def _watch(pid: int, limit_s: float, stopped_s: float) -> None:
    watched = os.pidfd_open(pid)
    if os.getppid() != pid:
        return  # it died before it was watched, and the number may be another's by now
    # Until when it has to say that it is alive, and, once it has said so for the first time, that it runs.
    armed_until = runs_until = _NEVER
    while True:
        until, began = min(armed_until, runs_until), time.monotonic()
        ready, _, _ = select.select([0], [], [], None if until == _NEVER else min(_LOOK_S, max(0.0, until - began)))
        now = time.monotonic()
        if not ready:
            if now - began > 2 * _LOOK_S:
                armed_until, runs_until = armed_until + now - began, runs_until + now - began
            elif now >= until:
                signal.pidfd_send_signal(watched, signal.SIGKILL)
                return
            continue
        said = os.read(0, 4096)
        if not said:
            return
        if last := said.replace(_RUNNING, b"")[-1:]:
            armed_until = now + limit_s if last == _ARM else _NEVER
        runs_until = now + stopped_s


if __name__ == "__main__":
    _watch(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
