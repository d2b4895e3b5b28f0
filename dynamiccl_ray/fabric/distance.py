"""How far apart nodes are: hops that an algorithm's messages cross beyond the first, by topology."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.fabric.cluster_config import NodeTopology

Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What a pattern of messages pays for nodes that are not neighbours."""

    mean: float
    """Links that a message crosses, on average over the pattern: each occupies all of them."""
    extra_hops: float
    """Hops beyond one per step, summed along the longest path."""


DIRECT = Stretch(mean=1.0, extra_hops=0.0)


def tree_stretch(topology: NodeTopology, nodes: int) -> Stretch:
    """Of a binary tree over the nodes in order, up and down: node i talks to i +- 2^k, where 2^k divides i.

    A ring takes neighbours in order, so its stretch is 1 wherever a Hamiltonian cycle exists.
    """
    if topology.kind == "fat-tree" or nodes < 3:
        return DIRECT
    longest, lengths = 0.0, []
    stride = 1
    while stride < nodes:
        children = np.arange(stride, nodes, 2 * stride)
        distances = _distance(topology, children, children - stride)
        lengths.append(distances)
        longest += float(distances.max()) - 1
        stride *= 2
    return Stretch(mean=float(np.concatenate(lengths).mean()), extra_hops=2 * longest)


def all_to_all_stretch(topology: NodeTopology, nodes: int) -> Stretch:
    """Of messages between nodes at all powers of two of distance, as in recursive doubling and PAT."""
    if topology.kind == "fat-tree" or nodes < 3:
        return DIRECT
    everyone = np.arange(nodes)
    strides = 1 << np.arange((nodes - 1).bit_length())
    distances = np.stack([_distance(topology, everyone, (everyone + s) % nodes) for s in strides])
    return Stretch(mean=float(distances.mean()), extra_hops=float((distances.max(1) - 1).sum()))


def _distance(topology: NodeTopology, a: Int64, b: Int64) -> Int64:
    """Links between nodes ``a`` and ``b``, in row-major order; at least 1. Beyond the dims, nodes wrap around."""
    if topology.kind == "torus":
        hops = np.zeros(len(a), np.int64)
        for size in reversed(topology.dims):
            step = np.abs(a % size - b % size)
            hops += np.minimum(step, size - step)
            a, b = a // size, b // size
        return np.maximum(1, hops)
    # HammingMesh (Hoefler et al. 2022): boards are 2D meshes; a row and a column of boards hang on one switch each,
    # which every board reaches from its edge.
    rows, columns, _, across = topology.dims
    size = rows * columns
    board_a, board_b = a // size, b // size
    row_a, column_a = a % size // columns, a % columns
    row_b, column_b = b % size // columns, b % columns
    inside = np.abs(row_a - row_b) + np.abs(column_a - column_b)

    def edge(position: Int64, side: int) -> Int64:
        return np.minimum(position, side - 1 - position)

    along = np.where(board_a % across != board_b % across, edge(column_a, columns) + edge(column_b, columns) + 2, 0)
    down = np.where(board_a // across != board_b // across, edge(row_a, rows) + edge(row_b, rows) + 2, 0)
    same = board_a == board_b
    return np.maximum(1, np.where(same, inside, along + down))
