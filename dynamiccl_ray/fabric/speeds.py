"""The latency and the bandwidth that NCCL believes each (collective, algorithm, protocol) to have on a communicator.

NCCL keeps latencies, bandwidths and times in single precision, with some expressions in double. The arrays
here are float32 too, and ``double`` marks each expression that NCCL evaluates in double: pairs can tie (NVLS
and NVLS tree often share a bottleneck), and then the last bit decides.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamiccl_ray.arrays import Float32
from dynamiccl_ray.fabric import nccl_constants as nccl
from dynamiccl_ray.fabric.communicator import CommunicatorInfo
from dynamiccl_ray.knobs import N_ALGORITHMS, N_COLLECTIVES, N_PROTOCOLS, Algorithm, Collective, Protocol

_ALL_REDUCE, _RING, _TREE = Collective.ALL_REDUCE, Algorithm.RING, Algorithm.TREE
_DIRECT, _CHAIN = Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN
_NVLS, _NVLS_TREE, _PAT = Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.PAT
_LL128, _SIMPLE = Protocol.LL128, Protocol.SIMPLE
# All-gather and reduce-scatter are costed alike.
_SCATTERED: Final = [Collective.ALL_GATHER, Collective.REDUCE_SCATTER]
_ROOTED: Final = [Collective.BROADCAST, Collective.REDUCE]


def double(x: ArrayLike) -> NDArray[np.float64]:
    """Promote to double precision; storing the result in a float32 array rounds as NCCL's assignment does."""
    return np.asarray(x, np.float64)


def _steps(comm: CommunicatorInfo) -> Float32:
    """Steps around the ring, and how many of them cross nodes (0 in rooted ones), float32 [2, 5]."""
    r, n = comm.ranks, comm.nodes
    return np.array([[r, r, r - 1, r - 1, 2 * (r - 1)], [0, 0, n - 1, n - 1, 2 * (n - 1)]], np.float32)


def bandwidth_gbps(comm: CommunicatorInfo) -> Float32:
    """Algorithm bandwidth, float32 [5, 7, 3]; 0 where not available. Source: src/graph/tuning.cc."""
    gbps = np.zeros((N_COLLECTIVES, N_ALGORITHMS, N_PROTOCOLS), np.float32)
    if comm.ranks == 1:
        return gbps
    single = np.float32
    per_node = single(comm.ranks) / single(comm.nodes)
    size = min(comm.nodes, 3) - 1
    generation = int(np.searchsorted([80, 90, 100], comm.compute_capability, "right"))
    vendor_or_generation = generation if comm.nodes == 1 else int(comm.cpu_vendor in ("amd", "mixed"))
    ll_max = nccl.LL_MAX_GBPS[vendor_or_generation, size]
    ring_share = (comm.ranks / double(_steps(comm)[0])).astype(single)
    graphs = [comm.graphs[a] for a in Algorithm]
    channels, intra, inter = np.array([[g.channels, g.bw_intra, g.bw_inter] for g in graphs], single).T
    bus = channels * (intra if comm.nodes <= 2 else inter)

    at, wide = double(bus[_RING]), double(channels[_RING])
    ll128_max = wide * nccl.RING_LL128_MAX_GBPS[generation, size]
    ring = np.array([min(ll_max, at / 2), min(at * 0.92, ll128_max), at], single)
    gbps[:, _RING] = ring * ring_share[:, None]

    wide = double(channels[_TREE])
    at = double(single(min(double(bus[_TREE]) * 0.92, wide * nccl.TREE_MAX_GBPS[generation, size])))
    ll128_max = wide * nccl.TREE_LL128_MAX_GBPS[generation, size]
    payload = 7 / 9 if comm.nodes == 1 else 120 / 128
    tree = np.array([min(at / 3.8, ll_max), min(at * payload, ll128_max), at], single)
    if comm.tree_pattern_is_tree:
        tree = (double(tree) * 0.85).astype(single)
    gbps[_ALL_REDUCE, _TREE] = tree * single(0.5)

    if comm.compute_capability >= 60 and comm.nodes == comm.ranks:
        gbps[_SCATTERED, _PAT, _SIMPLE] = double(bus[_PAT]) * 0.75

    # Across nodes CollNet must implement the collective, and each rank of a node needs a head of its own.
    scattered = np.array([comm.collnet_all_gather, comm.collnet_reduce_scatter])
    scattered = (scattered & comm.collnet & (comm.most_local_ranks <= comm.heads)) | (comm.nodes == 1)

    gbps[_ALL_REDUCE, _CHAIN, _SIMPLE] = channels[_CHAIN] * intra[_CHAIN] * single(0.5)
    if channels[_DIRECT]:
        gpus_per_nic = single(double(per_node) / channels[_DIRECT])
        gpus_per_nic -= (gpus_per_nic - single(1)) / single(2)
        direct = channels[_DIRECT] * intra[_DIRECT] / gpus_per_nic
        if comm.compute_capability >= 90:
            direct = single(double(direct) * 0.85)
        gbps[_ALL_REDUCE, _DIRECT, _SIMPLE] = direct * single(0.5)
        direct = per_node * min(intra[_DIRECT], inter[_DIRECT] * single(0.9))
        gbps[_SCATTERED, _DIRECT, _SIMPLE] = np.where(scattered, direct, single(0))

    for algorithm in (_NVLS, _NVLS_TREE):
        wide, network = channels[algorithm], inter[algorithm]
        if wide < 2:
            continue
        local = intra[algorithm] * nccl.NVLS_EFFICIENCY[generation] * (wide - single(1)) / wide
        most = single(np.inf)
        if algorithm == _NVLS_TREE:
            most = single(nccl.NVLS_TREE_MAX_GBPS[generation, size])
            network = network * single(2 if comm.nodes <= 2 else 1)
        both_ways = min(local * single(2), network, most)
        gbps[_ALL_REDUCE, algorithm, _SIMPLE] = wide * both_ways * ring_share[_ALL_REDUCE]
        if algorithm == _NVLS:
            one_way = min(local * ((per_node - single(1)) / per_node), network)
            gbps[_SCATTERED, _NVLS, _SIMPLE] = np.where(scattered, wide * one_way, single(0))

    gbps[:, _DIRECT] *= comm.collnet and comm.nvswitches > 0
    gbps[:, _CHAIN] *= comm.collnet and comm.collnet_chain
    gbps[:, _NVLS] *= comm.collnet or comm.nodes == 1
    gbps[:, _NVLS_TREE] *= comm.nodes > 1
    # LL128 needs its 128 B stores to arrive whole.
    farthest = nccl.PATH_PXN if comm.compute_capability >= 90 else nccl.PATH_PXB
    for algorithm, graph in comm.graphs.items():
        whole = graph.type_inter <= farthest and graph.type_intra <= nccl.PATH_NVB
        gbps[:, algorithm, _LL128] *= whole and comm.compute_capability >= 70
    return gbps


