"""What happens: a physical model of what a collective costs on a cluster, for every configuration at once.

It is the other half of ``dynamiccl_ray.fabric.belief``: NCCL's own cost model decides what NCCL does, this decides how
long that takes. The two differ for physical reasons: real latencies of a hop that NCCL has one constant for, a thread
block or a TCP stream that cannot fill a link alone, devices that several channels share, the cost of starting
channels, a pipeline that has to fill, and what others do to the network.

One equation prices all algorithms, which differ in their ``Pattern`` (``dynamiccl_ray.fabric.patterns``):

    T = launch + channels + posts + L + B - overlap * min(L, B) + fill + chunks

L sums the hops' latencies (the alpha-beta model of Thakur, Rabenseifner, Gropp 2005), B is a channel's share of the
bytes over the slowest of all that it passes (the roofline of Williams, Waterman, Patterson 2009, with links shared
evenly: max-min fairness, Bertsekas, Gallager 1992, section 6.5). Times are in us, sizes in bytes, bandwidths in GB/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.cluster_config import Cluster, Group, PerProtocol
from dynamiccl_ray.fabric.corrections import Corrections
from dynamiccl_ray.fabric.load import IDLE, Load
from dynamiccl_ray.fabric.patterns import Pattern, pattern_of
from dynamiccl_ray.knobs import (
    CHANNEL_VALUES,
    N_ALGORITHMS,
    N_COLLECTIVES,
    N_PAIRS,
    N_PROTOCOLS,
    OWN_PAIR,
    Algorithm,
    Collective,
    Protocol,
)

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

# Share of the wire that is payload: LL stores 4 bytes of data with 4 of flag, LL128 120 with 8 (Hu et al. 2025,
# "Demystifying NCCL").
WIRE_EFFICIENCY: Final = np.array([1 / 2, 120 / 128, 1.0])
# Payload of one step of each protocol's buffer: an eighth of it (src/include/device.h, NCCL_STEPS), of LL half flags.
OWN_CHUNK_BYTES: Final = np.array([16384, 460800, 524288])
# NCCL starts some pairs on smaller chunks, so that small messages are some chunks long: least and most bytes, until a
# share is that many chunks (src/enqueue.cc, calcCollChunking, whose steps of two are smoothed here).
_SHRUNK: Final = {
    (Algorithm.TREE, Protocol.LL128): (32768, 460800),
    (Algorithm.COLLNET_DIRECT, Protocol.SIMPLE): (32768, 524288),
    (Algorithm.COLLNET_CHAIN, Protocol.SIMPLE): (32768, 262144),
    (Algorithm.NVLS, Protocol.SIMPLE): (16384, 131072),
    (Algorithm.NVLS_TREE, Protocol.SIMPLE): (16384, 131072),
}
_CHUNKS_OF_A_SHARE: Final = 8
# Payload of a whole buffer: no chunk can be larger than the half of it that one slice fills.
BUFFER_BYTES: Final = np.array([131072, 3686400, 4194304])
# NCCL gives a channel no less traffic than this, of which an all-reduce has twice its bytes (src/enqueue.cc,
# scheduleCollTasksToPlan). It counts whole channels; a fraction keeps more bytes from ever costing less.
CHANNEL_BYTES: Final = 16384
# Threads of a block at full size by protocol (src/graph/tuning.cc), and how what it moves grows with them: a copy loop
# has a fixed number of bytes in flight per thread, so bandwidth grows as threads do until the memory is saturated
# (Volkov 2010); the square root stands between the two.
FULL_THREADS: Final = np.array([512, 640, 512])
_THREAD_EXPONENT: Final = 0.5
# Bytes of a packet that is lost and sent again: the usual MTU of InfiniBand and of jumbo frames.
_PACKET_BYTES: Final = 4096
# GB/s to bytes per us.
_BYTES_PER_US: Final = 1e3
# Items priced at a time, so that what is in between stays in the cache.
_BLOCK: Final = 8192

_PER_NS: Final = 1 / _BYTES_PER_US


class Physics:
    """The times of collectives over all GPUs of some nodes of a cluster."""

    def __init__(self, cluster: Cluster, nodes: int) -> None:
        """Raises ValueError for more nodes than the cluster has a network for, or fewer than two GPUs."""
        self.cluster: Final = cluster
        cluster.check(nodes)
        self.nodes: Final = nodes
        self.local: Final = cluster.gpus_per_node
        self.ranks: Final = nodes * cluster.gpus_per_node
        self._table: Final = _Table(cluster, nodes)
        self._corrections: Final = Corrections(cluster.corrections, nodes, self.local) if cluster.corrections else None

    @cached_property
    def belief(self) -> Belief:
        """What NCCL thinks of the same GPUs."""
        return self.cluster.nccl_belief(self.nodes)

    def price_us(
        self,
        collective: ArrayLike,
        nbytes: ArrayLike,
        algorithm: ArrayLike,
        protocol: ArrayLike,
        channels: ArrayLike,
        *,
        threads: ArrayLike = 0,
        chunk_bytes: ArrayLike = 0,
        load: Load = IDLE,
    ) -> Float64:
        """Times of a batch of (collective, configuration) pairs; all arguments broadcast to its shape.

        ``nbytes`` is NCCL's size (the full buffer for all-gather and reduce-scatter), ``channels`` at least 1;
        ``threads`` of a block and ``chunk_bytes`` are NCCL's own where 0. NaN where the cluster has no such
        algorithm for the collective. Raises ValueError for a number out of range.
        """
        inputs, batch = self._inputs(collective, nbytes, algorithm, protocol, channels, threads, chunk_bytes, load)
        times = self._equations_us(inputs, batch)
        if self._corrections:
            times *= np.exp(self._corrections.log_ratio(collective, nbytes, algorithm, protocol, channels))
        return times

    def _equations_us(self, inputs: list[NDArray[Any]], batch: tuple[int, ...]) -> Float64:
        """``price_us`` without what the equations leave of measured times."""
        times = np.empty(batch)
        flat = times.reshape(-1)
        for start, stop in _blocks(flat.size):
            flat[start:stop] = self._price(*(x if x.size == 1 else x[start:stop] for x in inputs))
        return times

    def time_us(self, collective: Collective, nbytes: ArrayLike, load: Load = IDLE) -> Float64:
        """Times for sizes of shape (K,): (K, 22, 9) by pair and channels, as the action heads count them.

        Pair 0 with channels 0 is what NCCL itself chooses, as it was measured where the cluster knows; a pair with
        channels 0 runs on the channels that NCCL gives it. NaN where the communicator has no such pair, where it has
        fewer channels, and for other channels of pair 0. The load's fields are numbers, or of shape (K, 1). Raises
        ValueError for a size below 1.
        """
        sizes = np.asarray(nbytes, np.int64)
        if sizes.ndim != 1 or np.any(sizes < 1):
            raise ValueError(f"sizes are {sizes}; expected a vector of bytes, each at least 1")
        pairs = np.arange(N_ALGORITHMS * N_PROTOCOLS)
        algorithm, protocol = np.divmod(pairs, N_PROTOCOLS)
        offered = self.belief.cost_table_us(collective, sizes).reshape(len(sizes), -1) >= 0
        keys, columns, counts = np.nonzero(offered[:, :, None] & self.grantable()[algorithm])
        asked = np.array(CHANNEL_VALUES)[counts]
        own, _ = self.belief.channels_and_warps(sizes[:, None], algorithm, protocol)
        used = np.where(asked > 0, asked, np.maximum(1, own[keys, columns]))
        spread = Load(**{k: v if np.ndim(v) == 0 else np.asarray(v)[keys, 0] for k, v in vars(load).items()})
        times = np.full((len(sizes), N_PAIRS, len(CHANNEL_VALUES)), np.nan)
        times[keys, columns + 1, counts] = self.price_us(
            collective, sizes[keys], algorithm[columns], protocol[columns], used, load=spread
        )
        choice = self.belief.choose(collective, sizes)
        chosen = OWN_PAIR + 1 + N_PROTOCOLS * choice.algorithm + choice.protocol
        times[:, OWN_PAIR, 0] = times[np.arange(len(sizes)), chosen, 0]
        if self._corrections:
            measured = self._corrections.own_log_ratio(collective, sizes)
            if measured is not None:
                times[:, OWN_PAIR, 0] = self._fastest_us(collective, sizes, load) * np.exp(measured)
        return times

    def _fastest_us(self, collective: Collective, sizes: Int64, load: Load) -> Float64:
        """(K,) of all pairs on NCCL's own channels, by the equations: what NCCL's measured choice is held against."""
        algorithm, protocol = np.divmod(np.arange(N_ALGORITHMS * N_PROTOCOLS), N_PROTOCOLS)
        used, _ = self.belief.channels_and_warps(sizes[:, None], algorithm, protocol)
        inputs = self._inputs(collective, sizes[:, None], algorithm, protocol, np.maximum(1, used), 0, 0, load)
        return np.asarray(np.nanmin(self._equations_us(*inputs), 1))

    def link_shares(
        self,
        collective: ArrayLike,
        nbytes: ArrayLike,
        algorithm: ArrayLike,
        protocol: ArrayLike,
        channels: ArrayLike,
        *,
        load: Load = IDLE,
    ) -> dict[str, Float64]:
        """Share of a collective's time in which its links carry its bytes, from 0 to 1, by kind of link.

        ``gpu`` is what joins a node's GPUs (their own links, or the bus that they share), ``device`` a network device,
        ``uplink`` what a group of nodes shares. Takes and raises what ``price_us`` does; each array has the batch's
        shape, NaN where ``price_us`` is. A link near 1 is what the collective waits for.
        """
        inputs, batch = self._inputs(collective, nbytes, algorithm, protocol, channels, 0, 0, load)
        demand = self._demand(*(inputs[i] for i in (0, 1, 2, 3, 4)), *inputs[7:9])
        price = self._price(*inputs)
        carried = {"gpu": demand.links, "device": demand.device, "uplink": demand.uplink}
        return {
            name: np.broadcast_to(demand.share * rate * _PER_NS / price, max(price.shape, (1,))).reshape(batch)
            for name, rate in carried.items()
        }

    def grantable(self) -> NDArray[np.bool_]:
        """(7, 9): channel counts that NCCL would really use if asked, 0 included."""
        comm = self.belief.communicator
        most = np.full(N_ALGORITHMS, comm.channels or 1)
        most[[Algorithm.NVLS, Algorithm.NVLS_TREE]] = comm.nvls_channels or 0
        # NCCL takes these counts as they stand, so the plugin never writes any.
        most[[Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN]] = 0
        if self.nodes > 1:
            most[Algorithm.NVLS] = 0
        return np.asarray(np.array(CHANNEL_VALUES) <= most[:, None], np.bool_)

    def _inputs(
        self,
        collective: ArrayLike,
        nbytes: ArrayLike,
        algorithm: ArrayLike,
        protocol: ArrayLike,
        channels: ArrayLike,
        threads: ArrayLike,
        chunk_bytes: ArrayLike,
        load: Load,
    ) -> tuple[list[NDArray[Any]], tuple[int, ...]]:
        """What ``_price`` takes, each flat and of the batch's size or of size 1; and the batch's shape."""
        limits = (
            ("collective", collective, 0, N_COLLECTIVES - 1),
            ("nbytes", nbytes, 1, 2**62),
            ("algorithm", algorithm, 0, N_ALGORITHMS - 1),
            ("protocol", protocol, 0, N_PROTOCOLS - 1),
            ("channels", channels, 1, 64),
            ("threads", threads, 0, 1024),
            ("chunk_bytes", chunk_bytes, 0, 2**40),
        )
        for name, values, least, most in limits:
            _check(name, values, least, most)
        everything = [values for _, values, _, _ in limits] + list(vars(load).values())
        batch = np.broadcast_shapes(*(np.shape(x) for x in everything))
        return [_flat(x, batch) for x in everything], batch

    def _demand(
        self,
        collective: Int64,
        nbytes: Int64,
        algorithm: Int64,
        protocol: Int64,
        channels: Int64,
        intra_bandwidth: Float64,
        inter_bandwidth: Float64,
    ) -> _Demand:
        t = self._table
        index = (collective * N_ALGORITHMS + algorithm) * N_PROTOCOLS + protocol
        used = np.clip(nbytes * (2 / CHANNEL_BYTES), 1.0, channels)
        connections = used * t.connections[index]
        return _Demand(
            entry=index,
            used=used,
            share=nbytes / used,
            connections=connections,
            links=np.maximum(t.gpu[index], t.node[index]) * used / intra_bandwidth,
            device=t.device[index] * np.ceil(connections * t.per_nic) / inter_bandwidth,
            uplink=t.uplink[index] * used / inter_bandwidth,
        )

    def _price(
        self,
        collective: Int64,
        nbytes: Int64,
        algorithm: Int64,
        protocol: Int64,
        channels: Int64,
        threads: Int64,
        chunk_bytes: Int64,
        intra_bandwidth: Float64,
        inter_bandwidth: Float64,
        intra_latency: Float64,
        inter_latency: Float64,
        straggler: Float64,
        loss: Float64,
    ) -> Float64:
        """One block; every argument of its length, or of length 1."""
        cluster, t = self.cluster, self._table
        d = self._demand(collective, nbytes, algorithm, protocol, channels, intra_bandwidth, inter_bandwidth)
        index, used, share = d.entry, d.used, d.share
        full = FULL_THREADS[protocol]
        speed = np.where(threads > 0, (np.minimum(threads, full) / full) ** _THREAD_EXPONENT, 1.0) / straggler
        resent = loss * t.recovery[index]

        # ns per byte of a channel's share, by what could be the slowest of all that the byte passes.
        inside = np.maximum(t.engine[index] / speed, d.links)
        proxy = t.proxy[index] * np.ceil(d.connections * t.per_gpu) / speed
        near = np.maximum(np.maximum(d.device, proxy), t.connection[index])
        slowest = np.maximum(inside, np.maximum(near, d.uplink) + resent)
        moving = share * slowest * _PER_NS

        latency = (t.intra_us[index] * intra_latency + t.inter_us[index] * inter_latency) * straggler
        part = share / t.parts[index]
        own = np.clip(part / _CHUNKS_OF_A_SHARE, t.least_chunk[index], t.most_chunk[index])
        chunk = np.where(chunk_bytes > 0, np.minimum(chunk_bytes, BUFFER_BYTES[protocol] // 2), own)
        rounds = np.maximum(1.0, part / chunk)
        passing = t.fills[index] * inside + t.inter_fills[index] * np.maximum(inside, near + resent)
        passing += t.uplink_fills[index] * used / inter_bandwidth
        filling = np.minimum(part, chunk) * passing * _PER_NS
        fixed = (
            cluster.launch_us
            + cluster.channel_us * (used - 1)
            + t.post_us[index] * (np.ceil(d.connections * t.per_gpu) - 1)
            + t.chunk_us[index] * (rounds - 1) * straggler
        )
        return np.asarray(fixed + latency + moving - cluster.overlap * np.minimum(latency, moving) + filling)


class _Demand(NamedTuple):
    """What a batch asks of the links; rates in ns per byte of a channel's share."""

    entry: Int64
    """Into the table."""
    used: Float64
    """Channels."""
    share: Float64
    """Bytes of one."""
    connections: Float64
    """Out of a node."""
    links: Float64
    """Inside a node."""
    device: Float64
    uplink: Float64


