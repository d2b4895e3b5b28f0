"""Runs a program on real NCCL and on the emulated one with a spy for a plugin, and brings what the spy wrote down
into a form in which the two can be compared.

Real NCCL says in its log what it found out of the machine; the emulated one is told exactly that.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.communicator import CommunicatorInfo, Graph
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import Algorithm
from dynamiccl_ray.plugin_bridge import native_dir
from dynamiccl_ray.plugin_bridge.constants import Constants, write_constants
from dynamiccl_ray.plugin_bridge.nccl_job import LOG, NcclJob
from dynamiccl_ray.plugin_bridge.program import Comm, Program
from dynamiccl_ray.plugin_bridge.real_nccl import RealNccl

Call = dict[str, Any]
"""A line of the spy's."""

_PATHS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET")
_NO_GRAPH = Graph(bw_intra=0, bw_inter=0, channels=0, type_intra=0, type_inter=0, latency_inter=0, same_channels=False)


@dataclass
class Run:
    """What one job did."""

    calls: list[list[Call]]
    """Per process, in the order in which they were written."""
    threads: list[int]
    """That run the ranks."""
    log: LOG
    """Of what the GPUs played, by rank and end."""
    printed: list[str]


@dataclass
class Found:
    """What NCCL found out when it created a communicator."""

    shape: str = ""
    """Its ranks and nodes."""
    network: str = ""
    channels: int = 0
    nvls_channels: int = 0
    p2p_channels: int = 0
    p2p_channels_per_peer: int = 0
    p2p_chunk_bytes: int = 0
    nvls_chunk_bytes: int = 128 << 10
    patterns: dict[int, Graph] = field(default_factory=dict)
    """By what NCCL numbers them."""

    def merge(self, other: Found) -> None:
        """Each rank searches for itself; NCCL takes the worst of what they find."""
        ours, theirs = ({**vars(found), "patterns": None} for found in (self, other))
        assert ours == theirs, f"ranks of a communicator differ: {ours}, {theirs}"
        for number, graph in other.patterns.items():
            self.patterns[number] = _worst(self.patterns.get(number, graph), graph)


def _worst(a: Graph, b: Graph) -> Graph:
    return Graph(
        bw_intra=min(a.bw_intra, b.bw_intra),
        bw_inter=min(a.bw_inter, b.bw_inter),
        channels=min(a.channels, b.channels),
        type_intra=max(a.type_intra, b.type_intra),
        type_inter=max(a.type_inter, b.type_inter),
        latency_inter=a.latency_inter,
        same_channels=a.same_channels and b.same_channels,
    )


def cluster_of(ranks_per_node: int) -> Cluster:
    return find_cluster("dgx-h100-ndr").model_copy(update={"gpus_per_node": ranks_per_node})


# ---- running ----


