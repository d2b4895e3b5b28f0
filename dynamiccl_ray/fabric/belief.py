"""What NCCL believes a collective costs: its own cost model, as arrays.

This reproduces NCCL 2.30.7 with no ``NCCL_*`` environment variable set: the latency and bandwidth of every
(collective, algorithm, protocol) from src/graph/tuning.cc (``speeds.py``), and the cost table, the choice, the
channels and the warps from src/enqueue.cc. It is what a tuner plugin is handed and what NCCL does without one. It says
nothing about how long a collective really takes.

Assumed where NCCL looks at the call: a sum, of a data type that CollNet and NVLS can reduce and that is not
fp8; and of the machine: GPUs of one compute capability, CUDA 12 or newer, a host network device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from dynamiccl_ray.arrays import Float32, Int64
from dynamiccl_ray.fabric import nccl_constants as nccl
from dynamiccl_ray.fabric.communicator import CommunicatorInfo
from dynamiccl_ray.fabric.speeds import bandwidth_gbps, double, latency_us
from dynamiccl_ray.knobs import N_ALGORITHMS, N_COLLECTIVES, N_PROTOCOLS, Algorithm, Collective, Protocol

_ALL_REDUCE, _RING, _TREE = Collective.ALL_REDUCE, Algorithm.RING, Algorithm.TREE
_DIRECT, _CHAIN = Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN
_NVLS, _NVLS_TREE, _PAT = Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.PAT
_SIMPLE = Protocol.SIMPLE


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

    def __init__(self, communicator: CommunicatorInfo) -> None:
        """Compute the tables."""
        self.communicator: Final = (comm := communicator)
        ring, tree = comm.graphs[_RING], comm.graphs[_TREE]
        self.channels: Final = comm.channels or min(ring.channels, tree.channels)
        self.nvls_channels: Final = comm.nvls_channels or comm.graphs[_NVLS].channels
        self.bandwidth_gbps: Final = bandwidth_gbps(comm)
        self.latency_us: Final = np.where(self.bandwidth_gbps > 0, latency_us(comm), np.float32(0))
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
            latency[..., _RING, _SIMPLE] = np.where(plateau, double(ring) * factor, ring)

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
