"""What each algorithm asks of the machine: hops, copies and crossings per byte, as one row of numbers.

``dynamiccl_ray.fabric.physics`` prices every algorithm by the same equation; the algorithms differ in these rows only.
n ranks are m nodes of g GPUs; N bytes are shared by the channels, each channel's share is S.

============== =============================== ====================== ================ ==========================
algorithm      hops on the longest path        copies of S by a       crossings of S   source
                                               thread block           out of a node
============== =============================== ====================== ================ ==========================
ring           2(n-1), one in g of them out    2(n-1)/n               2(n-1)/n         Thakur, Rabenseifner,
               of the node; half of that for                                           Gropp 2005
               all-gather, reduce-scatter
ring, rooted   n-1                             1                      1                Barnett et al. 1993
tree           2(g-1) and 2 log2 m             2 / tree_share         2; 1 if m = 2    Sanders, Speck, Traeff 2009
NVLS           1 or 2 through the switch,      1 + 1/g                -, or 1           Klenk et al. 2020
               and 2 to the network's switch
NVLS tree      2 and 2 log2 m                  1 + 1/g                2; 1 if m = 2    both
PAT            log2 n                          (n-1)/n                (n-1)/n          Bruck et al. 1997; NCCL 2.23
CollNet        2 or 2(g-1), and 2 to the       2 or 2                 1                Graham et al. 2016 (SHARP)
               switch
============== =============================== ====================== ================ ==========================
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.distance import all_to_all_stretch, tree_stretch
from dynamiccl_ray.knobs import Algorithm, Collective

_AR, _AG, _RS = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The demands of one algorithm; all "per byte" counts are per byte of a channel's share."""

    intra_hops: float = 0.0
    """Hops inside a node on the longest path."""
    inter_hops: float = 0.0
    """Hops between nodes on it."""
    group_hops: tuple[float, ...] = ()
    """Hops on it that leave a group, per level of groups."""
    switch_hops: float = 0.0
    """Reductions and multicasts in the NVSwitch on it."""
    in_network_hops: float = 0.0
    """Aggregations in the network on it."""
    extra_hops: float = 0.0
    """Links beyond the first of each network hop on it."""
    copies: float = 0.0
    """Per byte, by a thread block."""
    switched: float = 0.0
    """Per byte, through the NVSwitch's units."""
    out_of_gpu: float = 0.0
    """Crossings of a GPU's link per byte."""
    out_of_node: float = 0.0
    """Crossings of a node's devices per byte."""
    out_of_group: tuple[float, ...] = ()
    """Crossings of a group's uplink per byte, per level of groups."""
    stretch: float = 1.0
    """Links of the network that a crossing occupies."""
    connections: float = 1.0
    """Of one channel out of a node; they share what crosses."""
    parts: float = 1.0
    """Chunks that are under way at once: a chunk is at most a share's part."""
    fills: float = 0.0
    """Chunks that pass inside nodes before the pipeline is full."""
    inter_fills: float = 0.0
    """The same between nodes, the slowest hop apart: what it takes is the transfer itself."""
    group_fills: tuple[float, ...] = ()
    """The same out of groups, per level."""


