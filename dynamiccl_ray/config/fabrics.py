"""What an online run is beside: a job that is played on measured or modelled times, or a real one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from dynamiccl_ray.agent.observation import (
    InterLink,
    IntraLink,
    Library,
    TopologyClass,
)
from dynamiccl_ray.fabric.load import IDLE, Load
from dynamiccl_ray.fabric.presets import NamedCluster
from dynamiccl_ray.keys import key_name, key_of
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.settings import (
    Count,
    Nodes,
    NotNegative,
    Positive,
    Section,
    beside,
    existing,
    is_file,
)
from dynamiccl_ray.sizes import Bytes
from dynamiccl_ray.workloads.recorded import NamedTrace


class PlayedEvent(Section, ABC):
    """A change of a played fabric in the middle of a run, and when it comes."""

    at_collective: Annotated[int, Field(ge=0)] | None = None
    """Collective at which every rank sees the change."""
    exploit_rounds: Annotated[int, Field(ge=1)] | None = None
    """Instead: this many rounds after the policy has been exploited for the first time since the last event."""

    @model_validator(mode="after")
    def _one_time(self) -> Self:
        if (self.at_collective is None) == (self.exploit_rounds is None):
            raise ValueError("give exactly one of at_collective and exploit_rounds")
        return self

    @property
    @abstractmethod
    def name(self) -> str:
        """What changes, in words."""


class Event(PlayedEvent):
    """A change of the measured fabric."""

    link_bandwidth: Positive | None = None
    """Bandwidth that is left, as a share of 1."""
    latency: Positive = 1.0
    """Factor on the part of the time that does not grow with bytes."""
    swap_nodes: Count | None = None
    """Instead: times of the same machine at another node count."""

    @model_validator(mode="after")
    def _one_change(self) -> Self:
        if (self.link_bandwidth is None) == (self.swap_nodes is None):
            raise ValueError("give exactly one of link_bandwidth and swap_nodes")
        return self

    @property
    def name(self) -> str:
        return f"{self.swap_nodes} nodes" if self.swap_nodes else f"links at {self.link_bandwidth:.0%}"


class LoadEvent(PlayedEvent):
    """The load on the emulated fabric from here on; what is not given is as on an idle one. See ``fabric.load``."""

    intra_bandwidth: Positive = 1.0
    """Bandwidth that is left inside a node, as a share of 1."""
    inter_bandwidth: Positive = 1.0
    """Bandwidth that is left on the network, as a share of 1."""
    intra_latency: Positive = 1.0
    """Factor on the latency of a hop inside a node."""
    inter_latency: Positive = 1.0
    """Factor on the latency of a hop between nodes."""
    straggler: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """How much longer the slowest rank takes for its own work."""
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the network's packets that are lost."""

    @property
    def load(self) -> Load:
        return Load(**{field.name: getattr(self, field.name) for field in fields(Load)})

    @property
    def name(self) -> str:
        words = {
            "intra_bandwidth": "links at {:.0%}",
            "inter_bandwidth": "network at {:.0%}",
            "intra_latency": "link latency x{:g}",
            "inter_latency": "network latency x{:g}",
            "straggler": "straggler x{:g}",
            "loss": "{:.2%} loss",
        }
        return ", ".join(words[f].format(v) for f in words if (v := getattr(self, f)) != getattr(IDLE, f)) or "idle"


class Processes(Section):
    """Which ranks of the communicator are played by processes of their own."""

    nodes: Count = 2
    ranks_per_node: Count = 4


class PlayedJob(Section, ABC):
    """What the fabrics share on which processes that load the real plugin play a job, without a GPU."""

    nodes: Nodes = 8
    events: tuple[PlayedEvent, ...] = ()


