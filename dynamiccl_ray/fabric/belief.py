"""What NCCL believes a collective costs: its own cost model, as arrays.

This reproduces NCCL 2.30.7 with no ``NCCL_*`` environment variable set: the latency and bandwidth of every
(collective, algorithm, protocol) from src/graph/tuning.cc, and the cost table, the choice, the channels and
the warps from src/enqueue.cc. It is what a tuner plugin is handed and what NCCL does without one. It says
nothing about how long a collective really takes.

Assumed where NCCL looks at the call: a sum, of a data type that CollNet and NVLS can reduce and that is not
fp8; and of the machine: GPUs of one compute capability, CUDA 12 or newer, a host network device.

NCCL keeps latencies, bandwidths and times in single precision, with some expressions in double. The arrays
here are float32 too, and ``_double`` marks each expression that NCCL evaluates in double: pairs can tie (NVLS
and NVLS tree often share a bottleneck), and then the last bit decides.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamiccl_ray.fabric import nccl_constants as nccl
from dynamiccl_ray.knobs import N_ALGORITHMS, N_COLLECTIVES, N_PROTOCOLS, Algorithm, Collective, Protocol

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

# What cpu_vendor may be; all but arm and power are x86 to NCCL.
CPU_VENDORS: Final = ("intel", "amd", "zhaoxin", "mixed", "arm", "power")

_ALL_REDUCE, _RING, _TREE = Collective.ALL_REDUCE, Algorithm.RING, Algorithm.TREE
_DIRECT, _CHAIN = Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN
_NVLS, _NVLS_TREE, _PAT = Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.PAT
_LL128, _SIMPLE = Protocol.LL128, Protocol.SIMPLE
# All-gather and reduce-scatter are costed alike.
_SCATTERED: Final = [Collective.ALL_GATHER, Collective.REDUCE_SCATTER]
_ROOTED: Final = [Collective.BROADCAST, Collective.REDUCE]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What NCCL's topology search found for one algorithm; no channels if nothing.

    Path types: 0 LOC, 1 NVL, 2 NVB, 3 C2C, 4 PIX, 5 PXB, 6 P2C, 7 PXN, 8 PHB, 9 SYS, 10 NET.
    """

    bw_intra: float
    """Bandwidth of one channel inside a node, GB/s."""
    bw_inter: float
    """Bandwidth of one channel between nodes, GB/s."""
    channels: int
    type_intra: int
    """Worst path type inside a node."""
    type_inter: int
    """Worst path type to the network device."""
    latency_inter: float
    """Latency the network device adds between nodes, us."""
    same_channels: bool
    """Every channel visits the ranks in the same order."""

    def __post_init__(self) -> None:
        """Raise ValueError on a number out of range."""
        for name, value in vars(self).items():
            most = nccl.PATH_NET if name.startswith("type_") else sys.float_info.max
            if not 0 <= value <= most:
                raise ValueError(f"{name} is {value}; it must be from 0 to {most:g}")


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """What NCCL's cost model knows about a communicator."""

    nodes: int
    ranks: int
    compute_capability: int
    """The lowest of its GPUs', times ten: 90 for Hopper."""
    cpu_vendor: str
    """One of ``CPU_VENDORS``."""
    nvswitches: int
    collnet: bool
    """CollNet is enabled and can reduce the data."""
    nvls: bool
    tree_pattern_is_tree: bool
    """The trees are NCCL's plain TREE, which sends and receives through one GPU, on at least one node."""
    graphs: Mapping[Algorithm, Graph]
    """One per algorithm."""
    channels: int | None = None
    """The communicator's channels; None: the fewer of ring's and tree's."""
    nvls_channels: int | None = None
    """Channels of NVLS; None: its graph's."""
    collnet_heads: int | None = None
    """GPUs of a node that talk to the CollNet; None: one per CollNet direct channel, at most all of them."""
    collnet_chain: bool = True
    """CollNet chain can be set up."""
    collnet_all_gather: bool = False
    """The CollNet plugin implements all-gather."""
    collnet_reduce_scatter: bool = False
    """The CollNet plugin implements reduce-scatter."""

    def __post_init__(self) -> None:
        """Raise ValueError on counts that cannot be, an unknown CPU vendor, or a graph that is missing."""
        if not 1 <= self.nodes <= self.ranks:
            raise ValueError(f"{self.ranks} ranks on {self.nodes} nodes; each node needs at least one")
        if self.cpu_vendor not in CPU_VENDORS:
            raise ValueError(f"cpu_vendor is {self.cpu_vendor!r}; it must be one of {', '.join(CPU_VENDORS)}")
        if missing := [a.name.lower() for a in Algorithm if a not in self.graphs]:
            raise ValueError(f"graphs lacks {', '.join(missing)}; it must hold every algorithm")
        if (fewest := min(self.graphs[_RING].channels, self.graphs[_TREE].channels)) < 1:
            raise ValueError(f"the ring or the tree graph has {fewest} channels; each needs at least 1")

    @property
    def most_local_ranks(self) -> int:
        """Ranks on the fullest node, taking them as spread evenly."""
        return -(-self.ranks // self.nodes)

    @property
    def heads(self) -> int:
        """GPUs of a node that talk to the CollNet, given or assumed."""
        return self.collnet_heads or max(1, min(self.graphs[_DIRECT].channels, self.most_local_ranks))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What NCCL does on its own for a batch of collectives; every array has the batch's shape."""

    algorithm: Int64
    protocol: Int64
    time_us: Float32
    channels: Int64
    warps: Int64


class Belief:
    """NCCL's cost model of one communicator.

    ``latency_us`` and ``bandwidth_gbps`` are float32 [5, 7, 3], by (collective, algorithm, protocol); both
    are 0 where the communicator has no such pair. ``bandwidth_gbps`` is algorithm bandwidth: bytes over time.
    ``max_threads`` is int64 [7, 3]; 0 where NCCL sets none, PAT included. ``thread_bytes`` is int64 [7, 3], the
    bytes that make one more thread worth it. With one rank nothing has a bandwidth, and the cost table offers
    only ring/simple, at 0 us.
    """

    def __init__(self, communicator: Communicator) -> None:
        """Compute the tables."""
        self.communicator: Final = (comm := communicator)
        ring, tree = comm.graphs[_RING], comm.graphs[_TREE]
        self.channels: Final = comm.channels or min(ring.channels, tree.channels)
        self.nvls_channels: Final = comm.nvls_channels or comm.graphs[_NVLS].channels
        self.bandwidth_gbps: Final = _bandwidth_gbps(comm)
        self.latency_us: Final = np.where(self.bandwidth_gbps > 0, _latency_us(comm), np.float32(0))
        self.max_threads: Final = nccl.THREADS.copy()
        if np.float32(ring.bw_intra) * np.float32(ring.channels) <= nccl.PCI_GBPS:
            self.max_threads[_RING, _SIMPLE] = nccl.PCI_RING_THREADS
        self.thread_bytes: Final = nccl.THREAD_BYTES.copy()
        self.thread_bytes[_RING, Protocol.LL] *= comm.ranks
        self._offered: Final = self.bandwidth_gbps > 0
        self._offered[:, [_DIRECT, _CHAIN]] &= comm.most_local_ranks <= nccl.MAX_DIRECT_ARITY + 1
        self._offered[:, [_NVLS, _NVLS_TREE]] &= comm.nvls
        self._offered[:_ALL_REDUCE, _NVLS] &= comm.most_local_ranks <= nccl.MAX_NVLS_ARITY

    def cost_table_us(self, collective: ArrayLike, size_bytes: ArrayLike, pipe_ops: ArrayLike = 1) -> Float32:
        """Predicted time of every (algorithm, protocol), as NCCL hands it to a tuner plugin.

        ``collective`` holds ``Collective`` numbers, ``size_bytes`` the size NCCL gives the tuner (the larger
        of a rank's send and receive buffers), ``pipe_ops`` how many operations are aggregated; the three
        broadcast together to a batch shape. Returns float32 [*batch, 7, 3] in us, -1 where the pair is not
        available. Raises ValueError for a number that is no collective, a negative size, or pipe_ops below 1.

        Source: updateCollCostTable in src/enqueue.cc, ncclTopoGetAlgoTime in src/graph/tuning.cc.
        """
        collectives, sizes, operations = _batch(collective, size_bytes, pipe_ops)
        comm = self.communicator
        bandwidth, latency = self.bandwidth_gbps[collectives], self.latency_us[collectives]
        all_reduce = collectives == _ALL_REDUCE

        # -1 below 64 B, where the correction does not reach.
        log_size = np.frexp((sizes >> 6).astype(np.float64))[1] - 1
        correction = nccl.TREE_CORRECTION.T[np.clip(log_size, 0, nccl.NVLS_TREE_CORRECTION_SIZES - 1)]
        corrected = {_TREE: nccl.TREE_CORRECTION_SIZES}
        if comm.compute_capability >= 100 and comm.cpu_vendor not in ("arm", "power"):
            corrected[_NVLS_TREE] = nccl.NVLS_TREE_CORRECTION_SIZES
        for algorithm, n_sizes in corrected.items():
            applies = all_reduce & (log_size >= 0) & (log_size < n_sizes)
            bandwidth[..., algorithm, :] *= np.where(applies[..., None], correction, np.float32(1))

        if comm.nodes > 1:
            ring = latency[..., _RING, _SIMPLE]
            plateau = all_reduce & (sizes >= nccl.PLATEAU_BYTES * self.channels * comm.ranks)
            factor = nccl.PLATEAU_FACTOR[int(comm.compute_capability >= 80)]
            latency[..., _RING, _SIMPLE] = np.where(plateau, _double(ring) * factor, ring)

        batches = -(-operations // nccl.COLLECTIVES_PER_BATCH)
        count = np.where(np.arange(N_ALGORITHMS) == _RING, operations[..., None], batches[..., None])
        moved = np.broadcast_to(sizes.astype(np.float32)[..., None, None], bandwidth.shape)
        offered = self._offered[collectives]
        moving = np.divide(moved, np.float32(1000) * bandwidth, out=np.zeros_like(bandwidth), where=offered)
        table = np.where(offered, latency * count.astype(np.float32)[..., None] + moving, np.float32(-1))
        if comm.ranks == 1:
            table[..., _RING, _SIMPLE] = 0
        return table

    def choose(self, collective: ArrayLike, size_bytes: ArrayLike, pipe_ops: ArrayLike = 1) -> Choice:
        """What NCCL picks without a tuner: the cheapest pair, the first in table order on a tie.

        Takes and raises what ``cost_table_us`` does, and ValueError where none is available and NCCL fails.
        Source: topoGetAlgoInfo in src/enqueue.cc.
        """
        collectives, sizes, operations = _batch(collective, size_bytes, pipe_ops)
        table = self.cost_table_us(collectives, sizes, operations)
        flat = np.where(table >= 0, table, np.float32(np.inf)).reshape(*sizes.shape, -1)
        pair, time = flat.argmin(-1), flat.min(-1)
        if np.isinf(time).any():
            raise ValueError("no algorithm is available: every bandwidth is 0; the ring graph must have some")
        algorithm, protocol = np.divmod(pair, N_PROTOCOLS)
        channels, warps = self.channels_and_warps(sizes, algorithm, protocol)
        return Choice(algorithm=algorithm, protocol=protocol, time_us=time, channels=channels, warps=warps)

    def channels_and_warps(
        self, size_bytes: ArrayLike, algorithm: ArrayLike, protocol: ArrayLike
    ) -> tuple[Int64, Int64]:
        """The most channels NCCL will use, and warps per channel, for a pair that it chose or a tuner forced.

        The collective does not matter to NCCL here. A tuner's own channel count replaces the channels
        afterwards and leaves the warps. The three arguments broadcast together; both results, int64, have
        that shape. A pair that is not available gets the numbers that NCCL would compute for it.

        Source: topoGetAlgoInfo in src/enqueue.cc.
        """
        sizes, algorithms, protocols = _broadcast(size_bytes, algorithm, protocol)
        threads = self.max_threads[algorithms, protocols]
        thread_bytes = self.thread_bytes[algorithms, protocols]
        direct = algorithms == _DIRECT
        nvls = (algorithms == _NVLS) | (algorithms == _NVLS_TREE)

        # PAT has no thread limit, so no size is too small for all channels.
        per_channel = threads * thread_bytes
        channels = np.clip(sizes // np.maximum(per_channel, 1), 1, self.channels)
        channels = np.where(per_channel > 0, channels, self.channels)
        for _ in range(4):  # 512 to 64 takes three halvings and 640 to 320 one.
            starved = (sizes < channels * threads * thread_bytes) & (threads % 128 == 0) & ~nvls & ~direct
            threads = np.where(starved, threads // 2, threads)

        fed = np.searchsorted(self._direct_bytes(), sizes, "right")
        channels = np.where(direct, np.clip(fed, 1, self.channels), channels)
        capped = (algorithms == _NVLS) & (self.communicator.nodes > 1)
        channels = np.where(nvls, self.nvls_channels, channels)
        channels = np.where(capped, np.minimum(channels, self.channels), channels)

        # One more warp for ring's synchronisation; tree and PAT always run full blocks.
        threads = threads + nccl.WARP_SIZE * ((algorithms == _RING) & (protocols == _SIMPLE))
        threads = np.where((algorithms == _TREE) | (algorithms == _PAT), nccl.MAX_THREADS, threads)
        return channels, np.maximum(threads // nccl.WARP_SIZE, 3)

    def _direct_bytes(self) -> Int64:
        """Least bytes for which CollNet direct keeps 1, 2, ... channels, ascending; int64 [channels].

        NCCL drops channels one at a time and halves the bytes per thread at 24, 12, 6 and 3 of them.
        """
        channels = np.arange(1, self.channels + 1)
        passed = sum((channels < at) & (at <= self.channels) for at in (24, 12, 6, 3))
        threads = self.max_threads[_DIRECT, _SIMPLE] * self.communicator.heads
        return np.asarray(channels * threads * (self.thread_bytes[_DIRECT, _SIMPLE] >> passed), np.int64)


def _broadcast(*arguments: ArrayLike) -> tuple[Int64, ...]:
    return np.broadcast_arrays(*(np.asarray(a, np.int64) for a in arguments))


def _batch(collective: ArrayLike, size_bytes: ArrayLike, pipe_ops: ArrayLike) -> tuple[Int64, ...]:
    """The arguments as int64 arrays of one shape; ValueError if one is out of range."""
    batch = _broadcast(collective, size_bytes, pipe_ops)
    limits = (("collective", 0, N_COLLECTIVES - 1), ("size_bytes", 0, 2**63 - 1), ("pipe_ops", 1, 2**31 - 1))
    for (name, least, most), values in zip(limits, batch, strict=True):
        if (wrong := values[(values < least) | (values > most)]).size:
            raise ValueError(f"{name} holds {wrong.flat[0]}; it must be from {least} to {most}")
    return batch


def _double(x: ArrayLike) -> NDArray[np.float64]:
    """Promote to double precision; storing the result in a float32 array rounds as NCCL's assignment does."""
    return np.asarray(x, np.float64)


def _steps(comm: Communicator) -> Float32:
    """Steps around the ring, and how many of them cross nodes (0 in rooted ones), float32 [2, 5]."""
    r, n = comm.ranks, comm.nodes
    return np.array([[r, r, r - 1, r - 1, 2 * (r - 1)], [0, 0, n - 1, n - 1, 2 * (n - 1)]], np.float32)


def _bandwidth_gbps(comm: Communicator) -> Float32:
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
    ring_share = (comm.ranks / _double(_steps(comm)[0])).astype(single)
    graphs = [comm.graphs[a] for a in Algorithm]
    channels, intra, inter = np.array([[g.channels, g.bw_intra, g.bw_inter] for g in graphs], single).T
    bus = channels * (intra if comm.nodes <= 2 else inter)

    at, wide = _double(bus[_RING]), _double(channels[_RING])
    ll128_max = wide * nccl.RING_LL128_MAX_GBPS[generation, size]
    ring = np.array([min(ll_max, at / 2), min(at * 0.92, ll128_max), at], single)
    gbps[:, _RING] = ring * ring_share[:, None]

    wide = _double(channels[_TREE])
    at = _double(single(min(_double(bus[_TREE]) * 0.92, wide * nccl.TREE_MAX_GBPS[generation, size])))
    ll128_max = wide * nccl.TREE_LL128_MAX_GBPS[generation, size]
    payload = 7 / 9 if comm.nodes == 1 else 120 / 128
    tree = np.array([min(at / 3.8, ll_max), min(at * payload, ll128_max), at], single)
    if comm.tree_pattern_is_tree:
        tree = (_double(tree) * 0.85).astype(single)
    gbps[_ALL_REDUCE, _TREE] = tree * single(0.5)

    if comm.compute_capability >= 60 and comm.nodes == comm.ranks:
        gbps[_SCATTERED, _PAT, _SIMPLE] = _double(bus[_PAT]) * 0.75

    # Across nodes CollNet must implement the collective, and each rank of a node needs a head of its own.
    scattered = np.array([comm.collnet_all_gather, comm.collnet_reduce_scatter])
    scattered = (scattered & comm.collnet & (comm.most_local_ranks <= comm.heads)) | (comm.nodes == 1)

    gbps[_ALL_REDUCE, _CHAIN, _SIMPLE] = channels[_CHAIN] * intra[_CHAIN] * single(0.5)
    if channels[_DIRECT]:
        gpus_per_nic = single(_double(per_node) / channels[_DIRECT])
        gpus_per_nic -= (gpus_per_nic - single(1)) / single(2)
        direct = channels[_DIRECT] * intra[_DIRECT] / gpus_per_nic
        if comm.compute_capability >= 90:
            direct = single(_double(direct) * 0.85)
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


def _latency_us(comm: Communicator) -> Float32:
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
    served = 2 * (_double(min(1, local - 1) * intra[_DIRECT]) + (local - 1) * 0.4)
    latency[:, _DIRECT] = _double(base[_DIRECT]) + served + inter[_DIRECT]
    latency[:, _CHAIN] += 2 * (local - 1) * intra[_CHAIN] + inter[_CHAIN]
    latency[:, _NVLS] = intra[_NVLS] + (inter[_NVLS] if nodes > 1 else np.float32(0))
    latency[:, _NVLS_TREE] += intra[_NVLS_TREE] + 2 * hops * inter[_NVLS_TREE]
    latency[:, _PAT] = _double(base[_PAT]) + (hops * (_double(inter[_PAT]) / 3.5) + comm.ranks * 2.8)
    return latency


_flag: Final = {"0": False, "1": True}.__getitem__
_Columns = dict[str, Callable[[str], Any]]
_COMMUNICATOR_COLUMNS: Final[_Columns] = {
    **dict.fromkeys(("nodes", "ranks", "compcap", "nvswitches"), int),
    **dict.fromkeys(("collnet", "nvls", "tree_pattern_is_tree"), _flag),
    "cpu_vendor": str,
}
_GRAPH_COLUMNS: Final[_Columns] = {
    **dict.fromkeys(("bw_intra", "bw_inter", "latency_inter"), float),
    **dict.fromkeys(("channels", "type_intra", "type_inter"), int),
    "same_channels": _flag,
}
_COLUMNS: Final = ("case", "algo", *_COMMUNICATOR_COLUMNS, *_GRAPH_COLUMNS)
_ALGORITHMS: Final = {a.name.lower(): a for a in Algorithm}


def read_cases(path: Path) -> dict[str, Communicator]:
    """Communicators by name from a CSV with one row per (case, algorithm), in the file's order.

    Raises ValueError, naming the file and the case, for a missing column or value, one that does not parse,
    an algorithm that is unknown, missing or repeated, rows that disagree, or a communicator that cannot be.
    """
    cases: dict[str, list[dict[str, str]]] = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file, restval="")
        if missing := [c for c in _COLUMNS if c not in (reader.fieldnames or ())]:
            raise ValueError(f"{path}: no column {', '.join(missing)}; the columns are {','.join(_COLUMNS)}")
        for row in reader:
            cases.setdefault(row["case"], []).append(row)
    communicators = {}
    for case, rows in cases.items():
        try:
            communicators[case] = _communicator(rows)
        except ValueError as error:
            raise ValueError(f"{path}, case {case!r}: {error}") from error
    return communicators


def _communicator(rows: list[dict[str, str]]) -> Communicator:
    names = [row["algo"] for row in rows]
    if sorted(names) != sorted(_ALGORITHMS):
        raise ValueError(f"algo is {','.join(names)}; it must be each of {','.join(_ALGORITHMS)} once")
    shared, *others = (_parse(row, _COMMUNICATOR_COLUMNS) for row in rows)
    if wrong := [other for other in others if other != shared]:
        raise ValueError(f"rows have {shared} and {wrong[0]}; they must agree")
    graphs = {_ALGORITHMS[row["algo"]]: Graph(**_parse(row, _GRAPH_COLUMNS)) for row in rows}
    return Communicator(compute_capability=shared.pop("compcap"), graphs=graphs, **shared)


def _parse(row: Mapping[str, str], columns: _Columns) -> dict[str, Any]:
    fields = {}
    for column, kind in columns.items():
        try:
            fields[column] = kind(row[column])
        except (ValueError, KeyError):
            valid = {int: "a whole number", float: "a number"}.get(kind, "0 or 1")  # type: ignore[call-overload]
            raise ValueError(f"{column} is {row[column]!r}; it must be {valid}") from None
    return fields


def write_belief(cases: Path, out: Path) -> None:
    """Write ``latbw.csv`` and ``choice.csv`` for the communicators in ``cases`` into the directory ``out``.

    ``latbw.csv`` has a row per available (collective, algorithm, protocol). ``choice.csv`` has one per
    collective, pipe_ops of 1 and 4, and power of two from 64 B to 4 GiB, without those where CollNet direct
    wins. Raises what ``read_cases`` does.
    """
    latbw = ["case,collective,algo,proto,max_threads,latency_us,bandwidth_GBps"]
    choice = ["case,collective,bytes,pipe_ops,algo,proto,time_us,channels,warps"]
    pairs = [[f"{a},{p.name.lower()}" for p in Protocol] for a in _ALGORITHMS]
    sizes = 1 << np.arange(6, 33)
    for case, communicator in read_cases(cases).items():
        belief = Belief(communicator)
        for collective in Collective:
            start = f"{case},{collective.name.lower().replace('_', '')}"
            latency, gbps = belief.latency_us[collective], belief.bandwidth_gbps[collective]
            for a, p in np.argwhere(gbps > 0):
                threads = belief.max_threads[a, p]
                latbw.append(f"{start},{pairs[a][p]},{threads},{latency[a, p]:g},{gbps[a, p]:g}")
            for ops in (1, 4):
                best = belief.choose(collective, sizes, ops)
                columns = (best.algorithm, best.protocol, best.time_us, best.channels, best.warps)
                for size, a, p, time, channels, warps in zip(sizes, *columns, strict=True):
                    if a != _DIRECT:
                        choice.append(f"{start},{size},{ops},{pairs[a][p]},{time:g},{channels},{warps}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "latbw.csv").write_text("\n".join(latbw) + "\n")
    (out / "choice.csv").write_text("\n".join(choice) + "\n")
