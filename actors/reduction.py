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

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.actors.messages import COLLECTIVE_DTYPE, NOT_KNOWN, Collectives
from dynamiccl_ray.actors.status import DECISION_DTYPE, SAMPLE_DTYPE
from dynamiccl_ray.arrays import Float64, Int64
from dynamiccl_ray.control.loop import Measured, Phase, Verdicts
from dynamiccl_ray.knobs import N_PROTOCOLS, OWN_PAIR, Algorithm

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
        for name, reduce in (("start", np.maximum), ("first_end", np.minimum), ("end", np.maximum)):
            of = np.repeat(reduced[name], np.diff(np.append(first, len(every))))
            reduced[name] += reduce.reduceat((every[name] - of).astype(np.int32), first).astype(np.uint32)
        for name in ("pair", "channels", "aggregate"):
            reduced[name] = np.maximum.reduceat(every[name], first)
        done = reduced["ranks"] >= ranks
        # Ranks that were told different things would have been measured under different tables.
        of = np.repeat(reduced["version"], np.diff(np.append(first, len(every))))
        same = np.logical_and.reduceat(every["version"] == of, first)
        unknown = done & (reduced["least_ns"] == NOT_KNOWN)
        reduced["least_ns"][unknown] = reduced["most_ns"][unknown]
        self.given_up += int(reduced["ranks"][done & ~same].sum())
        waiting = reduced[~done]
        kept = waiting[-MOST_WAITING:]
        self.given_up += int(waiting["ranks"][: len(waiting) - len(kept)].sum())
        self._waiting = kept
        return reduced[done & same]


def by_the_node(collectives: Collectives, here: Sequence[int], ranks: int, nodes: int) -> Collectives:
    """The same, of all the ranks ``here``, a node's part of so many ``ranks`` on so many ``nodes``: the least time is
    from the last start to the last end. Times are of GPUs' timers.

    A kernel waits for ranks that come late, and only the last one's time is free of that. But that one may end before
    the others: what it has sent on is on its way still. NCCL adds to it: thread 0 of a channel writes down when it ends
    (src/device/common.h), and in a tree it only reduces, on all ranks but the root; the threads that receive the result
    are others (runTreeSplit, src/device/all_reduce.h). So of a tree the last end that is known is the root's, and from
    there the result has as far to go as it came: half of what lies between the first end and the last, once all have
    started, because the other half is what waited to be sent. Measured, see docs/gpu.md.

    The root of the tree that every number of channels has is on the node of rank 0 (``ncclGetDtree``,
    src/graph/trees.cc). The other nodes do not know what a tree takes, nor does anybody who has only a part of one.
    """
    out = collectives.copy()
    tree = (collectives["pair"] != OWN_PAIR) & ((collectives["pair"] - 1) // N_PROTOCOLS == Algorithm.TREE)
    start = collectives["start"]
    last, first = ((collectives[name] - start).astype(np.int32).astype(np.int64) for name in ("end", "first_end"))
    took = np.clip(last, *(collectives[name].astype(np.int64) for name in ("least_ns", "most_ns")))
    # From the last start on: what lies before it is no more than the rank that came late.
    out["least_ns"] = took + np.where(tree, np.clip(last - first, 0, took) // 2, 0)
    if 0 not in here or len(here) * nodes < ranks:
        out["least_ns"][tree] = NOT_KNOWN
    return out


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
    # What a tree is taken for may be more than any rank says that it took.
    least = np.maximum(collectives["least_ns"], 1)
    return np.asarray(np.log(np.maximum(collectives["most_ns"], least) / least))


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


def decisions(closed: Verdicts, rows: Int64, keys: Int64, *, applied: bool) -> npt.NDArray[Any]:
    """(D,) of ``DECISION_DTYPE``, those of some keys, whose ``rows`` in the loop these are. What was not ``applied``,
    as in shadow, was never tried: what was measured is NCCL's own choice."""
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
    if not applied:
        out["got_us"][out["action"] != OWN_ACTION] = np.nan
    return out
