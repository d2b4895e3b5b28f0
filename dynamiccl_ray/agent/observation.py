"""What the policy sees of one key at one decision epoch, and what it may choose.

Static blocks (``Context``) come from the communicator, the cluster's description and the experiment YAML; dynamic ones
(``KeyView``) are aggregated over all ranks, so that every rank sees the same observation. ``encode`` lays them out in
one float32 vector per key and ``decode`` reads it back for ``dynamiccl explain``.

Times enter as log ratios to the key's baseline (NCCL's own choice): negative is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import Field

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS
from dynamiccl_ray.knobs import N_COLLECTIVES, N_PAIRS
from dynamiccl_ray.settings import Count, NotNegative, Positive, Section

Floats = npt.NDArray[np.float32]

IntraLink = Literal["nvlink", "pcie", "c2c", "none"]
InterLink = Literal["nvswitch", "ib", "roce", "efa", "slingshot", "tcp", "none"]
TopologyClass = Literal[
    "fat-tree", "bcube", "jellyfish", "dcell", "torus", "hammingmesh", "sip-ocs", "topoopt", "mixed"
]
Library = Literal["nccl", "rccl", "msccl", "gloo", "mpi", "other"]
SyncMode = Literal["bsp", "ssp", "asp", "local-sgd", "decentralized", "hybrid", "fedavg"]
Architecture = Literal["all-reduce", "parameter-server", "gossip"]
Compression = Literal["none", "quantization", "top-k", "random-k", "sign", "low-rank", "combined"]
Caller = Literal["bsp", "wfbp", "fused", "partitioned"]
Role = Literal["none", "intra-stage", "inter-stage", "activation-send", "activation-receive"]
GpuSharing = Literal["dedicated", "mps", "mig", "time-slice"]
Parallelism = Literal["dp", "pp", "tp", "fsdp", "3d", "moe"]
FaultTolerance = Literal["none", "ftar", "swarm", "oobleck"]

INTRA_LINKS: Final = get_args(IntraLink)
INTER_LINKS: Final = get_args(InterLink)
N_TIERS: Final = 5
# A log ratio beyond this says no more than "far worse" or "far better".
LOG_RATIO_LIMIT: Final = 2.0


class Topology(Section):
    """From the communicator and the cluster's description."""

    ranks: Count
    nodes: Count
    kind: TopologyClass = "fat-tree"
    """How the nodes' switches are connected."""
    intra: IntraLink = "none"
    """Link between the GPUs of a node."""
    inter: InterLink = "none"
    """Link between nodes."""
    tier_max: Annotated[int, Field(ge=0, le=4)] = 2
    """The farthest tier that the communicator crosses."""
    tier_mix: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Share of the hops of a ring over the ranks in order that are of each tier."""
    ina_active: bool = False
    """Aggregation in the network carries the collectives."""
    nvls: bool = False
    library: Library = "nccl"


class WorkloadContext(Section):
    """What the job does around its collectives."""

    sync: SyncMode = "bsp"
    tau: Count = 1
    """Steps between two synchronisations, or the staleness that is allowed."""
    architecture: Architecture = "all-reduce"
    compression: Compression = "none"
    rate: Positive = 1.0
    """Bytes after compression over bytes before."""
    caller: Caller = "wfbp"
    """How the job's communication is pipelined with its computation."""
    priority_critical: bool = False
    intensity: Positive = 250.0
    """Model intensity I: operations per parameter and sample."""
    local_batch: Positive = 32.0
    """M: samples per GPU and step."""
    communication_ratio: NotNegative = 1.0
    """f(N) / (M I), relative to 1/(250 x 32): how much of a step is communication."""


class Scheduler(Section):
    """Where in the pipeline the communicator is, and who shares the machine."""

    stage: Annotated[int, Field(ge=0, le=63)] = 0
    role: Role = "none"
    priority: Annotated[int, Field(ge=0, le=7)] = 0
    """Coflow class; 0 is the most urgent."""
    sharing: GpuSharing = "dedicated"
    template_active: bool = False
    """A pipeline template of a fault-tolerant runtime is in force."""


class Llm(Section):
    """The model that is trained."""

    parallelism: Parallelism = "dp"
    """What the communicator is for."""
    parameters: Positive = 1e8
    fault_tolerance: FaultTolerance = "none"


class Context(Section):
    """Everything that does not change while a communicator lives."""

    topology: Topology
    workload: WorkloadContext = WorkloadContext()
    scheduler: Scheduler = Scheduler()
    llm: Llm = Llm()