class EmulatedJob(PlayedJob, ABC):
    """On the emulated NCCL: one communicator, of which some ranks are played."""

    processes: Processes = Processes()
    rate_hz: NotNegative = 2000.0
    """Collectives per second and rank; 0 for as fast as possible."""

    @property
    @abstractmethod
    def gpus_per_node(self) -> int: ...

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (count := self.processes.nodes * self.processes.ranks_per_node) > MOST_PROCESSES:
            raise ValueError(f"processes: {count} of them on one machine; {MOST_PROCESSES} at most")
        if self.processes.nodes > self.nodes or self.processes.ranks_per_node > self.gpus_per_node:
            raise ValueError(
                f"processes: {self.processes.nodes} nodes x {self.processes.ranks_per_node} ranks do not fit "
                f"into {self.nodes} nodes x {self.gpus_per_node} GPUs"
            )
        return self


CollectiveName = Literal["broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"]


class Calls(Section):
    """Collectives of one type that the job repeats."""

    collective: CollectiveName
    sizes_bytes: Annotated[tuple[Bytes, ...], Field(min_length=1)]
    """As NCCL counts them: the full buffer for all-gather and reduce-scatter. Numbers, or ``64MiB``."""

    @property
    def type(self) -> Collective:
        return Collective[self.collective.upper()]


class MeasuredFabric(EmulatedJob):
    """Tables of real measurements: those of AWS p5en that are shipped, or your own in ``path``."""

    kind: Literal["measured"]
    path: Annotated[Path, BeforeValidator(beside)] | None = None
    """A directory with logs of nccl-tests or CSV tables, as ``dynamiccl evaluate --measured`` reads them, relative to
    this file. Absent: p5en."""
    cluster: NamedCluster | None = None
    """What the job says it runs on, as of a real one (``nccl``): its model says what to expect before anything is
    measured. Absent: nothing is expected."""
    machine: str | None = None
    """Of those in ``path``, which need not be said of a single one. Without ``path`` it is p5en, AWS p5en.48xlarge."""
    collective: CollectiveName = "all_reduce"
    """Of ``path``."""
    gpus: Annotated[int, Field(ge=1, le=72)] = 8
    """Of a node, that took part in what is in ``path``."""
    files: tuple[Annotated[Path, existing("is no file; name a CSV of measurements", is_file)], ...] = ()
    """Measurements of p5en to play instead of the ones that are shipped, in the same columns; paths relative to this
    file."""
    events: tuple[Event, ...] = ()

    @property
    def gpus_per_node(self) -> int:
        return self.gpus

    @model_validator(mode="after")
    def _whose(self) -> Self:
        if self.path is not None and self.files:
            raise ValueError("give path, for a machine of your own, or files, for p5en, not both")
        if self.path is None and (self.machine or "p5en") != "p5en":
            raise ValueError(f"machine is {self.machine!r}; without a path to its measurements it must be p5en")
        if self.path is None and (self.collective, self.gpus) != ("all_reduce", 8):
            raise ValueError("collective and gpus are for your own machine in path; of p5en 8 GPUs all-reduce")
        return self


class EmulatedFabric(EmulatedJob):
    """A physical model of a cluster."""

    kind: Literal["emulated"]
    cluster: NamedCluster
    """A preset's name, the path of a cluster YAML, relative to this file, or its settings, in place."""
    collectives: tuple[Calls, ...] = ()
    """Of one communicator of all ranks."""
    trace: NamedTrace | None = None
    """Instead: what `dynamiccl workload record` wrote, a YAML relative to this file, or the name of a shipped one."""
    noise_sigma: NotNegative = 0.02
    """Standard deviation of the log of a collective's time."""
    events: tuple[LoadEvent, ...] = ()

    @property
    def gpus_per_node(self) -> int:
        return self.cluster.gpus_per_node

    @model_validator(mode="after")
    def _playable(self) -> Self:
        self.cluster.nccl_belief(self.nodes)
        if (self.trace is None) == (not self.collectives):
            raise ValueError("give exactly one of collectives and trace")
        if self.trace is not None and any(event.at_collective is not None for event in self.events):
            raise ValueError("events: the communicators of a trace count their own collectives; give exploit_rounds")
        keys = Counter(key_of(calls.type, size, False) for calls in self.collectives for size in calls.sizes_bytes)
        if twice := [key_name(key) for key, count in keys.items() if count > 1]:
            raise ValueError(f"collectives: two sizes fall into the key {', '.join(twice)}; keys are an eighth octave")
        return self


