"""One line in a training script, so that tables change between two steps, on all ranks at once.

    import dynamiccl_ray.torch

registers a hook behind every optimizer step. Whoever would rather say where a step ends calls ``step(loss=...)`` there
instead, on every rank alike; the hook is silent from then on.

At the end of a step every rank has made the same calls of every communicator. So every fifth of a second or so each
process brings what its runner has staged to an all-reduce of a few kilobytes over gloo, which runs beside the next
step; at the end of that one, all ranks know whether all of a communicator's ranks offered the same table after the same
number of calls, and then all put it in force, or none does. They know too what a step takes the fastest of them, and so
agree on the step of the next one. Nothing waits for the control plane, and whatever dies of it changes nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import time
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from dynamiccl_ray.plugin_bridge.boundary import Boundary
from dynamiccl_ray.plugin_bridge.job import OwnSegments, segments_changed

log = logging.getLogger("dynamiccl.torch")

PERIOD_NS: Final = 200_000_000
"""From one all-reduce to the next, about: where both cores are busy, one takes a step 1 ms longer."""
MOST_REST: Final = 64
"""Boundaries between two, at most: steps may become slow while all ranks count."""
TIMEOUT: Final = datetime.timedelta(minutes=10)
EXIT_TIMEOUT: Final = datetime.timedelta(seconds=10)
"""Of an all-reduce that is under way when the process exits."""


class Boundaries:
    """Serves the step boundaries of this process. Every rank of the job has one, and serves the same ones."""

    def __init__(self) -> None:
        self._segments = OwnSegments()
        self._seen = -1
        self._boundary = Boundary()
        self._words = [torch.from_numpy(self._boundary.words)]
        self._group: dist.ProcessGroup | None = None
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._work: Any = None
        # Boundaries to come without an all-reduce, and those since the last one, which began then.
        self._resting = self._steps = 0
        self._begun: float | None = None
        self._lost = False
        self._ended: float | None = None
        self.count = 0
        """Boundaries so far."""
        self.waited_s = 0.0
        """In all, for ranks that were a whole step behind."""

    def step(self, loss: float | None = None) -> None:
        """One step has ended, on all ranks.

        Raises RuntimeError where it cannot know what the other ranks have put in force: their process or the network
        between them failed, and going on could hang or corrupt the training.
        """
        began = time.perf_counter()
        if self._work is not None:
            self._finish()
        # Not before: what is found now was not in the last all-reduce.
        self._look()
        if self._ended is not None:
            self._boundary.report(self.count, began - self._ended, loss)
        self.count += 1
        if self._group is not None or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            self._begin()
        self._ended = time.perf_counter()

    def close(self) -> None:
        """Lets an all-reduce end that nobody will ask about. Where gloo's thread drops the last of its tensors while
        Python shuts down, the process aborts (pytorch/pytorch#179291); all other ranks have come as far as this one."""
        if self._work is not None:
            with contextlib.suppress(RuntimeError):
                self._work.wait(EXIT_TIMEOUT)
            self._work = None

    def _begin(self) -> None:
        """Asks all ranks about what is staged here, where it is time to."""
        self._steps += 1
        if self._resting > 0 or self._lost:
            self._resting -= 1
            return
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        now = time.perf_counter()
        self._boundary.bring(0 if self._begun is None else round(1e9 * (now - self._begun) / self._steps))
        self._begun, self._steps = now, 0
        # As dist.all_reduce() does it, which takes 80 us more for its checks and its log.
        self._work = self._group.allreduce(self._words, self._options)

    def _finish(self) -> None:
        """Puts in force what all ranks brought to the boundary before this one."""
        began, work, self._work = time.perf_counter(), self._work, None
        try:
            work.wait()
        except RuntimeError as e:
            if self._boundary.offering:
                raise RuntimeError(
                    f"DynamICCL: a rank was lost while a table was being agreed on; what it does is not known: {e}"
                ) from e
            self._lost = True
            log.warning("a rank was lost; tables stay as they are: %s", e)
        else:
            step_ns = self._boundary.step_ns
            self._resting = min((PERIOD_NS - 1) // step_ns, MOST_REST) if step_ns > 0 else 0
            if self._boundary.take():
                log.warning(
                    "ranks end a step after different numbers of calls of a communicator: its tables change elsewhere"
                )
        self.waited_s += time.perf_counter() - began

    def _look(self) -> None:
        """All communicators of this process: a rank that misses one of them would go its own way."""
        changed = segments_changed()
        if changed != self._seen:
            self._seen = changed if self._segments.look() else -1
            self._boundary.serve(self._segments.open.values())


_boundaries: Final = Boundaries()
atexit.register(_boundaries.close)
_explicit = False


def step(loss: float | None = None) -> None:
    """A step has ended: for scripts that say so themselves, on every rank alike; ``loss`` is its loss, if known."""
    global _explicit
    _explicit = True
    _boundaries.step(loss)


def _after_optimizer(*_: Any) -> None:
    if not _explicit:
        _boundaries.step()


register_optimizer_step_post_hook(_after_optimizer)
