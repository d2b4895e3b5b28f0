"""What the emulated NCCL knows of each communicator: what NCCL itself would find out when it creates one.

The layout is ``emulated_nccl/constants.h``. NCCL's cost model of a communicator is its
:class:`~dynamiccl_ray.fabric.belief.Belief`; the rest has NCCL's own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from dynamiccl_ray.fabric import nccl_constants as nccl
from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.knobs import N_ALGORITHMS, N_COLLECTIVES, N_PROTOCOLS
from dynamiccl_ray.plugin_bridge.program import Comm

_MAGIC: Final = b"DCCLCNST"
_VERSION: Final = 1
_COLLNET, _NVLS, _X86, _DIRECT = 1, 2, 4, 8
_PAIRS: Final = (N_ALGORITHMS, N_PROTOCOLS)
_TUNER: Final = np.dtype(
    [
        ("base_latencies", "<f8", _PAIRS),
        ("hw_latencies", "<f8", (3, *_PAIRS)),
        *((name, "<f8", (4, 3)) for name in ("ll", "ring_ll128", "tree_ll128", "tree", "nvls_tree")),
    ]
)
_HEADER: Final = np.dtype(
    [("magic", "S8"), ("version", "<u4"), ("n_comms", "<u4"), ("file_bytes", "<u8"), ("tuner", _TUNER)]
)
_COMM: Final = np.dtype(
    [
        ("id", "<u8"),
        ("nodes_offset", "<u8"),
        *(
            (name, "<u4")
            for name in (
                *("ranks", "nodes", "present", "flags", "compute_capability", "channels", "nvls_channels"),
                *("p2p_channels", "p2p_channels_per_peer", "p2p_chunk_bytes"),
            )
        ),
        ("buffer_bytes", "<u4", (N_PROTOCOLS,)),
        *(
            (name, "<u4")
            for name in (
                *("nvls_heads", "nvls_chunk_bytes", "nvls_tree_chunk_bytes"),
                *("collnet_heads", "collnet_depth", "collnet_chain_depth", "net_devices"),
            )
        ),
        ("latency_us", "<f4", (N_COLLECTIVES, *_PAIRS)),
        ("gb_per_s", "<f4", (N_COLLECTIVES, *_PAIRS)),
        ("max_threads", "<i4", _PAIRS),
        ("thread_bytes", "<i4", _PAIRS),
    ]
)
assert (_HEADER.itemsize, _COMM.itemsize) == (24 + 144 * 8, 1104)

BUFFER_BYTES: Final = (512 << 10, 4_915_200, 4 << 20)
"""Per protocol; src/init.cc."""
_FIRST_ID: Final = 0xD1CC1


@dataclass(frozen=True, kw_only=True)
class Constants:
    """One communicator. What has no default here is worked out as NCCL does (src/init.cc, src/transport/nvls.cc)."""

    belief: Belief
    nodes: tuple[int, ...]
    """Of each rank."""
    present: int
    """Ranks that there are processes for."""
    id: int
    """NCCL's hash of the communicator."""
    p2p_channels: int
    p2p_channels_per_peer: int
    p2p_chunk_bytes: int
    buffer_bytes: tuple[int, int, int] = BUFFER_BYTES
    nvls_chunk_bytes: int = 128 << 10
    direct: bool = True
    """Ranks of a node reach each other's memory."""

    @classmethod
    def of(cls, comm: Comm, belief: Belief, **changes: Any) -> Self:
        """Of a program's communicator, with NCCL's defaults for what ``changes`` does not say.

        Raises ValueError where the belief is of another number of ranks or nodes.
        """
        n_nodes = len(set(comm.nodes))
        believed = belief.communicator
        if (believed.ranks, believed.nodes) != (comm.size, n_nodes):
            raise ValueError(
                f"communicator {comm.name!r} has {comm.size} ranks on {n_nodes} nodes, the belief of it "
                f"{believed.ranks} on {believed.nodes}"
            )
        channels = _power_of_two(belief.channels)
        per_peer = min(channels, 2 if n_nodes > 1 else 32)
        while n_nodes > 1 and per_peer > 1 and per_peer * -(-comm.size // 8) > channels:
            per_peer //= 2
        defaults: dict[str, Any] = {
            # NCCL numbers a communicator's nodes as it meets them.
            "nodes": tuple(list(dict.fromkeys(comm.nodes)).index(node) for node in comm.nodes),
            "present": len(comm.ranks),
            "id": _FIRST_ID + comm.number,
            "p2p_channels": channels,
            "p2p_channels_per_peer": per_peer,
            "p2p_chunk_bytes": 128 << 10 if n_nodes > 1 else 512 << 10,
        }
        return cls(belief=belief, **{**defaults, **changes})


def _power_of_two(n: int) -> int:
    """The least that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def write_constants(path: Path, comms: Mapping[int, Constants]) -> None:
    """Writes the file that EMULATED_NCCL names; ``comms`` by number of the program's communicators."""
    rows = np.zeros(max(comms) + 1, _COMM)
    offset = _HEADER.itemsize + rows.nbytes
    nodes = []
    for number, constants in comms.items():
        row = rows[number]
        row["nodes_offset"] = offset
        nodes.append(np.array(constants.nodes, "<u2").tobytes())
        offset += len(nodes[-1])
        _fill(row, constants)
    header = np.zeros((), _HEADER)
    header["magic"], header["version"], header["n_comms"] = _MAGIC, _VERSION, len(rows)
    header["file_bytes"] = offset
    tuner = header["tuner"]
    tuner["base_latencies"], tuner["hw_latencies"] = nccl.BASE_LATENCY_US, nccl.HARDWARE_LATENCY_US
    tuner["ll"], tuner["ring_ll128"] = nccl.LL_MAX_GBPS, nccl.RING_LL128_MAX_GBPS
    tuner["tree_ll128"], tuner["tree"] = nccl.TREE_LL128_MAX_GBPS, nccl.TREE_MAX_GBPS
    tuner["nvls_tree"] = nccl.NVLS_TREE_MAX_GBPS
    path.write_bytes(header.tobytes() + rows.tobytes() + b"".join(nodes))


def _fill(row: Any, constants: Constants) -> None:
    belief, comm = constants.belief, constants.belief.communicator
    local = comm.most_local_ranks
    heads = comm.heads
    values: dict[str, Any] = {
        "id": constants.id,
        "ranks": comm.ranks,
        "nodes": comm.nodes,
        "present": constants.present,
        "flags": (
            comm.collnet * _COLLNET
            | comm.nvls * _NVLS
            | (comm.cpu_vendor not in ("arm", "power")) * _X86
            | constants.direct * _DIRECT
        ),
        "compute_capability": comm.compute_capability,
        "channels": belief.channels,
        "nvls_channels": belief.nvls_channels,
        "p2p_channels": constants.p2p_channels,
        "p2p_channels_per_peer": constants.p2p_channels_per_peer,
        "p2p_chunk_bytes": constants.p2p_chunk_bytes,
        "buffer_bytes": constants.buffer_bytes,
        "nvls_heads": min(local, nccl.MAX_NVLS_ARITY),
        "nvls_chunk_bytes": constants.nvls_chunk_bytes,
        "nvls_tree_chunk_bytes": 64 << 10 if comm.nodes >= 4 else constants.nvls_chunk_bytes,
        "collnet_heads": heads,
        "collnet_depth": 2 if local > 1 else 1,
        "collnet_chain_depth": max(1, comm.ranks // comm.nodes),
        "net_devices": 1,
        "latency_us": belief.latency_us,
        "gb_per_s": belief.bandwidth_gbps,
        "max_threads": belief.max_threads,
        "thread_bytes": belief.thread_bytes,
    }
    for name, value in values.items():
        row[name] = value
