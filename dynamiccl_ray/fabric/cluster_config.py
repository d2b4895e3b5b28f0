"""The cluster YAML of the emulated fabric: what the machines can do, and what NCCL believes they can do.

The two halves are apart on purpose: ``belief`` is what NCCL's topology search would find, everything else is what
``dynamiccl_ray.fabric.physics`` prices. Bandwidths are in one direction, in GB/s (1e9 bytes a second).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.communicator import CommunicatorInfo, Graph
from dynamiccl_ray.fabric.corrections import RatioCurve, usual_variant
from dynamiccl_ray.knobs import Algorithm
from dynamiccl_ray.settings import Count, NotNegative, Positive, Section, read_text, read_yaml

IntraLink = Literal["nvlink", "pcie", "c2c"]
InterLink = Literal["nvswitch", "ib", "roce", "efa", "slingshot", "tcp"]
TopologyClass = Literal["fat-tree", "torus", "hammingmesh"]
CpuVendor = Literal["intel", "amd", "zhaoxin", "mixed", "arm", "power"]
PathType = Annotated[int, Field(ge=0, le=10)]
Share = Annotated[float, Field(ge=0, le=1)]
Tier = Annotated[int, Field(ge=0, le=4)]


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
    tier: Tier
    """Of the network's nearest hop: 1 the same NVSwitch domain, 2 rack, 3 zone, 4 across data centres."""
    nics: Count
    """Devices per node."""
    nic_gb_per_s: Positive
    """What one device can send."""
    connection_gb_per_s: PerProtocol
    """Payload that one connection can move: a queue pair, or a TCP stream and the thread that copies for it."""
    proxy_gb_per_s: PerProtocol
    """Payload that the proxy of one GPU can move, over all its connections."""
    step_us: PerProtocol
    """From a GPU to one of another node, without the time the bytes take."""
    post_us: NotNegative = 0.0
    """Work of the proxy thread of a GPU for one more connection in one step."""
    recovery_us: NotNegative = 16.0
    """What one lost packet costs the connection that lost it."""


class Group(Section):
    """Nodes behind one uplink: a rack, a pod, a data centre. Groups follow each other in node order."""

    nodes: Count
    """Nodes in each."""
    tier: Tier
    """Of a hop that leaves the group."""
    gb_per_s: Positive
    """What one group can send to the others: below the sum of its devices where the network is oversubscribed."""
    step_us: NotNegative
    """Added to a hop that leaves the group."""


class NodeTopology(Section):
    """How the nodes' switches are connected, where that is not a fat-tree."""

    kind: TopologyClass = "fat-tree"
    dims: tuple[Count, ...] = ()
    """Nodes per dimension of a torus; of a HammingMesh: the sides of a board, then boards in each direction."""
    hop_us: NotNegative = 0.0
    """What a hop through one more node, or one more switch, adds."""

    @model_validator(mode="after")
    def _shaped(self) -> Self:
        wanted = {"fat-tree": "none", "torus": "2 or 3", "hammingmesh": "4"}[self.kind]
        if str(len(self.dims) or "none") not in wanted:
            raise ValueError(f"dims: {list(self.dims)} for {self.kind}; expected {wanted} of them")
        return self


class Nvls(Section):
    """Reduction and multicast inside the NVSwitch."""

    gpu_gb_per_s: Positive
    """What one GPU can pull or push through the switch, all channels together."""
    channel_gb_per_s: Positive
    """What one channel can."""
    step_us: Positive
    """One reduction or one multicast, barriers included."""


class InNetwork(Section):
    """Aggregation in the network's switches: SHARP, or a programmable switch that NCCL reaches as CollNet."""

    nic_gb_per_s: Positive
    """Payload that one device can have aggregated."""
    step_us: Positive
    """Up to the switch that holds all contributions, and down again."""


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
    collnet: GraphBelief | None = None


