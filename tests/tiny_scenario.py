"""Scenarios that are small enough to work out by hand, and ones that are quick to learn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS
from dynamiccl_ray.agent.observation import Context, Topology
from dynamiccl_ray.fabric.load import IDLE, Load
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import N_PAIRS
from dynamiccl_ray.simulation.scenario import Scenario, modelled


def tiny(times_us: Sequence[Sequence[Sequence[float]]], *, starts: Sequence[int], sigma: float = 0.0) -> Scenario:
    """``times_us`` of shape (P, K, pairs): NCCL's own choice first, pairs with NCCL's own channels and chunk. Key k
    has weight k + 1. NCCL believes in no other pair.
    """
    given = np.array(times_us, np.float32)
    times = np.full((*given.shape[:2], N_PAIRS, N_CHANNELS, N_CHUNKS), np.nan, np.float32)
    times[:, :, : given.shape[2], 0, 0] = given
    keys = given.shape[1]
    return Scenario(
        cluster="tiny",
        context=Context(topology=Topology(ranks=4, nodes=2, tier_max=1)),
        collective=np.full(keys, 4),
        nbytes=1 << np.arange(10, 10 + keys),
        weight=np.arange(1.0, keys + 1),
        starts=np.array(starts),
        times_us=times,
        cost=np.full((keys, N_PAIRS), 4.0, np.float32),
        own_pair=np.zeros(keys, np.int64),
        sigma=np.asarray(sigma),
    )


def tcp(*loads: Load, every: int = 600) -> Scenario:
    """Four nodes on TCP, idle at first and then under ``loads``, each of which holds for ``every`` steps."""
    return modelled(
        find_cluster("cloud-tcp"),
        4,
        collective=[4, 4, 4, 4, 2, 2],
        nbytes=[1 << 13, 1 << 16, 1 << 20, 1 << 24, 1 << 20, 1 << 24],
        loads=[IDLE, *loads],
        starts=[every * i for i in range(len(loads) + 1)],
        sigma=0.005,
    )
