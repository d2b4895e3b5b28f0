"""A cluster in the words of the observation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dynamiccl_ray.agent.observation import N_TIERS, Topology
from dynamiccl_ray.fabric.cluster_config import Cluster


def topology_of(cluster: Cluster, nodes: int, ranks: int | None = None) -> Topology:
    """The topology block of a communicator of so many ranks on ``nodes`` nodes; by default over all of their GPUs."""
    ranks = nodes * cluster.gpus_per_node if ranks is None else ranks
    # Hops of a ring over the ranks in order: each unit of a level is left once.
    hops = np.zeros(N_TIERS)
    hops[_inside(cluster.intra.kind)] = ranks - nodes + (nodes == 1)
    if cluster.inter is not None and nodes > 1:
        levels = [(nodes, cluster.inter.tier), *((-(-nodes // g.nodes), g.tier) for g in cluster.groups)]
        for (units, tier), (further, _) in zip(levels, [*levels[1:], (0, 0)], strict=True):
            hops[tier] += units - (further if further > 1 else 0) if units > 1 else 0
    mix: Any = hops / hops.sum()
    return Topology(
        ranks=ranks,
        nodes=nodes,
        kind=cluster.topology.kind,
        intra=cluster.intra.kind,
        inter=cluster.inter.kind if cluster.inter is not None and nodes > 1 else "none",
        tier_max=cluster.tier(nodes),
        tier_mix=tuple(mix.tolist()),
        nvls=cluster.nvls is not None,
    )


def described(told: Mapping[str, Any], nodes: int, ranks: int) -> Topology:
    """The same where a person has told fields of ``Topology``, of the whole job, and its network is one level."""
    whole = Topology(ranks=ranks, nodes=nodes, **told)
    inside = _inside(whole.intra)
    if nodes == 1:
        whole = whole.model_copy(update={"inter": "none", "tier_max": inside})
    hops = np.zeros(N_TIERS)
    hops[inside] = ranks - nodes + (nodes == 1)
    hops[whole.tier_max] += nodes if nodes > 1 else 0
    return whole.model_copy(update={"tier_mix": tuple((hops / hops.sum()).tolist())})


def _inside(intra: str) -> int:
    return 2 if intra == "pcie" else 1
