"""One line in a training script, so that tables change between two steps, on all ranks at once.

    import dynamiccl_ray.torch

registers a hook behind every optimizer step. Whoever would rather say where a step ends calls ``step(loss=...)`` there
instead, on every rank alike; the hook is silent from then on.

At the end of a step every rank has made the same calls of every communicator. So each process brings what its runner
has staged to an all-reduce of a few kilobytes over gloo, which runs beside the next step; at the end of that one,
all ranks know whether all of a communicator's ranks offered the same table after the same number of calls, and then all
put it in force, or none does. Nothing waits for the control plane, and whatever dies of it changes nothing.
"""

from __future__ import annotations

import datetime
import logging
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.job import OwnSegments, Reporter, segments_changed

log = logging.getLogger("dynamiccl.torch")

SLOTS: Final = 64
"""Places in the all-reduce; two communicators that fall on one move on to others."""
_WORDS: Final = 6
_NEUTRAL: Final = np.iinfo(np.int64).max
_BITS: Final = (1 << 62) - 1
TIMEOUT: Final = datetime.timedelta(minutes=10)


@dataclass(eq=False)
class _Place:
    """Where one communicator of this process stands in the all-reduce."""

    channel: Channel
    comm: int
    moved: int = 0
    """How often it has met another communicator in its place."""
    offered: bool = False
    out_of_step: bool = False

    @property
    def slot(self) -> int:
        # Fibonacci hashing; another communicator that was met in one place is most likely not met in the next.
        mixed = ((self.comm + self.moved) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        return (mixed ^ (mixed >> 29) * (2 * self.moved + 1)) % SLOTS


class Boundaries:
    """Serves the step boundaries of this process. Every rank of the job has one, and serves the same ones."""

    def __init__(self) -> None:
        self._segments = OwnSegments()
        self._reporter = Reporter()
        self._seen = -1
        self._places: dict[Channel, _Place] = {}
        self._group: dist.ProcessGroup | None = None
        self._words = torch.full((SLOTS * _WORDS,), _NEUTRAL, dtype=torch.int64)
        self._work: Any = None
        self._ended: float | None = None
        self.count = 0
        """Boundaries so far."""
        self.seconds = 0.0
        """That they have taken of this thread."""
        self.waited_s = 0.0
        """More of them, for ranks that were a whole step behind."""

    def step(self, loss: float | None = None) -> None:
        """One step has ended, on all ranks.

        Raises RuntimeError where it cannot know what the other ranks have put in force: their process or the network
        between them failed, and going on could hang or corrupt the training.
        """
        began = time.perf_counter()
        if self._ended is not None:
            self._reporter.step(self.count, began - self._ended, loss)
        self.count += 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._agree()
        self._ended = time.perf_counter()
        self.seconds += self._ended - began

    def _agree(self) -> None:
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        if self._work is not None:
            began = time.perf_counter()
            try:
                self._work.wait()
            except RuntimeError as e:
                if any(place.offered for place in self._places.values()):
                    raise RuntimeError(
                        f"DynamICCL: a rank was lost while a table was being agreed on; what it does is not known: {e}"
                    ) from e
                log.warning("a rank was lost; tables stay as they are: %s", e)
            else:
                self._finish()
            waited = time.perf_counter() - began
            self.waited_s += waited
            self.seconds -= waited
        self._look()
        words = self._words.numpy()
        words[:] = _NEUTRAL
        for place in self._places.values():
            version, digest, calls = place.channel.offer()
            place.offered = version != 0 and not place.out_of_step
            token = max(1, digest & _BITS) if place.offered else 0
            comm = place.comm & _BITS
            at = place.slot * _WORDS
            words[at : at + _WORDS] = np.minimum(
                words[at : at + _WORDS], (comm, -comm, token, -token, calls, -calls), dtype=np.int64
            )
        self._work = dist.all_reduce(self._words, dist.ReduceOp.MIN, group=self._group, async_op=True)

    def _finish(self) -> None:
        """Every rank decides by the same words."""
        words = self._words.numpy()
        for place in self._places.values():
            at = place.slot * _WORDS
            comm, other_comm, token, other_token, calls, other_calls = words[at : at + _WORDS].tolist()
            if comm != -other_comm:
                place.moved += 1
            elif calls != -other_calls:
                if not place.out_of_step:
                    place.out_of_step = True
                    place.channel.say_out_of_step()
                    log.warning(
                        "communicator %x: ranks end a step after %d to %d calls, so its tables do not change there",
                        place.comm,
                        calls,
                        -other_calls,
                    )
            elif token == -other_token and token > 0 and not place.out_of_step:
                place.channel.take_offer()

    def _look(self) -> None:
        """All communicators of this process: a rank that misses one of them would go its own way."""
        changed = segments_changed()
        if changed == self._seen:
            return
        self._seen = changed if self._segments.look() else -1
        # Where NCCL tells the id of a communicator with its first collective only, ranks could not be told apart.
        found = {channel for channel in self._segments.open.values() if channel.identity.comm_id}
        for channel in self._places.keys() - found:
            del self._places[channel]
        for channel in found - self._places.keys():
            self._places[channel] = _Place(channel, channel.identity.comm_id)
            channel.join_in_band()


_boundaries: Final = Boundaries()
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
