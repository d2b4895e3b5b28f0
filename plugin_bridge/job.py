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

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dynamiccl_ray.plugin_bridge import plugin_path
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.segments import process_alive, segments

LOOK_S: Final = 1.0
"""Seconds between two looks for new communicators."""


def segments_changed() -> int:
    """A count that moves whenever the plugin in this process makes or removes a segment; one read of memory."""
    global _changed
    if _changed is None:
        _changed = ctypes.c_uint64.in_dll(ctypes.CDLL(str(plugin_path())), "dynamiccl_segments_changed")
    return _changed.value


_changed: ctypes.c_uint64 | None = None


class OwnSegments:
    """The segments of this process, opened and not claimed. One thread at a time."""

    def __init__(self, job: str | None = None) -> None:
        """``job`` is DYNAMICCL_JOB_ID's by default, as for the plugin."""
        self._job = job
        self._pid = 0
        self.open: dict[Path, Channel] = {}

    def look(self) -> bool:
        """Opens what is new and closes what is gone. False where some are not ready to be opened yet."""
        all_open, pid = True, os.getpid()
        if pid != self._pid:
            # Forked: what is open is the parent's.
            self._pid, self.open = pid, {}
        found = set(segments(self._job or os.environ.get("DYNAMICCL_JOB_ID") or "default"))
        for path in [path for path, channel in self.open.items() if path not in found or channel.identity.closed]:
            self.open.pop(path).close()
        for path in found - self.open.keys():
            if path.name.split("-")[-2] != str(pid):
                continue
            try:
                channel = Channel(path, claim=False)
            except Exception:  # Still starting, or of another build: looked at again later.
                all_open = False
                continue
            identity = channel.identity
            # The name alone could be that of a process in another PID namespace.
            if identity.pid == pid and process_alive(pid, identity.start_time):
                self.open[path] = channel
            else:
                channel.close()
        return all_open


class Reporter:
    """Reports to this process's segments. Methods return whether one took the report, and never raise or wait."""

    def __init__(self, job: str | None = None) -> None:
        """``job`` is DYNAMICCL_JOB_ID's by default, as for the plugin."""
        self.lost = 0
        """Reports that no segment took."""
        self._segments = OwnSegments(job)
        self._looked_at, self._pid = -math.inf, 0
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
                now, pid = time.monotonic(), os.getpid()
                if pid != self._pid or now - self._looked_at >= LOOK_S:
                    self._pid, self._looked_at = pid, now
                    self._segments.look()
                for channel in self._segments.open.values():
                    report(channel)
                    told = True
            except Exception:  # Training comes first, whatever this is.
                told = False
            finally:
                self._busy.release()
        self.lost += not told
        return told


_reporter: Final = Reporter()


def report_step(step: int, iteration_s: float, loss: float | None = None) -> bool:
    """See ``Reporter.step``: whether anybody can hear it."""
    return _reporter.step(step, iteration_s, loss)


def report_fault() -> bool:
    """See ``Reporter.fault``."""
    return _reporter.fault()