@dataclass(frozen=True, kw_only=True)
class KeyView:
    """All active keys of a communicator at one epoch. K keys; times are log ratios to the baseline."""

    collective: npt.NDArray[np.int64]
    """(K,) NCCL's function number."""
    nbytes: npt.NDArray[np.int64]
    """(K,) size of the message that is sent: after compression."""
    pipelined: npt.NDArray[np.bool_]
    """(K,)"""
    last_time: Floats
    """(K,) of the last epoch in which the key was used."""
    idle_epochs: Floats
    """(K,) epochs since the key was last used."""
    last_pair: npt.NDArray[np.int64]
    """(K,) pair head of the action in force; -1 before the first decision."""
    cost: Floats
    """(K, N_PAIRS) log of NCCL's own predicted cost over its cheapest; 0 where unavailable."""
    samples: Floats
    """(K, N_PAIRS, N_CHANNELS) collectives that were measured, hints from before the last shift included."""
    channels: tuple[Floats, Floats]
    """(K, N_PAIRS, N_CHANNELS) times by own and lent evidence, and how sure they are; see ``evidence.combine``."""
    chunks: tuple[Floats, Floats]
    """(K, N_PAIRS, N_CHUNKS) the same by chunk, whatever the channels."""
    noise: Floats
    """(K,) standard deviation of the log of one time."""
    excess: Floats
    """(K,) log of the baseline over what the keys of the next sizes would have it be; see ``Lending.excess``."""
    cusum: Floats
    """(K,) drift score over its threshold, 1 is an alarm."""
    congestion: Floats
    """(K,) log of the last time over the least that the key has shown since the last shift, under any action."""
    skew: Floats
    """(K,) log of the slowest rank's time over the median rank's."""
    heat: float | Floats
    """Or (K,). Logits are divided by 1 + heat, and nothing else depends on it. 0 in training: heat widens what a policy
    believes, and one that learned under heat would believe more narrowly instead."""
    valid_channels: npt.NDArray[np.bool_]
    """(K, N_PAIRS, N_CHANNELS) what may be chosen; a pair with no valid channel count is not available."""
    valid_chunks: npt.NDArray[np.bool_]
    """(K, N_PAIRS, N_CHUNKS)"""


PAIR_FIELDS: Final = ("available", "cost", "best", "sure", "samples", "current")
"""``best`` is the least time among the pair's channel counts, by all evidence, and ``sure`` how sure that is."""
_STATIC: Final[tuple[tuple[str, tuple[int, ...]], ...]] = (
    ("shape", (3,)),
    ("kind", (len(get_args(TopologyClass)),)),
    ("intra", (len(INTRA_LINKS),)),
    ("inter", (len(INTER_LINKS),)),
    ("tier_max", (N_TIERS,)),
    ("tier_mix", (N_TIERS,)),
    ("ina_active", (1,)),
    ("nvls", (1,)),
    ("library", (len(get_args(Library)),)),
    ("sync", (len(get_args(SyncMode)),)),
    ("tau", (1,)),
    ("architecture", (len(get_args(Architecture)),)),
    ("compression", (len(get_args(Compression)),)),
    ("rate", (1,)),
    ("caller", (len(get_args(Caller)),)),
    ("priority_critical", (1,)),
    ("intensity", (1,)),
    ("local_batch", (1,)),
    ("communication_ratio", (1,)),
    ("stage", (1,)),
    ("role", (len(get_args(Role)),)),
    ("priority", (1,)),
    ("sharing", (len(get_args(GpuSharing)),)),
    ("template_active", (1,)),
    ("parallelism", (len(get_args(Parallelism)),)),
    ("parameters", (1,)),
    ("fault_tolerance", (len(get_args(FaultTolerance)),)),
)
_DYNAMIC: Final[tuple[tuple[str, tuple[int, ...]], ...]] = (
    ("collective", (N_COLLECTIVES,)),
    ("log_bytes", (1,)),
    ("pipelined", (1,)),
    ("last_time", (1,)),
    ("idle", (1,)),
    ("excess", (1,)),
    ("cusum", (1,)),
    ("congestion", (1,)),
    ("skew", (1,)),
    ("noise", (1,)),
    ("pairs", (N_PAIRS, len(PAIR_FIELDS))),
    ("channels", (N_PAIRS, N_CHANNELS, 2)),
    ("chunks", (N_PAIRS, N_CHUNKS, 2)),
    ("valid_channels", (N_PAIRS, N_CHANNELS)),
    ("valid_chunks", (N_PAIRS, N_CHUNKS)),
    ("heat", (1,)),
)
_LEAST_RATIO: Final = 1e-2
_SEGMENTS: Final = _STATIC + _DYNAMIC
_OFFSETS: Final = np.cumsum([0, *(int(np.prod(shape)) for _, shape in _SEGMENTS)]).tolist()
_PLACES: Final = {
    name: (slice(*ends), shape) for (name, shape), ends in zip(_SEGMENTS, pairwise(_OFFSETS), strict=True)
}
SIZE: Final[int] = _OFFSETS[-1]
STATIC_SIZE: Final[int] = _OFFSETS[len(_STATIC)]
# Everything before the per-action features: what the recurrent part of the policy reads.
HEAD_SIZE: Final[int] = _OFFSETS[[name for name, _ in _SEGMENTS].index("pairs")]
N_PAIR_FIELDS: Final = len(PAIR_FIELDS)


