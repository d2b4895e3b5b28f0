"""The cluster YAML of the emulated fabric: what the machines can do, and what NCCL believes they can do.

The two halves are apart on purpose: ``belief`` is what NCCL's topology search would find, everything else is what
``dynamiccl_ray.fabric.physics`` prices. Bandwidths are in one direction, in GB/s (1e9 bytes a second).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dynamiccl_ray.fabric.belief import Belief, Communicator, Graph
from dynamiccl_ray.knobs import Algorithm
from dynamiccl_ray.settings import Count, NotNegative, Positive, Section, read_yaml

IntraLink = Literal["nvlink", "pcie", "c2c"]
InterLink = Literal["ib", "roce", "efa", "slingshot", "tcp"]
CpuVendor = Literal["intel", "amd", "zhaoxin", "mixed", "arm", "power"]
PathType = Annotated[int, Field(ge=0, le=10)]


class PerProtocol(Section):
    """One number for each protocol of NCCL."""

    ll: Positive
    ll128: Positive
    simple: Positive


class IntraNode(Section):
    """The link between the GPUs of a node."""

    kind: IntraLink
    gpu_gb_per_s: Positive
    """What one GPU can send to the others, all channels together."""
    node_gb_per_s: Positive | None = None
    """What all GPUs of a node can send together, where they share a bus or the host's memory."""
    channel_gb_per_s: PerProtocol
    """Payload that one channel can move: its thread block, not the wire."""
    step_us: PerProtocol
    """From one GPU having the data to the next one having it, without the time the bytes take."""


class InterNode(Section):
    """The network between nodes."""

    kind: InterLink
    nics: Count
    """Devices per node."""
    nic_gb_per_s: Positive
    """What one device can send."""
    channel_gb_per_s: PerProtocol
    """Payload that one connection can move: a queue pair, or a TCP stream and the thread that copies for it."""
    step_us: PerProtocol
    """From a GPU to one of another node, without the time the bytes take."""
    post_us: NotNegative = 0.0
    """Work of the proxy thread of a GPU for one more channel in one step."""


class Nvls(Section):
    """Reduction and multicast inside the NVSwitch."""

    gpu_gb_per_s: Positive
    """What one GPU can pull or push through the switch, all channels together."""
    channel_gb_per_s: Positive
    """What one channel can."""
    step_us: Positive
    """One reduction or one multicast, barriers included."""


class GraphBelief(Section):
    """What NCCL's search would find for one algorithm."""

    channels: Count
    """Before NCCL doubles them."""
    intra_gb_per_s: Positive
    """One channel inside a node."""
    inter_gb_per_s: Positive | None = None
    """One channel between nodes; the same as inside, where absent."""
    inter_gb_per_s_beyond_2_nodes: Positive | None = None
    """The same, where more nodes share a device: NCCL halves a tree's there."""


class ClusterBelief(Section):
    """What NCCL knows, or thinks it knows, about the cluster when a communicator is created."""

    compute_capability: Annotated[int, Field(ge=60, le=120)]
    """Times ten: 90 for Hopper."""
    cpu_vendor: CpuVendor = "intel"
    nvswitches: Annotated[int, Field(ge=0)] = 0
    channels: Annotated[int, Field(ge=1, le=32)]
    """Of the communicator, after doubling and NCCL_MIN_NCHANNELS; the most that can be asked for."""
    nvls_channels: Annotated[int, Field(ge=1, le=32)] | None = None
    """Of NVLS and NVLS tree."""
    path_intra: PathType
    """Worst path between GPUs of a node: 1 NVL, 4 PIX, 5 PXB, 8 PHB, 9 SYS."""
    path_inter: PathType
    """Worst path to the network device, also 7 PXN."""
    nic_latency_us: NotNegative
    """What the network plugin reports; NCCL's socket and IB plugins say 0 and little more."""
    ring: GraphBelief
    tree: GraphBelief
    nvls: GraphBelief | None = None


class Cluster(Section):
    """Nodes that are alike, and the network between them."""

    name: str
    gpus_per_node: Annotated[int, Field(ge=1, le=16)]
    intra: IntraNode
    inter: InterNode | None = None
    """Absent: only one node can be played."""
    nvls: Nvls | None = None
    launch_us: Positive
    """From the call to the first byte, and from the last byte to the end of the kernel."""
    channel_us: NotNegative
    """One more channel: a thread block to start and to wait for."""
    belief: ClusterBelief

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.nvls is None) != (self.belief.nvls is None):
            raise ValueError("nvls and belief.nvls: give both or neither")
        if self.nvls is not None and self.belief.nvls_channels is None:
            raise ValueError("belief.nvls_channels is required where there is nvls")
        return self

    def nccl_belief(self, nodes: int) -> Belief:
        """NCCL's cost model of a communicator over all GPUs of ``nodes`` nodes.

        Raises ValueError for more nodes than the cluster has a network for, or fewer than two GPUs.
        """
        if nodes > 1 and self.inter is None:
            raise ValueError(f"cluster {self.name} has no network (inter), so nodes must be 1, not {nodes}")
        if nodes * self.gpus_per_node < 2:
            raise ValueError(f"{nodes} node of cluster {self.name} has one GPU; a collective needs two")
        believed = self.belief
        graphs = {a: self._graph(believed.ring, nodes) for a in Algorithm}
        graphs[Algorithm.TREE] = self._graph(believed.tree, nodes)
        graphs[Algorithm.NVLS] = graphs[Algorithm.NVLS_TREE] = self._graph(believed.nvls, nodes)
        return Belief(
            Communicator(
                nodes=nodes,
                ranks=nodes * self.gpus_per_node,
                compute_capability=believed.compute_capability,
                cpu_vendor=believed.cpu_vendor,
                nvswitches=believed.nvswitches,
                collnet=False,
                nvls=believed.nvls is not None,
                tree_pattern_is_tree=False,
                graphs=graphs,
                channels=believed.channels,
                nvls_channels=believed.nvls_channels,
            )
        )

    def _graph(self, graph: GraphBelief | None, nodes: int) -> Graph:
        inter = 0.0
        if graph is not None:
            inter = graph.inter_gb_per_s or graph.intra_gb_per_s
            if nodes > 2:
                inter = graph.inter_gb_per_s_beyond_2_nodes or inter
        return Graph(
            bw_intra=graph.intra_gb_per_s if graph else 0.0,
            bw_inter=inter,
            channels=graph.channels if graph else 0,
            type_intra=self.belief.path_intra,
            type_inter=self.belief.path_inter if nodes > 1 else 0,
            latency_inter=self.belief.nic_latency_us if nodes > 1 else 0.0,
            same_channels=True,
        )


def load_cluster(path: Path) -> Cluster:
    """Reads a cluster YAML. Raises ConfigError naming the file, the field, the value and what is valid."""
    return read_yaml(path, Cluster, "cluster")
