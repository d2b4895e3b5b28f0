"""Which cluster this is, where nobody says, or NCCL says otherwise: the one of those we know whose NCCL believes the
same.

NCCL hands a tuner what it predicts of every algorithm and protocol. These predictions come from the machine alone: its
GPUs, links and network as NCCL's search found them. So they tell machines apart like a fingerprint, before anything
has been measured.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dynamiccl_ray.agent.observation import Topology, relative_cost
from dynamiccl_ray.arrays import Float32, Int64
from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.describe import topology_of
from dynamiccl_ray.fabric.presets import find_cluster, preset_names
from dynamiccl_ray.knobs import OWN_PAIR

# A pair that one of them has and the other has not is this far off, as a log: so is one that costs much more.
_FAR: Final = 1.0
# What was said stands unless NCCL's predictions are off by more than this, and nearer to another cluster by that
# factor. On a cluster that is described rightly they are off by 0; on most unlike ones by 0.3 to 0.8.
_OFF: Final = 0.2
_NEARER: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """A cluster that is like the one of a communicator."""

    cluster: Cluster
    """With as many GPUs a node as the communicator has."""
    distance: float
    """Root mean square of the differences of log predicted costs; 0 where NCCL believes the same."""

    def topology(self, said: Topology) -> Topology:
        """The topology block of a communicator of which this is ``said``: what nobody said is that of the cluster."""
        if said.intra != "none" or said.inter != "none":
            return said
        return topology_of(self.cluster, said.nodes, said.ranks)


def recognised(
    ranks: int,
    nodes: int,
    collective: Int64,
    nbytes: Int64,
    cost: Float32,
    among: Sequence[Cluster] | None = None,
) -> Recognised | None:
    """The likest ``among`` clusters, the presets by default, for a communicator of ``ranks`` on ``nodes`` nodes.

    ``cost`` (K, N_PAIRS) is what NCCL predicts of keys (``collective`` and ``nbytes``, both (K,)) as in
    ``relative_cost``; a row of 0 says nothing. None where no row says anything, or no cluster has such a communicator.
    """
    said = np.flatnonzero((cost != 0).any(-1))
    per_node, left = divmod(ranks, nodes)
    if left or not len(said):
        return None
    collective, nbytes, cost = collective[said], nbytes[said], cost[said]
    best: Recognised | None = None
    for cluster in among if among is not None else presets():
        part = cluster if per_node == cluster.gpus_per_node else cluster.part(per_node)
        if (belief := _belief(part, nodes)) is None:
            continue
        far = _distance(cost, relative_cost(belief.cost_table_us(collective, nbytes).reshape(len(said), -1)))
        if best is None or far < best.distance:
            best = Recognised(cluster=part, distance=far)
    return best


def taken_for(
    said: Cluster | None,
    ranks: int,
    nodes: int,
    collective: Int64,
    nbytes: Int64,
    cost: Float32,
    among: Sequence[Cluster] | None = None,
) -> Recognised | None:
    """The cluster that a communicator is taken to be on instead of the one that was ``said``: see ``recognised``. None
    where what was said stands, or nothing is known."""
    like = recognised(ranks, nodes, collective, nbytes, cost, among)
    own = None if said is None else recognised(ranks, nodes, collective, nbytes, cost, [said])
    if like is None or own is None:
        return like
    return like if own.distance > max(_OFF, _NEARER * like.distance) else None


@functools.cache
def presets() -> tuple[Cluster, ...]:
    """All that come with the project."""
    return tuple(find_cluster(name) for name in preset_names())


def _belief(cluster: Cluster, nodes: int) -> Belief | None:
    try:
        return cluster.nccl_belief(nodes)
    except ValueError:
        return None  # it cannot have as many nodes


def _distance(cost: Float32, other: Float32) -> float:
    """Of what NCCL predicts (K, N_PAIRS) here and there, whatever the cheapest of each is.

    What is offered there alone says nothing: an environment variable or a data type may forbid it here.
    """
    here, there = cost != 0, other != 0
    here[:, OWN_PAIR] = False
    both = here & there
    counts = both.sum(-1, keepdims=True)
    off = np.where(both, cost - other, 0.0)
    off = np.where(both, off - off.sum(-1, keepdims=True) / np.maximum(counts, 1), 0.0)
    square = np.where(both, np.minimum(off**2, _FAR), np.where(here, _FAR, 0.0))
    return float(np.sqrt(square.sum() / max(int(here.sum()), 1)))