class Cluster(Section):
    """Nodes that are alike, and the network between them."""

    name: str
    gpus_per_node: Annotated[int, Field(ge=1, le=72)]
    sms: Count
    """Streaming multiprocessors of a GPU: each channel of a collective takes one from the computation."""
    intra: IntraNode
    inter: InterNode | None = None
    """Absent: only one node can be played."""
    groups: tuple[Group, ...] = ()
    """From the smallest up."""
    topology: NodeTopology = NodeTopology()
    nvls: Nvls | None = None
    in_network: InNetwork | None = None
    launch_us: Positive
    """From the call to the first byte, and from the last byte to the end of the kernel."""
    channel_us: NotNegative
    """One more channel: a thread block to start and to wait for."""
    chunk_us: PerProtocol
    """Handshake of one chunk on one channel."""
    overlap: Share = 0.5
    """How much of the shorter one of latency and transfer hides behind the longer one."""
    tree_share: Share = 0.6
    """What a tree's thread block moves of a ring's: half of its threads reduce upwards, half broadcast downwards."""
    belief: ClusterBelief
    corrections: tuple[RatioCurve, ...] = ()
    """What the equations leave of measured times, of a machine that was calibrated."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for name in ("nvls", "collnet"):
            real = self.nvls if name == "nvls" else self.in_network
            if (real is None) != (getattr(self.belief, name) is None):
                raise ValueError(
                    f"{'nvls' if name == 'nvls' else 'in_network'} and belief.{name}: give both or neither"
                )
        if self.nvls is not None and self.belief.nvls_channels is None:
            raise ValueError("belief.nvls_channels is required where there is nvls")
        if self.inter is None and (self.groups or self.in_network):
            raise ValueError("groups and in_network need a network (inter)")
        sizes = [group.nodes for group in self.groups]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"groups: nodes are {sizes}; each group must be larger than the one before")
        return self

    def check(self, nodes: int) -> None:
        """Raise ValueError for more nodes than the cluster has a network for, or fewer than two GPUs."""
        if nodes > 1 and self.inter is None:
            raise ValueError(f"cluster {self.name} has no network (inter), so nodes must be 1, not {nodes}")
        if not self.has(nodes):
            raise ValueError(f"1 node of cluster {self.name} has one GPU; a collective needs two: give more nodes")

    def has(self, nodes: int) -> bool:
        """Whether a job can run on so many nodes of it; ``check`` says why it cannot."""
        return nodes * self.gpus_per_node > 1 and (nodes == 1 or self.inter is not None)

    def part(self, gpus_per_node: int) -> Cluster:
        """So many GPUs of each node, with their share of its network devices."""
        changes: dict[str, Any] = {"gpus_per_node": gpus_per_node}
        if self.inter is not None:
            nics = max(1, self.inter.nics * gpus_per_node // self.gpus_per_node)
            changes["inter"] = self.inter.model_copy(update={"nics": nics})
        return self.model_copy(update=changes)

    def tier(self, nodes: int) -> int:
        """The farthest tier that a communicator over ``nodes`` nodes crosses; PCIe counts as 2, NVLink as 1."""
        tiers = [2 if self.intra.kind == "pcie" and self.gpus_per_node > 1 else 1]
        if self.inter is not None and nodes > 1:
            tiers += [self.inter.tier, *(group.tier for group in self.groups if nodes > group.nodes)]
        return max(tiers)

    def nccl_belief(self, nodes: int) -> Belief:
        """NCCL's cost model of a communicator over all GPUs of ``nodes`` nodes. Raises what ``check`` does."""
        self.check(nodes)
        believed = self.belief
        collnet = believed.collnet is not None and nodes > 1
        graphs = {a: self._graph(believed.ring, nodes) for a in Algorithm}
        graphs[Algorithm.TREE] = self._graph(believed.tree, nodes)
        graphs[Algorithm.NVLS] = graphs[Algorithm.NVLS_TREE] = self._graph(believed.nvls, nodes)
        graphs[Algorithm.COLLNET_DIRECT] = graphs[Algorithm.COLLNET_CHAIN] = self._graph(believed.collnet, nodes)
        return Belief(
            CommunicatorInfo(
                nodes=nodes,
                ranks=nodes * self.gpus_per_node,
                compute_capability=believed.compute_capability,
                cpu_vendor=believed.cpu_vendor,
                nvswitches=believed.nvswitches,
                collnet=collnet,
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
            # With one node the search has no network, and NCCL keeps one speed.
            inter = (graph.inter_gb_per_s if nodes > 1 else None) or graph.intra_gb_per_s
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


class _Fitted(Section, extra="ignore"):
    """What matters here of a machine that was calibrated; see ``calibration.calibrated``."""

    name: str
    cluster: Cluster
    curves: tuple[RatioCurve, ...] = ()

    @property
    def whole(self) -> Cluster:
        """The cluster with what its equations leave, of the runs that most was measured of."""
        usual = usual_variant(self.curves)
        return self.cluster.model_copy(
            update={"corrections": tuple(curve for curve in self.curves if curve.variant == usual)}
        )


class _Machines(Section, extra="ignore"):
    machines: Annotated[tuple[_Fitted, ...], Field(min_length=1)]


def load_cluster(path: Path, overrides: Sequence[str] = (), machine: str = "") -> Cluster:
    """Reads a cluster YAML, with ``overrides`` as in ``read_yaml``, or one ``machine`` of what ``fabric calibrate``
    wrote, with its curves: the only one, if there is one. Raises ConfigError."""
    if not machine and not _IS_PARAMETERS.search(read_text(path, "cluster")):
        return read_yaml(path, Cluster, "cluster", overrides)
    fitted = read_yaml(path, _Machines, "parameters").machines
    chosen = [of for of in fitted if of.name == machine or not machine]
    if len(chosen) != 1:
        raise ConfigError(
            f"{path} has the machines {', '.join(of.name for of in fitted)}; name one: {path}#{fitted[0].name}"
        )
    if overrides:
        raise ConfigError(f"{path}: --set changes a cluster YAML; what was calibrated is as it was measured")
    return chosen[0].whole


_IS_PARAMETERS: Final = re.compile(r"^machines:", re.MULTILINE)
