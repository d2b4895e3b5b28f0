"""A cluster in the words of the observation."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.observation import N_TIERS, Topology


def topology_of(cluster: Cluster, nodes: int) -> Topology:
    """The topology block of a communicator over all GPUs of ``nodes`` nodes."""
    local, inside = cluster.gpus_per_node, 2 if cluster.intra.kind == "pcie" else 1
    # Hops of a ring over the ranks in order: each unit of a level is left once.
    hops = np.zeros(N_TIERS)
    hops[inside] = nodes * (local - 1) + (nodes == 1)
    if cluster.inter is not None and nodes > 1:
        levels = [(nodes, cluster.inter.tier), *((-(-nodes // g.nodes), g.tier) for g in cluster.groups)]
        for (units, tier), (further, _) in zip(levels, [*levels[1:], (0, 0)], strict=True):
            hops[tier] += units - (further if further > 1 else 0) if units > 1 else 0
    mix: Any = hops / hops.sum()
    return Topology(
        ranks=nodes * local,
        nodes=nodes,
        kind=cluster.topology.kind,
        intra=cluster.intra.kind,
        inter=cluster.inter.kind if cluster.inter is not None and nodes > 1 else "none",
        tier_max=cluster.tier(nodes),
        tier_mix=tuple(mix.tolist()),
        nvls=cluster.nvls is not None,
    )