@dataclass(kw_only=True)
class Stage:
    """Where both NCCLs run."""

    directory: Path
    spy: Path
    preloaded: Path
    """What processes with real NCCL load before everything else."""
    env: Mapping[str, str] = field(default_factory=dict)
    ranks_per_process: int = 1
    least_us: float = 2000.0
    """Kernels last so long at the least that the proxy thread sees them begin before it sees them end."""

    def real(self, build: RealNccl, program: Program) -> tuple[Run, dict[str, Found]]:
        nodes = 1 + max(rank.node for rank in program.ranks)
        cluster = cluster_of(len(program.ranks) // nodes)
        directory = self.directory / "real"
        directory.mkdir(parents=True)
        env = {
            **build.env(cluster, directory / "topology.xml"),
            "LD_PRELOAD": str(self.preloaded),
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,NVLS",
            "NCCL_DEBUG_FILE": str(directory / "nccl.%p"),
        }
        run = self._run(program, build.library, directory, env, build.env_of(nodes))
        printed = [path.read_text() for path in sorted(directory.glob("nccl.*"))]
        return run, _found("\n".join(printed), run, cluster)

    def emulated(self, version: str, program: Program, found: Mapping[str, Found], ids: Mapping[str, int]) -> Run:
        """``ids`` are NCCL's hashes of the communicators, by which it orders those of a group."""
        directory = self.directory / "emulated"
        directory.mkdir(parents=True)
        constants = {}
        for comm in program.comms:
            shape = f"{comm.size} on {len(set(comm.nodes))}"
            constants[comm.number] = _constants(comm, found.get(comm.name) or found[shape], ids)
        write_constants(directory / "constants", constants)
        env = {
            "EMULATED_NCCL": str(directory / "constants"),
            "EMULATED_NCCL_VERSION": version,
            "NCCL_DEBUG": "WARN",
            "GPU_DEVICES": "16",
        }
        return self._run(program, native_dir() / "libnccl-emulated.so", directory, env, [])

    def _run(
        self, program: Program, library: Path, directory: Path, env: Mapping[str, str], env_of: list[dict[str, str]]
    ) -> Run:
        all_env = {
            **env,
            "NCCL_TUNER_PLUGIN": str(self.spy),
            "NCCL_PROFILER_PLUGIN": str(self.spy),
            "SPY_LOG": str(directory),
            **self.env,
        }
        job = NcclJob(
            program,
            library=library,
            directory=directory / "job",
            env=all_env,
            env_of=env_of,
            ranks_per_process=self.ranks_per_process,
            least_us=self.least_us,
        )
        with job:
            job.start()
            job.wait(60)
            calls = []
            for pid in job.pids():
                path = directory / f"spy.{pid}"
                lines = path.read_text().splitlines() if path.exists() else []
                calls.append([json.loads(line) for line in lines])
            log = job.logs()
            order = np.lexsort((log["ordinal"], log["number"], log["stop_ns"], log["device"], log["rank"]))
            return Run(calls, job.threads(), log[order], [job.stderr(i) for i in range(len(job.pids()))])


# ---- what NCCL found ----

_LINE = re.compile(r"^\S+?:\d+:(?P<thread>\d+) \[\d+\] NCCL INFO (?P<text>.*)$")
_PATTERN = re.compile(
    r"Pattern (\d+), crossNic \d+, nChannels (\d+), bw ([\d.]+)/([\d.]+), type (\w+)/(\w+), sameChannels (\d)"
)
_NETWORK = re.compile(r"Using network (\w+)")
_SIZE = re.compile(r"comm \S+ rank \d+ nRanks (\d+) nNodes (\d+)")
_NUMBERS = {
    "nvls_chunk_bytes": re.compile(r"NVLS tuning: nChannels \d+ chunkSize (\d+)"),
    "p2p_chunk_bytes": re.compile(r"P2P Chunksize set to (\d+)"),
}
_CHANNELS = re.compile(
    r"(\d+) coll channels, \d+ collnet channels, (\d+) nvls channels, (\d+) p2p channels, (\d+) p2p channels per peer"
)


def _found(text: str, run: Run, cluster: Cluster) -> dict[str, Found]:
    """By the communicator's name, or its ranks and nodes where the profiler is not told any."""
    names: dict[int, list[str | None]] = defaultdict(list)
    for call in itertools.chain.from_iterable(run.calls):
        if call["call"] == "profiler.init":
            names[call["thread"]].append(call.get("name"))
    by_thread: dict[int, Found] = defaultdict(Found)
    all_found: dict[str, Found] = {}
    for line in text.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        thread = int(match["thread"])
        if _read(by_thread[thread], match["text"], cluster.belief.nic_latency_us):
            found = by_thread.pop(thread)
            # The k-th profiler of a thread is its k-th communicator's.
            name = names[thread].pop(0) or found.shape
            all_found.setdefault(name, found).merge(found)
    return all_found


def _read(found: Found, said: str, latency_us: float) -> bool:
    """Whether this is the last line about a communicator."""
    if pattern := _PATTERN.search(said):
        number, channels, intra, inter, type_intra, type_inter, same = pattern.groups()
        found.patterns[int(number)] = Graph(
            bw_intra=float(intra),
            bw_inter=float(inter),
            channels=int(channels),
            type_intra=_PATHS.index(type_intra),
            type_inter=_PATHS.index(type_inter),
            # NCCL 2.28 talks over sockets once all communicators were gone: it does not load a network plugin again.
            latency_inter=0.0 if found.network == "Socket" else latency_us,
            same_channels=same == "1",
        )
    elif network := _NETWORK.search(said):
        found.network = network[1]
    elif size := _SIZE.search(said):
        found.shape = f"{size[1]} on {size[2]}"
    elif numbers := _CHANNELS.search(said):
        coll, nvls, p2p, per_peer = map(int, numbers.groups())
        found.channels, found.nvls_channels = coll, nvls
        found.p2p_channels, found.p2p_channels_per_peer = p2p, per_peer
        return True
    for name, expression in _NUMBERS.items():
        if number := expression.search(said):
            setattr(found, name, int(number[1]))
    return False


def ids_of(run: Run) -> dict[str, int]:
    """NCCL's hashes of communicators, by name, where the profiler was told."""
    return {
        call["name"]: int(call["comm"], 16)
        for call in itertools.chain.from_iterable(run.calls)
        if call["call"] == "profiler.init" and call.get("name")
    }


def belief_of(comm: Comm, found: Found) -> Belief:
    ring = found.patterns[4]
    tree_pattern = next(number for number in (1, 2, 3) if number in found.patterns)
    tree = found.patterns[tree_pattern]
    nvls = found.patterns.get(5, _NO_GRAPH)
    graphs = {
        Algorithm.TREE: tree,
        Algorithm.RING: ring,
        Algorithm.COLLNET_DIRECT: _NO_GRAPH,
        Algorithm.COLLNET_CHAIN: _NO_GRAPH,
        Algorithm.NVLS: nvls,
        Algorithm.NVLS_TREE: nvls,
        Algorithm.PAT: tree,
    }
    return Belief(
        CommunicatorInfo(
            nodes=len(set(comm.nodes)),
            ranks=comm.size,
            compute_capability=90,
            cpu_vendor="intel",
            nvswitches=1,
            collnet=False,
            nvls=found.nvls_channels > 0,
            tree_pattern_is_tree=tree_pattern == 3,
            graphs=graphs,
            channels=found.channels,
            nvls_channels=found.nvls_channels or None,
        )
    )


def _constants(comm: Comm, found: Found, ids: Mapping[str, int]) -> Constants:
    return Constants.of(
        comm,
        belief_of(comm, found),
        p2p_channels=found.p2p_channels,
        p2p_channels_per_peer=found.p2p_channels_per_peer,
        p2p_chunk_bytes=found.p2p_chunk_bytes,
        nvls_chunk_bytes=found.nvls_chunk_bytes,
        **({"id": ids[comm.name]} if comm.name in ids else {}),
    )
