"""From what each rank measured to what the control loop is told.

Which collectives have been measured by everybody, and how long they took the fastest and the slowest: the same over the
ranks of a runner and over the runners of a communicator. What some have and others do not have yet waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.actors.messages import COLLECTIVE_DTYPE, Collectives
from dynamiccl_ray.actors.status import DECISION_DTYPE, SAMPLE_DTYPE
from dynamiccl_ray.arrays import Float64, Int64
from dynamiccl_ray.control.loop import Measured, Phase, Verdicts

MOST_WAITING: Final = 8192
"""Collectives that wait for the rest of their ranks; the oldest are given up first."""


class Matching:
    """Of one communicator."""

    def __init__(self) -> None:
        self._waiting = np.zeros(0, COLLECTIVE_DTYPE)
        self.given_up = 0
        """Records of collectives that some rank never had, so far."""

    def take(self, parts: Sequence[Collectives], ranks: int) -> Collectives:
        """New collectives from several sources, in the order of calls those that ``ranks`` ranks have by now. A source
        names a call once, and every rank is in one source.
        """
        every = np.concatenate([self._waiting, *parts])
        every = every[np.argsort(every["dseq"], kind="stable")]
        if not len(every):
            return every
        first = np.flatnonzero(np.append(True, every["dseq"][1:] != every["dseq"][:-1]))
        reduced = every[first]
        reduced["ranks"] = np.add.reduceat(every["ranks"], first)
        reduced["least_ns"] = np.minimum.reduceat(every["least_ns"], first)
        reduced["most_ns"] = np.maximum.reduceat(every["most_ns"], first)
        for name in ("pair", "channels", "aggregate"):
            reduced[name] = np.maximum.reduceat(every[name], first)
        done = reduced["ranks"] >= ranks
        # Ranks that were told different things would have been measured under different tables.
        of = np.repeat(reduced["version"], np.diff(np.append(first, len(every))))
        same = np.logical_and.reduceat(every["version"] == of, first)
        self.given_up += int(reduced["ranks"][done & ~same].sum())
        waiting = reduced[~done]
        kept = waiting[-MOST_WAITING:]
        self.given_up += int(waiting["ranks"][: len(waiting) - len(kept)].sum())
        self._waiting = kept
        return reduced[done & same]


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A communicator's part of an epoch: collectives of all ranks, their rows in the loop and their flat actions."""

    comm: int
    collectives: Collectives
    rows: Int64
    actions: Int64

    def samples(self, phase: Int64) -> Any:
        """(N,) of ``SAMPLE_DTYPE``; ``phase`` (N,) of each collective's key."""
        out = np.zeros(len(self.rows), SAMPLE_DTYPE)
        for name in ("key", "pair", "channels", "aggregate", "bytes", "dseq"):
            out[name] = self.collectives[name]
        out["phase"], out["action"] = phase, self.actions
        out["time_us"] = self.collectives["least_ns"] / 1e3
        out["skew"] = _skew(self.collectives)
        return out


def _skew(collectives: Collectives) -> Float64:
    return np.asarray(np.log(np.maximum(collectives["most_ns"], 1) / np.maximum(collectives["least_ns"], 1)))


def measured(parts: list[Part]) -> Measured:
    """What the loop is told."""
    every = np.concatenate([np.zeros(0, COLLECTIVE_DTYPE), *(part.collectives for part in parts)])
    return Measured(
        row=np.concatenate([np.zeros(0, np.int64), *(part.rows for part in parts)]),
        action=np.concatenate([np.zeros(0, np.int64), *(part.actions for part in parts)]),
        log_us=np.log(np.maximum(every["least_ns"], 1) / 1e3),
        skew=_skew(every),
    )


def positions(of: Int64, values: Int64) -> Int64:
    """Where each of ``values`` is in ``of``, which has them all."""
    order = np.argsort(of)
    return order[np.searchsorted(of, values, sorter=order)]


def decisions(closed: Verdicts, rows: Int64, keys: Int64) -> npt.NDArray[Any]:
    """(D,) of ``DECISION_DTYPE``, those of some keys, whose ``rows`` in the loop these are."""
    mine = np.flatnonzero(np.isin(closed.rows, rows))
    out = np.zeros(len(mine), DECISION_DTYPE)
    out["key"] = keys[positions(rows, closed.rows[mine])]
    phase = closed.phase[mine]
    out["phase"], out["action"], out["samples"] = phase, closed.actions[mine], closed.samples[mine]
    out["why"] = np.select(
        [phase == Phase.BASELINE, phase == Phase.CHECK, phase == Phase.EXPLOIT, closed.drawn[mine]], [0, 4, 3, 1], 2
    )
    for name, of in (("expected_us", closed.expected), ("got_us", closed.got), ("own_us", closed.baseline)):
        out[name] = np.exp(of[mine])
    return out