class TrainingGroup(Section):
    """Communicators that divide the ranks of a job, and what they run. ``grouped`` collectives are called within one
    ncclGroupStart and ncclGroupEnd, all of an entry together."""

    name: Annotated[str, Field(min_length=1, max_length=48)]
    of: Literal["world", "node", "rail"]
    """All ranks; those of each node, such as a tensor-parallel group; or those at the same place on every node, such
    as a data-parallel group."""
    once: tuple[Calls, ...] = ()
    """Before the first step."""
    step: tuple[Calls, ...] = ()
    grouped: tuple[Calls, ...] = ()


class RealNcclFabric(PlayedJob):
    """NCCL's own host code on GPUs that are played: a physical model of a cluster says how long kernels take."""

    kind: Literal["real_nccl"]
    nccl: (
        Annotated[Path, existing("does not exist; git clone https://github.com/NVIDIA/nccl, or give --nccl")] | None
    ) = None
    """A source tree or tarball of NCCL, relative to this file; it is built once, which takes minutes. --nccl wins."""
    cluster: NamedCluster
    """As of an emulated fabric."""
    nodes: Annotated[int, Field(ge=1, le=8)] = 2
    ranks_per_node: Annotated[int, Field(ge=1, le=8)] = 4
    """All of them run here, each a process; the nodes have as many GPUs, and their share of the network devices."""
    steps_per_s: NotNegative = 0.0
    """0 for as fast as possible."""
    compute_us: NotNegative = 200.0
    """Computation before each of a step's collectives."""
    groups: tuple[TrainingGroup, ...] = ()
    trace: NamedTrace | None = None
    """Instead of ``groups``, as of an emulated fabric."""
    noise_sigma: NotNegative = 0.02
    """Standard deviation of the log of a collective's time."""
    events: tuple[LoadEvent, ...] = ()

    @model_validator(mode="after")
    def _playable(self) -> Self:
        if not 2 <= self.nodes * self.ranks_per_node <= MOST_RANKS:
            raise ValueError(
                f"{self.nodes} nodes x {self.ranks_per_node} ranks: a job on real NCCL here has 2 to {MOST_RANKS}"
            )
        if self.ranks_per_node > self.cluster.gpus_per_node:
            raise ValueError(f"ranks_per_node: {self.cluster.name} has {self.cluster.gpus_per_node} GPUs a node")
        if (self.trace is None) == (not self.groups):
            raise ValueError("give exactly one of groups and trace")
        for group in self.groups:
            if (group.of == "rail" and self.nodes == 1) or (group.of == "node" and self.ranks_per_node == 1):
                raise ValueError(f"groups: {group.name}: a {group.of} has one rank here, and a communicator needs two")
        for event in self.events:
            if event.at_collective is not None:
                raise ValueError("events: the communicators count their own collectives; give exploit_rounds")
        return self


MOST_RANKS: Final = 16
MOST_PROCESSES: Final = 256


class NcclFabric(Section):
    """A real job: its processes load the plugin, and are found by their job id on every node."""

    kind: Literal["nccl"]
    cluster: NamedCluster | None = None
    """A preset's name, the path of a cluster YAML or of what was calibrated, or settings in place. Its model says what
    to expect of each configuration before anything is measured, and is believed as far as it turns out to be right; it
    also says what the fields below do."""
    topology: TopologyClass = "fat-tree"
    intra: IntraLink = "none"
    inter: InterLink = "none"
    nvls: bool = False
    tier_max: Annotated[int, Field(ge=0, le=4)] = 2
    """The farthest tier that the job's communicators cross: 1 NVSwitch domain, 2 rack, 3 zone, 4 data centres."""
    ina_active: bool = False
    """Aggregation in the network carries the collectives."""
    library: Library = "nccl"
    sms: Count | None = None
    """Streaming multiprocessors of a GPU, such as 132 of an H100; without them the reward has no ``sm`` term."""

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        said = type(self).model_fields
        twice = [name for name in said if name not in ("kind", "cluster") and getattr(self, name) != said[name].default]
        if self.cluster is not None and twice:
            raise ValueError(f"{', '.join(twice)}: {self.cluster.name} says that already; leave out one of them")
        return self
