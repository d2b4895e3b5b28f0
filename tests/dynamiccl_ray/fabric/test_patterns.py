"""Hops and crossings of each algorithm, against messages that are really passed and against numbers worked by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.distance import tree_stretch
from dynamiccl_ray.fabric.patterns import Pattern, pattern_of
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import Algorithm, Collective

SHAPES = [(2, 1), (3, 1), (1, 4), (2, 2), (2, 4), (3, 4), (4, 2), (8, 2), (5, 3)]


def _machine(gpus: int, groups: tuple[int, ...] = (), base: str = "dgx-h100-ndr-sharp") -> Cluster:
    raw: dict[str, Any] = find_cluster(base).model_dump() | {"gpus_per_node": gpus}
    raw["groups"] = [{"nodes": n, "tier": 3, "gb_per_s": 100, "step_us": 1} for n in groups]
    return Cluster.model_validate(raw)


def _pattern(cluster: Cluster, nodes: int, collective: Collective, algorithm: Algorithm) -> Pattern:
    found = pattern_of(cluster, nodes, collective, algorithm)
    assert found is not None
    return found


class _Ring:
    """Ranks that pass chunks to their right: what is sent is counted, what arrives is checked."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self.n, self.gpus = nodes * gpus, gpus
        rng = np.random.default_rng(0)
        self.data = rng.integers(0, 100, (self.n, self.n)).astype(float)
        self.expected = self.data.sum(0)
        self.sent: Counter[tuple[int, int]] = Counter()
        # Hops inside and between nodes on the longest chain of sends that wait for each other, per rank and chunk.
        self.path = np.zeros((self.n, self.n, 2))

    def step(self, chunk_of: Any, reduce: bool) -> None:
        messages = [
            (r, chunk_of(r), self.data[r, chunk_of(r)], self.path[r, chunk_of(r)].copy()) for r in range(self.n)
        ]
        for rank, chunk, value, path in messages:
            to = (rank + 1) % self.n
            self.data[to, chunk] = value + (self.data[to, chunk] if reduce else 0)
            crosses = rank // self.gpus != to // self.gpus
            self.path[to, chunk] = path + np.array([not crosses, crosses])
            self.sent[rank, to] += 1

    def reduce_scatter(self) -> None:
        for s in range(self.n - 1):
            self.step(lambda r, s=s: (r - s) % self.n, reduce=True)

    def all_gather(self) -> None:
        for s in range(self.n - 1):
            self.step(lambda r, s=s: (r + 1 - s) % self.n, reduce=False)

    def out_of(self, size: int) -> float:
        """Of the buffer, the most that leaves a block of so many ranks."""
        out: Counter[int] = Counter()
        for (rank, to), count in self.sent.items():
            out[rank // size] += count * (rank // size != to // size)
        return max(out.values()) / self.n


@pytest.mark.parametrize(("nodes", "gpus"), SHAPES)
def test_ring_all_reduce_is_what_passing_messages_gives(nodes: int, gpus: int) -> None:
    ring = _Ring(nodes, gpus)
    ring.reduce_scatter()
    ring.all_gather()
    assert (ring.data == ring.expected).all()
    pattern = _pattern(_machine(gpus), nodes, Collective.ALL_REDUCE, Algorithm.RING)
    assert pattern.copies == pattern.out_of_gpu == pytest.approx(max(ring.sent.values()) / ring.n)
    assert pattern.out_of_node == pytest.approx(ring.out_of(gpus))
    hops = ring.path.reshape(-1, 2)
    longest = hops[hops.sum(1) == hops.sum(1).max()]
    assert longest.sum(1).max() == pattern.intra_hops + pattern.inter_hops
    # Two laps but for two hops. NCCL takes the path that leaves out two crossings; others have up to two more.
    assert ((longest[:, 1] - pattern.inter_hops >= 0) & (longest[:, 1] - pattern.inter_hops <= 2 * (nodes > 1))).all()


@pytest.mark.parametrize(("nodes", "gpus"), SHAPES)
def test_ring_reduce_scatter_is_half_of_it(nodes: int, gpus: int) -> None:
    ring = _Ring(nodes, gpus)
    ring.reduce_scatter()
    whole = [ring.data[(chunk - 1) % ring.n, chunk] for chunk in range(ring.n)]
    assert whole == list(ring.expected)
    for collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        pattern = _pattern(_machine(gpus), nodes, collective, Algorithm.RING)
        assert pattern.out_of_node == pytest.approx(ring.out_of(gpus))
        assert pattern.intra_hops + pattern.inter_hops == ring.n - 1


def test_ring_out_of_groups() -> None:
    ring = _Ring(8, 2)
    ring.reduce_scatter()
    ring.all_gather()
    pattern = _pattern(_machine(2, (2, 4)), 8, Collective.ALL_REDUCE, Algorithm.RING)
    assert pattern.out_of_group == pytest.approx((ring.out_of(4), ring.out_of(8)))
    assert pattern.group_hops == (2 * 3, 2 * 1)


def test_rooted_ring_by_hand() -> None:
    """From GPU 0 of 3 nodes of 4: 11 hops, 2 of them out of a node; every byte leaves a node once."""
    pattern = _pattern(_machine(4, (1,)), 3, Collective.BROADCAST, Algorithm.RING)
    assert (pattern.intra_hops, pattern.inter_hops, pattern.group_hops) == (9, 2, (2,))
    assert (pattern.copies, pattern.out_of_node) == (1, 1)
    # Of 2 network hops that store and forward, one is the transfer itself.
    assert (pattern.fills, pattern.inter_fills, pattern.group_fills) == (0, 1, (1,))


def _binary_trees(n: int) -> list[dict[int, int]]:
    """NCCL's two trees (src/graph/trees.cc) as child -> parent: inner nodes of one are leaves of the other."""
    first = {}
    for rank in range(1, n):
        bit = rank & -rank
        above = (rank ^ bit) | (bit << 1)
        first[rank] = above if above < n else rank ^ bit
    flip = (lambda r: n - 1 - r) if n % 2 == 0 else (lambda r: (r + 1) % n)
    return [first, {flip(child): flip(parent) for child, parent in first.items()}]


def _tree_traffic(nodes: int, size: int) -> float:
    """Of the buffer, the most that leaves a block of nodes: half of it in each tree, up and down every edge."""
    out: Counter[int] = Counter()
    for tree in _binary_trees(nodes):
        for child, parent in tree.items():
            if child // size != parent // size:
                out[child // size] += 1
                out[parent // size] += 1
    return max(out.values()) / 2


def _tree_hops(nodes: int, size: int) -> int:
    """Edges between blocks on the longest way to a root."""
    longest = 0
    for tree in _binary_trees(nodes):
        for node in range(nodes):
            hops, at = 0, node
            while at in tree:
                hops += at // size != tree[at] // size
                at = tree[at]
            longest = max(longest, hops)
    return longest


@pytest.mark.parametrize("algorithm", [Algorithm.TREE, Algorithm.NVLS_TREE])
@pytest.mark.parametrize("nodes", [2, 4, 5, 8, 16, 31, 32, 64])
def test_trees_between_nodes_are_nccls(nodes: int, algorithm: Algorithm) -> None:
    pattern = _pattern(_machine(4), nodes, Collective.ALL_REDUCE, algorithm)
    assert pattern.out_of_node == _tree_traffic(nodes, 1)
    assert pattern.inter_hops == 2 * _tree_hops(nodes, 1)


@pytest.mark.parametrize(("nodes", "size"), [(8, 4), (16, 8), (16, 4), (32, 4), (64, 16), (64, 2), (128, 16)])
def test_trees_out_of_groups_are_nccls(nodes: int, size: int) -> None:
    pattern = _pattern(_machine(4, (size,)), nodes, Collective.ALL_REDUCE, Algorithm.TREE)
    assert pattern.out_of_group == (_tree_traffic(nodes, size),)
    assert pattern.group_hops == (2 * _tree_hops(nodes, size),)


def test_tree_inside_a_node_by_hand() -> None:
    """A chain of 8: 7 hops up and 7 down; a GPU sends its half-way results up and the result down."""
    pattern = _pattern(_machine(8), 1, Collective.ALL_REDUCE, Algorithm.TREE)
    assert (pattern.intra_hops, pattern.inter_hops, pattern.out_of_gpu, pattern.out_of_node) == (14, 0, 2, 0)


def test_switches_by_hand() -> None:
    """Among 8 GPUs NVLS pulls and pushes N/8 of everyone's N and gets all of N; without reduction 7/8 of it move."""
    cluster = _machine(8)
    assert _pattern(cluster, 1, Collective.ALL_REDUCE, Algorithm.NVLS).switched == 1 + 1 / 8
    assert _pattern(cluster, 1, Collective.ALL_GATHER, Algorithm.NVLS).switched == 7 / 8
    # With SHARP a byte leaves a node once, whatever the number of nodes, where a ring has it leave almost twice.
    for algorithm in (Algorithm.NVLS, Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN):
        for nodes in (2, 32):
            pattern = _pattern(cluster, nodes, Collective.ALL_REDUCE, algorithm)
            assert (pattern.out_of_node, pattern.in_network_hops) == (1, 1)


def test_pat_by_hand() -> None:
    """16 nodes of one GPU: 4 steps; each sends 15/16 of the buffer."""
    pattern = _pattern(_machine(1), 16, Collective.ALL_GATHER, Algorithm.PAT)
    assert (pattern.inter_hops, pattern.out_of_node) == (4, 15 / 16)
    assert pattern_of(_machine(2), 16, Collective.ALL_GATHER, Algorithm.PAT) is None


@pytest.mark.parametrize("algorithm", [a for a in Algorithm if a != Algorithm.RING])
def test_only_rings_do_rooted_collectives(algorithm: Algorithm) -> None:
    for collective in (Collective.BROADCAST, Collective.REDUCE):
        assert pattern_of(_machine(8), 4, collective, algorithm) is None


def test_a_torus_stretches_trees_by_their_distance() -> None:
    """Four nodes in a row of an 8 x 8 torus: the tree's edges are 1-0, 3-2 and 2-0, so 4 links for 3 messages."""
    torus = find_cluster("torus-2d").topology
    assert tree_stretch(torus, 4).mean == pytest.approx(4 / 3)
    assert tree_stretch(torus, 4).extra_hops == 2
    # Half-way around a ring of 8 is as far as it gets.
    assert tree_stretch(torus, 8).extra_hops == 2 * (0 + 1 + 3)
