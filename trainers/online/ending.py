"""How a run is told to end, and what it does where the disk is full: it loses nothing that it was told."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, Self

log = logging.getLogger("dynamiccl.online")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Ending:
    """Ctrl-C, and SIGTERM with which Slurm, Kubernetes and `ray job stop` end a run, end it alike.

    They interrupt what is done within ``interruptible``, with KeyboardInterrupt; everything else is done to its end.
    A context manager; outside of the main thread it hears of nothing.
    """

    def __init__(self) -> None:
        self.told = False
        self._may_interrupt = False
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """From now on, in place of whoever did: Ray listens, too, once it is started."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.signal(number, self._hear)
                self._before.setdefault(number, before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.told = True
        if self._may_interrupt:
            self._may_interrupt = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """What may be given up in the middle."""
        try:
            self._may_interrupt = True
            if self.told:
                raise KeyboardInterrupt
            yield
        except (KeyboardInterrupt, SystemExit):
            # The latter is Ray's answer to SIGTERM, from when it is started until we listen again.
            self.told = True
            raise KeyboardInterrupt from None
        finally:
            self._may_interrupt = False

    def __enter__(self) -> Self:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)


class Disk:
    """Writes what a run leaves. What cannot be written is said once, until there is room again, and ends nothing."""

    def __init__(self) -> None:
        self._full = False

    def write(self, what: str, how: Callable[[], object]) -> bool:
        """Whether it was written."""
        try:
            how()
        except (OSError, RuntimeError) as e:  # the latter is PyTorch's word for a full disk
            if not self._full:
                log.warning("%s could not be written: %s; the run goes on without", what, e)
            self._full = True
            return False
        if self._full:
            log.warning("%s could be written again", what)
        self._full = False
        return True