def latency_us(comm: CommunicatorInfo) -> Float32:
    """Latency of one operation, float32 [5, 7, 3], whether available or not. Source: src/graph/tuning.cc."""
    graphs, nodes, local = comm.graphs, comm.nodes, comm.ranks // comm.nodes
    hops = nodes.bit_length() - 1
    hardware = nccl.HARDWARE_LATENCY_US.astype(np.float32)
    if comm.cpu_vendor == "power":
        hardware[nccl.PCI, _TREE, _SIMPLE] = hardware[nccl.PCI, _RING, _SIMPLE]
    inside = np.array([nccl.NVLINK if graphs[a].type_intra == nccl.PATH_NVL else nccl.PCI for a in Algorithm])
    intra = hardware[inside, np.arange(N_ALGORITHMS)]
    # A lone rank on a node hides no network latency, so all algorithms pay tree's.
    inter = hardware[nccl.NET, np.where(comm.ranks == nodes, _TREE, np.arange(N_ALGORITHMS))]
    network = np.array([graphs[a].latency_inter for a in Algorithm], np.float32)
    inter += network[:, None]
    inter[:, _SIMPLE] += network  # Simple also waits for the flush.

    base = nccl.BASE_LATENCY_US.astype(np.float32)
    latency = np.tile(base, (N_COLLECTIVES, 1, 1))

    steps, inter_steps = _steps(comm)[..., None]
    # Every step posts to the network, whether or not it crosses nodes.
    post = (2.0 if comm.cpu_vendor == "amd" else 1.0) if nodes > 1 else 0.0
    posted = np.maximum(intra[_RING], np.array([post, post, 3 * post], np.float32))
    latency[:, _RING] += (steps - inter_steps) * posted + inter_steps * inter[_RING]
    kind = inside[_RING] if nodes == 1 else nccl.NET
    if graphs[_RING].same_channels:
        rooted = hardware[kind, _RING]
    else:
        rooted = comm.ranks * np.append(hardware[kind, _RING, :_SIMPLE], hardware[kind, _TREE, _SIMPLE])
    latency[_ROOTED, _RING] = base[_RING] + rooted

    latency[_ALL_REDUCE, _TREE] += 2 * ((local - 1) * intra[_TREE] + hops * inter[_TREE])
    # 0.4 us for each local rank that a head serves in turn.
    served = 2 * (double(min(1, local - 1) * intra[_DIRECT]) + (local - 1) * 0.4)
    latency[:, _DIRECT] = double(base[_DIRECT]) + served + inter[_DIRECT]
    latency[:, _CHAIN] += 2 * (local - 1) * intra[_CHAIN] + inter[_CHAIN]
    latency[:, _NVLS] = intra[_NVLS] + (inter[_NVLS] if nodes > 1 else np.float32(0))
    latency[:, _NVLS_TREE] += intra[_NVLS_TREE] + 2 * hops * inter[_NVLS_TREE]
    latency[:, _PAT] = double(base[_PAT]) + (hops * (double(inter[_PAT]) / 3.5) + comm.ranks * 2.8)
    return latency