def part(vector: Any, name: str) -> Any:
    """One named segment of encoded observations (..., SIZE), reshaped: a view, of an array or of a torch tensor."""
    place, shape = _PLACES[name]
    return vector[..., place].reshape(*vector.shape[:-1], *shape)


def communication_ratio(context: Floats) -> Floats:
    """(K,) of encoded contexts (K, STATIC_SIZE): ``WorkloadContext.communication_ratio``, within 0 and 100."""
    out: Floats = 10 ** part(context, "communication_ratio")[..., 0] - _LEAST_RATIO
    return out


def encode_context(context: Context) -> Floats:
    """The static blocks, (STATIC_SIZE,) float32, every entry within [-2, 4]."""
    out = np.zeros(STATIC_SIZE, np.float32)

    def put(name: str, value: npt.ArrayLike) -> None:
        part(out, name)[...] = value

    def one_of(name: str, value: str, kinds: Any) -> None:
        put(name, np.eye(len(get_args(kinds)))[get_args(kinds).index(value)])

    topology, workload, scheduler, llm = context.topology, context.workload, context.scheduler, context.llm
    per_node = max(1.0, topology.ranks / topology.nodes)
    put("shape", [np.log2(topology.ranks) / 10, np.log2(topology.nodes) / 10, np.log2(per_node) / 4])
    one_of("kind", topology.kind, TopologyClass)
    one_of("intra", topology.intra, IntraLink)
    one_of("inter", topology.inter, InterLink)
    put("tier_max", np.eye(N_TIERS)[topology.tier_max])
    put("tier_mix", topology.tier_mix)
    put("ina_active", topology.ina_active)
    put("nvls", topology.nvls)
    one_of("library", topology.library, Library)
    one_of("sync", workload.sync, SyncMode)
    put("tau", np.log2(workload.tau) / 8)
    one_of("architecture", workload.architecture, Architecture)
    one_of("compression", workload.compression, Compression)
    put("rate", np.clip(np.log10(workload.rate), -2, 2))
    one_of("caller", workload.caller, Caller)
    put("priority_critical", workload.priority_critical)
    put("intensity", np.log10(workload.intensity) / 4)
    put("local_batch", np.clip(np.log2(workload.local_batch) / 8, -2, 2))
    put("communication_ratio", np.clip(np.log10(workload.communication_ratio + _LEAST_RATIO), -2, 2))
    put("stage", scheduler.stage / 16)
    one_of("role", scheduler.role, Role)
    put("priority", scheduler.priority / 8)
    one_of("sharing", scheduler.sharing, GpuSharing)
    put("template_active", scheduler.template_active)
    one_of("parallelism", llm.parallelism, Parallelism)
    put("parameters", np.clip(np.log10(llm.parameters) / 8, 0, 2))
    one_of("fault_tolerance", llm.fault_tolerance, FaultTolerance)
    return out