class _Table:
    """The machine's numbers times the patterns' for every (collective, algorithm, protocol): (105,) each.

    NaN latencies mark what does not exist. Rates are in ns per byte of a channel's share.
    """

    def __init__(self, cluster: Cluster, nodes: int) -> None:
        patterns = [pattern_of(cluster, nodes, c, a) for c in Collective for a in Algorithm]
        intra, inter, nvls = cluster.intra, cluster.inter if nodes > 1 else None, cluster.nvls
        local = cluster.gpus_per_node
        self.per_nic: Final = 1 / inter.nics if inter else 1.0
        self.per_gpu: Final = 1 / local

        def each(field: str) -> Float64:
            """(35, 1)"""
            return np.array([[getattr(p or Pattern(), field)] for p in patterns], np.float64)

        none = np.zeros(N_PROTOCOLS)
        proto = {
            "intra_step": _row(intra.step_us),
            "inter_step": _row(inter.step_us) if inter else none,
            "copy": 1 / _row(intra.channel_gb_per_s),
        }
        exists = np.array([[np.nan if p is None else 0.0] for p in patterns])
        in_network = cluster.in_network.step_us if cluster.in_network else 0.0
        network_us = (
            each("inter_hops") * proto["inter_step"]
            + each("extra_hops") * cluster.topology.hop_us
            + each("in_network_hops") * in_network
            + np.array([[sum(h * g.step_us for h, g in _zip(p, "group_hops", cluster))] for p in patterns])
        )
        switch_us = each("switch_hops") * (nvls.step_us if nvls else 0.0)
        inside_us = exists + each("intra_hops") * proto["intra_step"] + switch_us
        # Only simple exists for what the switches do.
        only_simple = (each("switched") > 0) | (each("in_network_hops") > 0) | _is(patterns, Algorithm.PAT)
        inside_us = np.where(only_simple & (np.arange(N_PROTOCOLS) != Protocol.SIMPLE), np.nan, inside_us)
        self.intra_us: Final = inside_us.ravel()
        self.inter_us: Final = np.broadcast_to(network_us, inside_us.shape).ravel()

        switched = each("switched") / (nvls.channel_gb_per_s if nvls else 1.0)
        self.engine: Final = (each("copies") * proto["copy"] + switched).ravel()
        through = each("switched") / (nvls.gpu_gb_per_s if nvls else 1.0)
        self.gpu: Final = (each("out_of_gpu") / (WIRE_EFFICIENCY * intra.gpu_gb_per_s) + through).ravel()
        bus = intra.node_gb_per_s
        self.node: Final = (each("out_of_gpu") * local / (WIRE_EFFICIENCY * bus) if bus else 0 * self._ones()).ravel()
        crossing = each("out_of_node") / each("connections")
        nic = inter.nic_gb_per_s if inter else 1.0
        device = np.broadcast_to(each("stretch") / (WIRE_EFFICIENCY * nic), (len(patterns), N_PROTOCOLS))
        if inter and cluster.in_network:
            slower = 1 / min(nic, cluster.in_network.nic_gb_per_s)
            device = np.where(each("in_network_hops") > 0, slower, device)
        self.device: Final = (crossing * device).ravel()
        self.connection: Final = (crossing / (_row(inter.connection_gb_per_s) if inter else 1.0) * self._ones()).ravel()
        self.proxy: Final = (crossing / (_row(inter.proxy_gb_per_s) if inter else 1.0) * self._ones()).ravel()
        uplink = [[max([c / g.gb_per_s for c, g in _zip(p, "out_of_group", cluster)], default=0.0)] for p in patterns]
        self.uplink: Final = (np.array(uplink) / WIRE_EFFICIENCY).ravel()
        recovery = inter.recovery_us * _BYTES_PER_US / _PACKET_BYTES if inter else 0.0
        self.recovery: Final = (crossing * recovery / WIRE_EFFICIENCY).ravel()
        self.connections: Final = (each("connections") * self._ones()).ravel()
        self.parts: Final = (each("parts") * self._ones()).ravel()
        # LL and LL128 flag every line, so a thread block passes on what it has of a chunk; simple waits for all of it.
        self.fills: Final = (each("fills") * (np.arange(N_PROTOCOLS) == Protocol.SIMPLE)).ravel()
        self.inter_fills: Final = (each("inter_fills") * self._ones()).ravel()
        late = [[sum(f / g.gb_per_s for f, g in _zip(p, "group_fills", cluster))] for p in patterns]
        self.uplink_fills: Final = (np.array(late) / WIRE_EFFICIENCY).ravel()
        post = inter.post_us if inter else 0.0
        self.post_us: Final = ((each("inter_hops") + each("in_network_hops")) * post * self._ones()).ravel()
        chunks = np.tile(OWN_CHUNK_BYTES, (2, N_COLLECTIVES, N_ALGORITHMS, 1))
        for pair, bounds in _SHRUNK.items():
            chunks[:, :, *pair] = np.array(bounds)[:, None]
        self.least_chunk, self.most_chunk = chunks.reshape(2, -1)
        self.chunk_us: Final = (np.maximum(1, each("copies") * each("parts")) * _row(cluster.chunk_us)).ravel()

    @staticmethod
    def _ones() -> Float64:
        return np.ones((N_COLLECTIVES * N_ALGORITHMS, N_PROTOCOLS))


def _is(patterns: list[Pattern | None], algorithm: Algorithm) -> NDArray[np.bool_]:
    return np.asarray(np.arange(len(patterns))[:, None] % N_ALGORITHMS == algorithm, np.bool_)


def _zip(pattern: Pattern | None, field: str, cluster: Cluster) -> list[tuple[float, Group]]:
    values = () if pattern is None else getattr(pattern, field)
    return list(zip(values, cluster.groups, strict=False))


def _row(values: PerProtocol) -> Float64:
    """(3,), by protocol."""
    return np.array([values.ll, values.ll128, values.simple])


def _check(name: str, values: ArrayLike, least: int, most: int) -> None:
    numbers = np.asarray(values)
    if numbers.size and (numbers.min() < least or numbers.max() > most):
        wrong = numbers[(numbers < least) | (numbers > most)].flat[0]
        raise ValueError(f"{name} holds {wrong}; it must be from {least} to {most}")


def _flat(values: ArrayLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """One-dimensional and of the batch's size, or of size 1."""
    array = np.asarray(values)
    return array.reshape(-1) if array.size == 1 else np.broadcast_to(array, shape).reshape(-1)


def _blocks(n: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, _BLOCK):
        yield start, min(n, start + _BLOCK)
