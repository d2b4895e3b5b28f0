"""For the training script: tells the control plane how its steps go. Optional, and never in the way.

    from dynamiccl_ray import report_step

    for step, batch in enumerate(loader):
        began = time.perf_counter()
        loss = train(batch)
        report_step(step, time.perf_counter() - began, loss.item())

Reports go to the segments of this process, of which there is one for each communicator. Without any (no plugin, no
communicator yet), and whatever else goes wrong, a report is counted as lost and training goes on.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dynamiccl_ray.plugin_bridge.channel import Channel, process_alive, segments

LOOK_S: Final = 1.0
"""Seconds between two looks for new communicators."""


class Reporter:
    """This process's segments. Methods return whether a segment took the report, and never raise or wait."""

    def __init__(self, job: str | None = None) -> None:
        """``job`` is DYNAMICCL_JOB_ID's by default, as for the plugin."""
        self.lost = 0
        """Reports that no segment took."""
        self._job = job
        self._pid = 0
        self._looked_at = -math.inf
        self._open: dict[Path, Channel] = {}
        self._busy = threading.Lock()

    def step(self, step: int, iteration_s: float, loss: float | None = None) -> bool:
        """The step that ended: its number, equal on all ranks, its seconds, and its loss if it is known."""
        return self._tell(lambda c: c.report_step(step, float(iteration_s), math.nan if loss is None else float(loss)))

    def fault(self) -> bool:
        """Something failed and was recovered from: a link, a rank, a collective that was retried."""
        return self._tell(Channel.report_fault)

    def _tell(self, report: Callable[[Channel], None]) -> bool:
        told = False
        # A segment has one writer at a time; the second of two threads does not wait for its turn.
        if self._busy.acquire(blocking=False):
            try:
                self._look()
                for channel in self._open.values():
                    report(channel)
                    told = True
            except Exception:  # Training comes first, whatever this is.
                told = False
            finally:
                self._busy.release()
        self.lost += not told
        return told

    def _look(self) -> None:
        now, pid = time.monotonic(), os.getpid()
        if pid != self._pid:
            # Forked: what is open is the parent's.
            self._pid, self._open, self._looked_at = pid, {}, -math.inf
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        found = set(segments(self._job or os.environ.get("DYNAMICCL_JOB_ID") or "default"))
        for path in [path for path, channel in self._open.items() if path not in found or channel.identity.closed]:
            self._open.pop(path).close()
        for path in found - self._open.keys():
            if path.name.split("-")[-2] != str(pid):
                continue
            try:
                channel = Channel(path, claim=False)
            except Exception:  # Still starting, or of another build: looked at again later.
                continue
            identity = channel.identity
            # The name alone could be that of a process in another PID namespace.
            if identity.pid == pid and process_alive(pid, identity.start_time):
                self._open[path] = channel
            else:
                channel.close()


_reporter: Final = Reporter()


def report_step(step: int, iteration_s: float, loss: float | None = None) -> bool:
    """See ``Reporter.step``: whether anybody can hear it."""
    return _reporter.step(step, iteration_s, loss)


def report_fault() -> bool:
    """See ``Reporter.fault``."""
    return _reporter.fault()
