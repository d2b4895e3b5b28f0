"""What the policy is shown of keys that need a decision."""

from __future__ import annotations

import numpy as np

from dynamiccl_ray.actions import action_parts
from dynamiccl_ray.agent.observation import KeyView
from dynamiccl_ray.arrays import Bool, Float32, Float64, Int64, any_along
from dynamiccl_ray.control.columns import Keys
from dynamiccl_ray.control.evidence import Estimates, Evidence


def view(
    keys: Keys,
    evidence: Evidence,
    rows: Int64,
    allowed: Bool,
    said: Estimates,
    *,
    cusum: Float64,
    idle: Int64,
    wanted: Int64,
    heat: Float64,
) -> KeyView:
    """What the policy sees of these keys (R,). It draws channels and chunk apart: a value is masked where all that it
    can be part of is; what else is not ``allowed`` (R, N_PAIRS, N_CHANNELS, N_CHUNKS) is replaced once it is drawn.

    ``said`` is what ``Evidence.estimates`` says of them. ``cusum``, ``idle``, ``wanted`` and ``heat`` (R,) are as in
    ``KeyView``; ``wanted`` has flat actions.
    """
    return KeyView(
        collective=keys.collective[rows],
        nbytes=keys.nbytes[rows],
        pipelined=keys.pipelined[rows],
        last_time=_known(evidence.last[rows] - evidence.baseline[rows]),
        idle_epochs=idle.astype(np.float32),
        last_pair=action_parts(wanted)[0],
        cost=keys.cost[rows],
        samples=evidence.by_channels[rows].astype(np.float32),
        channels=said.channels,
        chunks=said.chunks,
        noise=evidence.noise[rows],
        excess=evidence.excess(rows),
        cusum=cusum.astype(np.float32),
        congestion=_known(evidence.last[rows] - evidence.fastest[rows]),
        skew=evidence.skew[rows].astype(np.float32),
        heat=heat.astype(np.float32),
        valid_channels=any_along(allowed, -1),
        valid_chunks=any_along(allowed, -2),
    )


def _known(x: Float64) -> Float32:
    """0 for what is not known."""
    return np.where(np.isfinite(x), x, 0.0).astype(np.float32)
