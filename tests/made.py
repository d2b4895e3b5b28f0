"""Messages with everything that a test does not speak of left at nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiccl_ray.actors.messages import CommContext, EpochContext
from dynamiccl_ray.agent.observation import SIZE
from dynamiccl_ray.control.loop import Due, Outcome


def due(ordinal: list[int], *, draw: list[bool] | None = None, observation: Any = None) -> Due:
    """Keys 0, 1, ... that need decisions of these ordinals."""
    n = len(ordinal)
    identity = np.arange(n, dtype=np.uint64)
    zeros, no = np.zeros(n, np.int64), np.zeros(n, np.bool_)
    return Due(
        row=np.arange(n),
        identity=identity,
        salt=identity,
        ordinal=np.array(ordinal, np.int64),
        shifts=zeros,
        draw=np.ones(n, np.bool_) if draw is None else np.array(draw, np.bool_),
        fixed=zeros,
        behind=np.zeros((0, 2), np.int64),
        known=np.zeros((0, 2), np.int64),
        untried=np.full(n, -1),
        takes=zeros + 2,
        observation=np.zeros((n, SIZE), np.float32) if observation is None else observation,
        outcome=Outcome(known=no, log_speedup=np.zeros(n), switched=no, probed=no, congestion=np.zeros(n)),
    )


def comm_context(comm: int = 1, *, keys: list[int], **changes: Any) -> CommContext:
    fields: dict[str, Any] = {
        "wanted": np.zeros(len(keys), np.int64), "need": np.zeros(len(keys), np.int64), "in_force": {},
        "version_in_force": 0, "due": due([]), "reward": np.zeros(0), "max_channels": 8, "off": False, "in_band": False,
        "applied": True, "offered": np.zeros(len(keys), np.bool_),
    }  # fmt: skip
    fields |= {name: np.array(value) if isinstance(value, list) else value for name, value in changes.items()}
    return CommContext(comm=comm, keys=np.array(keys, np.int64), **fields)


def context(*comms: CommContext, **changes: Any) -> EpochContext:
    fields: dict[str, Any] = {
        "epoch": 0, "version": 1, "greedy": False, "watching": False, "apply": True, "round_end": False,
    }  # fmt: skip
    return EpochContext(comms=comms, **(fields | changes))
