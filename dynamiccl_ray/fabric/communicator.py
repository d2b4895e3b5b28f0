"""What NCCL's cost model knows about a communicator."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dynamiccl_ray.fabric import nccl_constants as nccl
from dynamiccl_ray.knobs import Algorithm

# What cpu_vendor may be; all but arm and power are x86 to NCCL.
CPU_VENDORS: Final = ("intel", "amd", "zhaoxin", "mixed", "arm", "power")


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
class CommunicatorInfo:
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
        if (fewest := min(self.graphs[Algorithm.RING].channels, self.graphs[Algorithm.TREE].channels)) < 1:
            raise ValueError(f"the ring or the tree graph has {fewest} channels; each needs at least 1")

    @property
    def most_local_ranks(self) -> int:
        """Ranks on the fullest node, taking them as spread evenly."""
        return -(-self.ranks // self.nodes)

    @property
    def heads(self) -> int:
        """GPUs of a node that talk to the CollNet, given or assumed."""
        return self.collnet_heads or max(1, min(self.graphs[Algorithm.COLLNET_DIRECT].channels, self.most_local_ranks))
