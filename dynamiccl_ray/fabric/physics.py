"""What happens: a small physical model of what a collective costs on a cluster, for every action at once.

It is the other half of ``dynamiccl_ray.fabric.belief``: NCCL's own cost model decides what NCCL does, this decides how
long that takes. The two differ for physical reasons: real latencies of a hop that NCCL has one constant for, a thread
block or a TCP stream that cannot fill a link alone, devices that several channels or two children of a tree share,
the cost of starting channels, a pipeline that has to fill. First version, not calibrated; chunk sizes and threads are
NCCL's own and are not priced.

Times are in us, sizes in bytes, bandwidths in GB/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamiccl_ray.fabric.cluster_config import Cluster, PerProtocol
from dynamiccl_ray.knobs import (
    CHANNEL_VALUES,
    N_ALGORITHMS,
    N_PAIRS,
    N_PROTOCOLS,
    OWN_PAIR,
    Algorithm,
    Collective,
)

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

# Share of the wire that is payload: LL stores 4 bytes of data with 4 of flag, LL128 120 with 8 (Hu et al. 2025,
# "Demystifying NCCL").
WIRE_EFFICIENCY: Final = np.array([1 / 2, 120 / 128, 1.0])[:, None]
# Bytes that NCCL moves between two handshakes: an eighth of each protocol's buffer (src/include/device.h, NCCL_STEPS).
OWN_CHUNK_BYTES: Final = np.array([16384, 460800, 524288])
# A tree's thread block reduces upwards and broadcasts downwards with half of its threads each, so it moves less than a
# ring's: 0.57 to 0.74 of it over one channel of p5en at 1 GiB (data/measured/aws_p5en_allreduce_nchannels.csv).
TREE_ENGINE_SHARE: Final = 0.6
# GB/s to bytes per us.
_BYTES_PER_US: Final = 1e3

_AR, _AG, _RS = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER


@dataclass(frozen=True, kw_only=True)
class Load:
    """What others leave of the network; of the links inside a node where there is only one node."""

    link_bandwidth: float = 1.0
    """Share of a link's bandwidth that is left, above 0."""
    latency: float = 1.0
    """Factor on the latency of a hop, above 0."""

    def __post_init__(self) -> None:
        """Raise ValueError on a factor that is not above 0 and finite."""
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; it must be above 0, 1 for no change")


IDLE: Final = Load()


def _column(values: PerProtocol) -> Float64:
    """(3, 1), to broadcast with (K, 3, C)."""
    return np.array([[values.ll], [values.ll128], [values.simple]])