def encode(context: Context | Floats, keys: KeyView) -> Floats:
    """Observations of shape (K, SIZE), float32, every entry within [-2, 4].

    ``context`` may be given encoded, (STATIC_SIZE,) or (K, STATIC_SIZE).
    """
    n = len(keys.nbytes)
    out = np.zeros((n, SIZE), np.float32)

    def put(name: str, value: npt.ArrayLike) -> None:
        part(out, name)[...] = value

    out[:, :STATIC_SIZE] = encode_context(context) if isinstance(context, Context) else context
    put("collective", np.eye(N_COLLECTIVES)[keys.collective])
    put("log_bytes", (np.log2(np.maximum(1, keys.nbytes)) / 40)[:, None])
    put("pipelined", keys.pipelined[:, None])
    put("last_time", _ratio(keys.last_time)[:, None])
    put("idle", (np.log1p(keys.idle_epochs) / 4)[:, None])
    put("excess", _ratio(keys.excess)[:, None])
    put("cusum", np.clip(keys.cusum, 0, 2)[:, None])
    put("congestion", np.clip(keys.congestion, 0, 2)[:, None])
    put("skew", np.clip(keys.skew, 0, 2)[:, None])
    put("noise", ((np.log(keys.noise) + 4) / 2)[:, None])
    put("heat", np.reshape(keys.heat, (-1, 1)))

    time, sure = keys.channels
    known = np.where((sure > 0) & keys.valid_channels, time, np.inf)
    best = known.argmin(-1)[..., None]
    least = np.take_along_axis(known, best, -1)[..., 0]
    known_pair = np.isfinite(least)
    put(
        "pairs",
        np.stack(
            [
                keys.valid_channels.any(-1),
                np.clip(keys.cost, 0, 4) / 4,
                _ratio(np.where(known_pair, least, 0.0)),
                np.where(known_pair, np.take_along_axis(sure, best, -1)[..., 0], 0.0),
                np.minimum(np.log1p(keys.samples.sum(-1)) / 4, 4),
                np.arange(N_PAIRS) == keys.last_pair[:, None],
            ],
            -1,
        ),
    )
    for name, of in (("channels", keys.channels), ("chunks", keys.chunks)):
        segment = part(out, name)
        segment[..., 0], segment[..., 1] = _ratio(of[0]), of[1]
    put("valid_channels", keys.valid_channels)
    put("valid_chunks", keys.valid_chunks)
    return out


def relative_cost(cost_us: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(N, N_PAIRS - 1) NCCL's predicted costs, negative for pairs that it does not offer, as a policy sees them:
    (N, N_PAIRS) logs over the cheapest that is offered; 0 for what is not, and for NCCL's own choice.
    """
    offered = cost_us >= 0
    # A cost of 0, which NCCL gives a lone rank, must not become minus infinity.
    least = np.float32(1e-9)
    cheapest = np.where(offered, np.maximum(cost_us, least), np.float32(np.inf)).min(-1, keepdims=True)
    out = np.zeros((len(cost_us), N_PAIRS), np.float32)
    np.log(np.maximum(cost_us, least) / cheapest, out=out[:, 1:], where=offered)
    return out


def decode(vector: Floats) -> dict[str, object]:
    """One encoded observation (SIZE,) as named numbers in their natural units."""
    shape = part(vector, "shape")
    pairs = part(vector, "pairs")

    def kind(name: str, kinds: Any) -> str:
        return str(get_args(kinds)[int(part(vector, name).argmax())])

    def number(name: str) -> float:
        return float(part(vector, name)[0])

    return {
        "ranks": round(2 ** (float(shape[0]) * 10)),
        "nodes": round(2 ** (float(shape[1]) * 10)),
        "topology": kind("kind", TopologyClass),
        "intra": kind("intra", IntraLink),
        "inter": kind("inter", InterLink),
        "tier_max": int(part(vector, "tier_max").argmax()),
        "tier_mix": [float(x) for x in part(vector, "tier_mix")],
        "ina_active": bool(number("ina_active")),
        "nvls": bool(number("nvls")),
        "library": kind("library", Library),
        "sync": kind("sync", SyncMode),
        "tau": round(2 ** (number("tau") * 8)),
        "architecture": kind("architecture", Architecture),
        "compression": kind("compression", Compression),
        "rate": 10 ** number("rate"),
        "caller": kind("caller", Caller),
        "priority_critical": bool(number("priority_critical")),
        "intensity": 10 ** (number("intensity") * 4),
        "local_batch": 2 ** (number("local_batch") * 8),
        "communication_ratio": float(communication_ratio(vector)),
        "stage": round(number("stage") * 16),
        "role": kind("role", Role),
        "priority": round(number("priority") * 8),
        "sharing": kind("sharing", GpuSharing),
        "template_active": bool(number("template_active")),
        "parallelism": kind("parallelism", Parallelism),
        "parameters": 10 ** (number("parameters") * 8),
        "fault_tolerance": kind("fault_tolerance", FaultTolerance),
        "collective": int(part(vector, "collective").argmax()),
        "bytes": round(2 ** (number("log_bytes") * 40)),
        "pipelined": bool(number("pipelined")),
        "last_time_ratio": float(np.exp(number("last_time"))),
        "baseline_excess_ratio": float(np.exp(number("excess"))),
        "cusum": number("cusum"),
        "congestion_ratio": float(np.exp(number("congestion"))),
        "skew": float(np.exp(number("skew"))),
        "noise": float(np.exp(number("noise") * 2 - 4)),
        "pairs": [dict(zip(PAIR_FIELDS, map(float, row), strict=True)) for row in pairs],
    }


def _ratio(x: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    return np.asarray(np.clip(x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
