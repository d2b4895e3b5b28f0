"""Ends this process where it stops on the way to a decision: training processes may be waiting for it.

A process that is killed gives its claims back, and another takes over; one that is stopped or hangs keeps them. So each
process of the control plane that takes part in agreement has a child that watches it while ranks may wait, and kills
it when it has been silent for too long.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

_ARM, _DISARM = b"a", b"d"


class Watchdog:
    """``limit_s``: how long this process may be silent while it is armed. One thread at a time."""

    def __init__(self, limit_s: float) -> None:
        ours, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        # Isolated and without site packages: it starts in milliseconds and imports nothing of a working directory.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(limit_s)],
            stdin=ours,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ours)

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
        with contextlib.suppress(OSError):
            os.close(self._pipe)
        self._child.wait()

    def _say(self, what: bytes) -> None:
        # A child that is gone, or so slow that the pipe is full, cannot be helped from here.
        with contextlib.suppress(OSError):
            os.write(self._pipe, what)


def _watch(pid: int, limit_s: float) -> None:
    watched = os.pidfd_open(pid)
    if os.getppid() != pid:
        return  # it died before it was watched, and the number may be another's by now
    armed = False
    while True:
        ready, _, _ = select.select([0], [], [], limit_s if armed else None)
        if not ready:
            signal.pidfd_send_signal(watched, signal.SIGKILL)
            return
        said = os.read(0, 4096)
        if not said:
            return
        armed = said.endswith(_ARM)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), float(sys.argv[2]))