class Physics:
    """The times of collectives over all GPUs of some nodes of a cluster."""

    def __init__(self, cluster: Cluster, nodes: int) -> None:
        """Raises ValueError for more nodes than the cluster has a network for, or fewer than two GPUs."""
        self.cluster: Final = cluster
        self.belief: Final = cluster.nccl_belief(nodes)
        self.nodes: Final = nodes
        self.local: Final = cluster.gpus_per_node
        self.ranks: Final = nodes * cluster.gpus_per_node
        # Hops from the leaves of a binary tree over the nodes to its root.
        self._depth: Final = (nodes - 1).bit_length()

    def time_us(self, collective: Collective, nbytes: ArrayLike, load: Load = IDLE) -> Float64:
        """Times for sizes of shape (K,): (K, 22, 9) by pair and channels, as the action heads count them.

        Sizes are NCCL's: the full buffer for all-gather and reduce-scatter. Pair 0 with channels 0 is what NCCL
        itself chooses; a pair with channels 0 runs on the channels that NCCL gives it. NaN where the communicator
        has no such pair, where it has fewer channels, and for other channels of pair 0. Raises ValueError for a
        size below 1.
        """
        sizes = np.asarray(nbytes, np.int64)
        if sizes.ndim != 1 or np.any(sizes < 1):
            raise ValueError(f"sizes are {sizes}; expected a vector of bytes, each at least 1")
        shape = (len(sizes), N_ALGORITHMS, N_PROTOCOLS, len(CHANNEL_VALUES))
        channels = self._channels(sizes)
        grid = np.full(shape, np.nan)
        payload = sizes.astype(np.float64)[:, None, None]
        offered = self.belief.cost_table_us(collective, sizes) >= 0
        for algorithm, price in (
            (Algorithm.TREE, self._tree),
            (Algorithm.RING, self._ring),
            (Algorithm.NVLS, self._nvls),
            (Algorithm.NVLS_TREE, self._nvls_tree),
            (Algorithm.PAT, self._pat),
        ):
            if offered[:, algorithm].any():
                grid[:, algorithm] = price(collective, payload, channels[:, algorithm], load)
        grid = np.where(offered[..., None] & self._grantable(), grid, np.nan)
        times = np.full((len(sizes), N_PAIRS, len(CHANNEL_VALUES)), np.nan)
        times[:, OWN_PAIR + 1 :] = grid.reshape(len(sizes), N_PAIRS - 1, -1)
        choice = self.belief.choose(collective, sizes)
        chosen = OWN_PAIR + 1 + N_PROTOCOLS * choice.algorithm + choice.protocol
        times[:, OWN_PAIR, 0] = times[np.arange(len(sizes)), chosen, 0]
        return times

    def _channels(self, sizes: Int64) -> Float64:
        """(K, 7, 3, 9): channels that an action runs on; NCCL's own count where it asks for 0."""
        pairs = np.arange(N_ALGORITHMS * N_PROTOCOLS)
        own, _ = self.belief.channels_and_warps(sizes[:, None], pairs // N_PROTOCOLS, pairs % N_PROTOCOLS)
        grid = np.tile(np.array(CHANNEL_VALUES, np.float64), (len(sizes), N_ALGORITHMS, N_PROTOCOLS, 1))
        grid[..., 0] = np.maximum(1, own).reshape(len(sizes), N_ALGORITHMS, N_PROTOCOLS)
        return grid

    def _grantable(self) -> NDArray[np.bool_]:
        """(7, 1, 9): channel counts that NCCL would really use if asked."""
        comm = self.belief.communicator
        most = np.full(N_ALGORITHMS, comm.channels or 1)
        most[[Algorithm.NVLS, Algorithm.NVLS_TREE]] = comm.nvls_channels or 0
        # NCCL takes these counts as they stand, so the plugin never writes any.
        most[[Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN]] = 0
        if self.nodes > 1:
            most[Algorithm.NVLS] = 0
        return np.asarray(np.array(CHANNEL_VALUES) <= most[:, None, None], np.bool_)

    # ---- the parts ----

    def _intra_step_us(self, load: Load) -> Float64:
        factor = load.latency if self.nodes == 1 else 1.0
        return _column(self.cluster.intra.step_us) * factor

    def _inter_step_us(self, load: Load) -> Float64:
        if self.nodes == 1 or self.cluster.inter is None:
            return np.zeros((N_PROTOCOLS, 1))
        return _column(self.cluster.inter.step_us) * load.latency

    def _overhead_us(self, channels: Float64, inter_steps: float, *, posted: Float64 | None = None) -> Float64:
        """The launch, and what each further channel adds.

        A thread block per channel is started and waited for, and the proxy thread of a GPU posts the network steps
        of its channels one after the other (NCCL, src/proxy.cc): the overhead o and gap g of LogP (Culler et al.
        1993) paid per channel, which is why small messages suffer from many. ``posted`` is how many connections a
        GPU's proxy serves: its part of the channels, if not given.
        """
        post = self.cluster.inter.post_us if self.cluster.inter is not None else 0.0
        queued = (np.ceil(channels / self.local) if posted is None else posted) - 1
        return np.asarray(
            self.cluster.launch_us + self.cluster.channel_us * (channels - 1) + post * inter_steps * queued
        )

    def _us_per_byte(
        self, channels: Float64, load: Load, *, gpu: float, nic: float, engine: float | None = None
    ) -> Float64:
        """Time per byte of one channel's share of the message: the slowest of all that the byte passes.

        ``gpu`` and ``nic`` say how often each byte leaves a GPU and a node, ``engine`` how often the thread block
        moves it, ``gpu`` times if not given. Links are shared evenly by the channels on them and a device by
        ceil(channels / devices): the roofline of Williams, Waterman, Patterson (2009) over links, with max-min fair
        sharing (Bertsekas, Gallager 1992, section 6.5).
        """
        intra = self.cluster.intra
        left = load.link_bandwidth if self.nodes == 1 else 1.0
        worst = (gpu if engine is None else engine) / _column(intra.channel_gb_per_s)
        worst = np.maximum(worst, gpu * channels / (WIRE_EFFICIENCY * intra.gpu_gb_per_s * left))
        if intra.node_gb_per_s is not None:
            worst = np.maximum(worst, gpu * channels * self.local / (WIRE_EFFICIENCY * intra.node_gb_per_s * left))
        return np.asarray(np.maximum(worst, self._nic(channels, load, nic)) / _BYTES_PER_US)

    def _nic(self, channels: Float64, load: Load, crossings: float) -> Float64:
        """The network's part of ``_us_per_byte``, in ns per byte."""
        inter = self.cluster.inter
        if self.nodes == 1 or inter is None:
            return np.zeros_like(channels)
        on_one_nic = np.ceil(channels / inter.nics)
        shared = crossings * on_one_nic / (WIRE_EFFICIENCY * inter.nic_gb_per_s * load.link_bandwidth)
        return np.asarray(np.maximum(shared, crossings / _column(inter.channel_gb_per_s)))

    # ---- the algorithms ----

    def _ring(self, collective: Collective, payload: Float64, channels: Float64, load: Load) -> Float64:
        """Ring: 2(n-1) steps of N/n for all-reduce, n-1 for all-gather and reduce-scatter.

        Thakur, Rabenseifner, Gropp 2005, section 4: (n-1) a + (n-1)/n N b. Of the steps, every (n/m)-th crosses to
        another node of m, and each channel leaves a node once. Broadcast and reduce pass the message down the chain
        of n-1 hops in chunks: n-1 latencies, the message, and n-2 chunks until the last rank has its first (the
        pipelined linear broadcast of Barnett et al. 1993).
        """
        rounds = 2 if collective == _AR else 1
        inter_steps = rounds * (self.nodes - 1)
        intra_steps = rounds * (self.ranks - 1) - inter_steps
        latency = intra_steps * self._intra_step_us(load) + inter_steps * self._inter_step_us(load)
        fixed = self._overhead_us(channels, inter_steps) + latency
        share = payload / channels
        if collective in (_AR, _AG, _RS):
            turns = rounds * (self.ranks - 1) / self.ranks
            return np.asarray(fixed + share * self._us_per_byte(channels, load, gpu=turns, nic=turns))
        per_byte = self._us_per_byte(channels, load, gpu=1, nic=1)
        fill = (self.ranks - 2) * np.minimum(share, OWN_CHUNK_BYTES[:, None])
        return np.asarray(fixed + (share + fill) * per_byte)

    def _tree(self, collective: Collective, payload: Float64, channels: Float64, load: Load) -> Float64:
        """Double binary tree between nodes, a chain inside each: up to reduce, down to broadcast.

        Sanders, Speck, Traeff 2009: 2 a log m and, as every rank is an inner node of one tree only, 2 N b; used by
        NCCL 2.4 (Jeaugey 2019). An inner node sends to a parent and two children, a leaf to a parent, so that over
        the two trees each byte leaves a node twice; with two nodes there are no inner ones, and once. The pipeline
        fills with one chunk per hop.
        """
        assert collective == _AR
        hops = 2 * (self.local - 1 + self._depth)
        inter_steps = 2 * self._depth
        latency = (hops - inter_steps) * self._intra_step_us(load) + inter_steps * self._inter_step_us(load)
        per_byte = self._us_per_byte(
            channels, load, gpu=2, nic=2 if self.nodes > 2 else 1, engine=2 / TREE_ENGINE_SHARE
        )
        share = payload / channels
        fill = max(0, hops - 2) / 2 * np.minimum(share, OWN_CHUNK_BYTES[:, None])
        return np.asarray(self._overhead_us(channels, inter_steps) + latency + (share + fill) * per_byte)

    def _nvls(self, collective: Collective, payload: Float64, channels: Float64, load: Load) -> Float64:
        """NVLink SHARP on one node: the switch reduces what all GPUs hold and multicasts the result.

        Klenk et al. 2020: each GPU sends its N once, and the 1/g of the result that it multicasts, instead of a
        ring's 2(g-1)/g. All-gather only multicasts, reduce-scatter only reduces.
        """
        g = self.local
        phases, volume = (2, 1 + 1 / g) if collective == _AR else (1, (g - 1) / g)
        per_byte = self._switch_us_per_byte(channels, load, volume)
        assert self.cluster.nvls is not None
        latency = phases * self.cluster.nvls.step_us * load.latency
        return np.asarray(self._overhead_us(channels, 0) + latency + payload / channels * per_byte)

    def _nvls_tree(self, collective: Collective, payload: Float64, channels: Float64, load: Load) -> Float64:
        """NVLS inside each node and double binary trees between them, one 1/g of the message from each GPU.

        The hierarchy of Klenk et al. 2020 over the trees of ``_tree``: every channel has a connection per GPU, so
        that few channels fill all devices.
        """
        assert collective == _AR
        assert self.cluster.nvls is not None
        assert self.cluster.inter is not None
        inter_steps = 2 * self._depth
        crossings = 2 if self.nodes > 2 else 1
        latency = 2 * self.cluster.nvls.step_us + inter_steps * self._inter_step_us(load)
        connection = self._nic(channels * self.local, load, crossings / self.local) / _BYTES_PER_US
        inside = self._switch_us_per_byte(channels, load, 1 + 1 / self.local)
        per_byte = np.maximum(inside, connection)
        share = payload / channels
        fill = self._depth * np.minimum(share, OWN_CHUNK_BYTES[:, None]) * connection
        return np.asarray(self._overhead_us(channels, inter_steps, posted=channels) + latency + share * per_byte + fill)

    def _switch_us_per_byte(self, channels: Float64, load: Load, volume: float) -> Float64:
        nvls = self.cluster.nvls
        assert nvls is not None
        left = load.link_bandwidth if self.nodes == 1 else 1.0
        rate = np.minimum(nvls.channel_gb_per_s, nvls.gpu_gb_per_s * left / channels)
        return np.asarray(volume / rate / _BYTES_PER_US)

    def _pat(self, collective: Collective, payload: Float64, channels: Float64, load: Load) -> Float64:
        """Parallel aggregated trees, one GPU per node: all-gather and reduce-scatter in log n steps.

        Bruck et al. 1997: a ceil(log2 n) + (n-1)/n N b; NCCL 2.23 (Jeaugey 2025).
        """
        assert collective in (_AG, _RS)
        share = payload / channels
        turns = (self.ranks - 1) / self.ranks
        per_byte = self._us_per_byte(channels, load, gpu=0, nic=turns, engine=turns)
        latency = self._depth * self._inter_step_us(load)
        return np.asarray(self._overhead_us(channels, self._depth) + latency + share * per_byte)