def pattern_of(cluster: Cluster, nodes: int, collective: Collective, algorithm: Algorithm) -> Pattern | None:
    """The pattern over all GPUs of ``nodes`` nodes; None where the algorithm does not do the collective."""
    g, n = cluster.gpus_per_node, nodes * cluster.gpus_per_node
    depth = float((nodes - 1).bit_length())
    groups = [-(-nodes // group.nodes) for group in cluster.groups]
    if algorithm == Algorithm.RING:
        return _ring(collective, n, nodes, groups)
    if algorithm == Algorithm.PAT:
        if collective not in (_AG, _RS) or g != 1 or nodes < 2:
            return None
        far = all_to_all_stretch(cluster.topology, nodes)
        turns = (n - 1) / n
        return Pattern(
            inter_hops=depth,
            extra_hops=far.extra_hops,
            group_hops=tuple(_depth(count) for count in groups),
            copies=turns,
            out_of_node=turns,
            # Each of a group's nodes sends to other groups in log2(groups) of its log2(nodes) steps.
            out_of_group=tuple(
                turns * group.nodes * _depth(count) / depth if count > 1 else 0.0
                for group, count in zip(cluster.groups, groups, strict=True)
            ),
            stretch=far.mean,
            inter_fills=depth / 2,
        )
    if algorithm == Algorithm.NVLS:
        if cluster.nvls is None or collective not in (_AR, _AG, _RS):
            return None
        if nodes > 1:
            return _nvls_sharp(cluster, groups) if collective == _AR and cluster.in_network else None
        moved = 1 + 1 / g if collective == _AR else (g - 1) / g
        return Pattern(switch_hops=2.0 if collective == _AR else 1.0, switched=moved, parts=g)
    if collective != _AR:
        return None
    if algorithm == Algorithm.TREE:
        far = tree_stretch(cluster.topology, nodes)
        crossings = 0.0 if nodes < 2 else 1.0 if nodes == 2 else 2.0
        return Pattern(
            intra_hops=2.0 * (g - 1),
            inter_hops=2 * depth,
            extra_hops=far.extra_hops,
            group_hops=tuple(2 * _tree_hops(count) for count in groups),
            copies=2 / cluster.tree_share,
            out_of_gpu=2.0,
            out_of_node=crossings,
            out_of_group=tuple(_tree_crossings(count) for count in groups),
            stretch=far.mean,
            fills=g - 1.0,
            inter_fills=depth,
            group_fills=tuple(max(0.0, _tree_hops(count) - 1) for count in groups),
        )
    if nodes < 2:
        return None
    if algorithm == Algorithm.NVLS_TREE:
        if cluster.nvls is None:
            return None
        far = tree_stretch(cluster.topology, nodes)
        return Pattern(
            switch_hops=2.0,
            inter_hops=2 * depth,
            extra_hops=far.extra_hops,
            group_hops=tuple(2 * _tree_hops(count) for count in groups),
            switched=1 + 1 / g,
            out_of_node=1.0 if nodes == 2 else 2.0,
            out_of_group=tuple(_tree_crossings(count) for count in groups),
            stretch=far.mean,
            connections=float(g),
            parts=g,
            inter_fills=depth,
            group_fills=tuple(max(0.0, _tree_hops(count) - 1) for count in groups),
        )
    if cluster.in_network is None:
        return None
    direct = algorithm == Algorithm.COLLNET_DIRECT
    return Pattern(
        intra_hops=2.0 if direct else 2.0 * (g - 1),
        in_network_hops=1.0,
        group_hops=tuple(2.0 * (count > 1) for count in groups),
        copies=2.0,
        out_of_gpu=2.0,
        out_of_node=1.0,
        out_of_group=tuple(1.0 * (count > 1) for count in groups),
        connections=float(g) if direct else 1.0,
        parts=float(g) if direct else 1.0,
        fills=1.0 if direct else float(g - 1),
    )


def _nvls_sharp(cluster: Cluster, groups: list[int]) -> Pattern:
    """Every GPU reduces its part in the NVSwitch, has it aggregated in the network, and multicasts the result."""
    g = float(cluster.gpus_per_node)
    return Pattern(
        switch_hops=2.0,
        in_network_hops=1.0,
        group_hops=tuple(2.0 * (count > 1) for count in groups),
        switched=1 + 1 / g,
        out_of_node=1.0,
        out_of_group=tuple(1.0 * (count > 1) for count in groups),
        connections=g,
        parts=g,
        inter_fills=1.0,
    )


def _ring(collective: Collective, n: int, nodes: int, groups: list[int]) -> Pattern:
    scattered = collective in (_AR, _AG, _RS)
    rounds = 2 if collective == _AR else 1
    inter = float(rounds * (nodes - 1))
    turns = rounds * (n - 1) / n if scattered else 1.0
    return Pattern(
        intra_hops=rounds * (n - 1) - inter,
        inter_hops=inter,
        group_hops=tuple(float(rounds * (count - 1)) for count in groups),
        copies=turns,
        out_of_gpu=turns,
        out_of_node=turns if nodes > 1 else 0.0,
        out_of_group=tuple(turns * (count > 1) for count in groups),
        parts=float(n) if scattered else 1.0,
        # Inside a node, what arrives is passed on at once: among 8 A100 a rank more costs a broadcast of 96 MiB 3.5 us,
        # the latency of a hop (github.com/abhivijay96/nccl-tests). The proxies of the network pass on whole chunks.
        inter_fills=0.0 if scattered else max(0.0, nodes - 2.0),
        group_fills=() if scattered else tuple(max(0.0, count - 2.0) for count in groups),
    )


def _depth(count: int) -> float:
    return float((count - 1).bit_length())


def _tree_hops(count: int) -> float:
    """Hops between groups from a leaf to the root of NCCL's binary tree: its root is node 0, so one more than log2."""
    return _depth(count) + 1 if count > 1 else 0.0


def _tree_crossings(count: int) -> float:
    """How often a byte leaves a group in NCCL's two trees, each of which carries half of it both ways on every edge.

    A group's subtree hangs on its first node in one tree and on its last in the other; between the first and the last
    group, the way to the root enters and leaves it too.
    """
    return min(3.0, count) if count > 1 else 0.0
