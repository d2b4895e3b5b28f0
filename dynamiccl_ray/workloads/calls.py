"""The calls of one rank as a NumPy structured array: what a workload makes, a trace records, a fabric prices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt


class Operation(IntEnum):
    """The collectives have ``knobs.Collective``'s numbers; the tuner never sees the others."""

    BROADCAST = 0
    REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_REDUCE = 4
    SEND = 5
    RECEIVE = 6
    ALL_TO_ALL = 7
    PUSH = 8
    PULL = 9


class PipelineRole(IntEnum):
    """What a call is to the pipeline; NONE without one."""

    NONE = 0
    INTRA_STAGE = 1
    ACTIVATION_SEND = 2
    ACTIVATION_RECEIVE = 3


CALL: Final = np.dtype(
    [
        ("communicator", np.int16),  # index into the stream's communicators
        ("operation", np.int8),
        ("nominal_bytes", np.float64),  # as nccl-tests counts: the larger of the send and the receive buffer
        ("effective_bytes", np.float64),  # after compression
        ("gap_us", np.float64),  # compute since the call before
        ("pipeline_role", np.int8),
        ("overlaps", np.bool_),  # compute may go on while it runs
        ("critical", np.bool_),  # the next compute, or the first layers' next forward, waits for it
    ]
)


@dataclass(frozen=True, kw_only=True)
class StreamCommunicator:
    """``role``: dp, tp, pp, ep, expert-dp (replicas of an expert), node, server, or a trace's own name."""

    role: str
    ranks: tuple[int, ...]
    """Empty where a trace does not say."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Calls in the order of the program."""

    communicators: tuple[StreamCommunicator, ...]
    calls: npt.NDArray[Any]
    """dtype CALL, shape (calls,)."""
    tail_us: float = 0.0
    """Compute after the last call."""

    def summary(self) -> list[dict[str, Any]]:
        """Per communicator and operation: how many calls, their sizes, their sum and its share of all bytes, in the
        order of first use.
        """
        rows = []
        everything = float(self.calls["effective_bytes"].sum())
        keys = self.calls["communicator"].astype(np.int64) * len(Operation) + self.calls["operation"]
        found, first = np.unique(keys, return_index=True)
        for key in found[np.argsort(first)]:
            calls = self.calls[keys == key]
            communicator = self.communicators[int(key) // len(Operation)]
            sizes = calls["effective_bytes"]
            rows.append(
                {
                    "communicator": communicator.role,
                    "ranks": list(communicator.ranks),
                    "operation": Operation(int(key) % len(Operation)).name.lower(),
                    "count": len(calls),
                    "min_bytes": float(sizes.min()),
                    "median_bytes": float(np.median(sizes)),
                    "max_bytes": float(sizes.max()),
                    "effective_bytes": float(sizes.sum()),
                    "share": float(sizes.sum()) / max(everything, 1.0),
                    "nominal_bytes": float(calls["nominal_bytes"].sum()),
                    "overlaps": bool(calls["overlaps"].all()),
                }
            )
        return rows
