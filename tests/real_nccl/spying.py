"""Runs a program on real NCCL and on the emulated one with a spy for a plugin, and brings what the spy wrote down
into a form in which the two can be compared.

Real NCCL says in its log what it found out of the machine; the emulated one is told exactly that.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.communicator import CommunicatorInfo, Graph
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import Algorithm, Collective
from dynamiccl_ray.plugin_bridge import native_dir
from dynamiccl_ray.plugin_bridge.constants import Constants, write_constants
from dynamiccl_ray.plugin_bridge.nccl_job import LOG, LOG_DTYPE, NcclJob
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


# ---- comparing ----

_TYPES = {
    1: "Group", 2: "Coll", 4: "P2p", 8: "ProxyOp", 16: "ProxyStep", 32: "ProxyCtrl", 64: "KernelCh", 128: "NetPlugin",
    256: "GroupApi", 512: "CollApi", 1024: "P2pApi", 2048: "KernelLaunch",
}  # fmt: skip
_OF_PROXY = {"ProxyOp", "ProxyStep", "ProxyCtrl", "KernelCh"}
_WORDS = ("stream", "send", "recv")


@dataclass
class Story:
    """What one process's plugins were told, with names instead of addresses, hashes and numbers of events."""

    ranks: dict[int, list[Call]]
    """Per rank, what its thread was heard to do."""
    jobs: list[list[Call]]
    """Likewise of each thread that NCCL made for a while."""
    proxy: dict[str, list[Call]]
    """What the proxy threads did, by the event that it belongs to."""
    loads: list[str]
    """When the library came and went; any thread may have done that."""
    ends: dict[str, list[Call]]
    """How each communicator ended for the plugins, where a process has several of its ranks: whichever comes last does
    it for all."""


class _Names:
    """Gives things names by the order in which they first appear."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._count: dict[str, int] = defaultdict(int)

    def __call__(self, kind: str, value: str) -> str:
        if value == "0":
            return "0"
        if (kind, value) not in self._names:
            self._names[kind, value] = f"{kind}{self._count[kind]}"
            self._count[kind] += 1
        return self._names[kind, value]


def stories(run: Run) -> list[Story]:
    """One per process."""
    return [_story(calls, run.threads) for calls in run.calls]


def _story(calls: list[Call], rank_threads: list[int]) -> Story:
    contexts = _contexts(calls)
    types = {call["event"]: _TYPES[call["type"]] for call in calls if call["call"] == "start"}
    by_thread: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        if call["call"] not in ("load", "unload"):
            by_thread[call["thread"]].append(call)
    event_names = {-1: "none", -2: "foreign"}
    others: list[int] = []
    for thread, of_thread in by_thread.items():
        if thread not in rank_threads and any(types.get(call.get("event", -1)) not in _OF_PROXY for call in of_thread):
            others.append(thread)
        who = f"r{rank_threads.index(thread)}" if thread in rank_threads else f"n{len(others)}"
        count: dict[str, int] = defaultdict(int)
        for call in of_thread:
            if call["call"] != "start":
                continue
            kind = types[call["event"]]
            if kind in _OF_PROXY:
                event_names[call["event"]] = f"{kind}.{call.get('channel', -1)}"
            else:
                event_names[call["event"]] = f"{who}.{kind}{count[kind]}"
                count[kind] += 1
    parents = {call["event"]: call["parent"] for call in calls if call["call"] == "start"}
    loads = [call["call"] for call in calls if call["call"] in ("load", "unload")]
    story = Story({}, [], defaultdict(list), loads, defaultdict(list))
    shared = len(set(rank_threads) & by_thread.keys()) > 1
    for thread, of_thread in by_thread.items():
        names = _Names()
        told = []
        for call in of_thread:
            event = call.get("event", -1)
            if types.get(event) in _OF_PROXY:
                story.proxy[event_names[parents[event]]].append(_named(call, event_names, contexts, names, types))
            elif shared and call["call"].endswith(".finalize"):
                ended = _named(call, event_names, contexts, names, types)
                story.ends[str(ended.get("tuner", ended.get("profiler"))).split(".")[0]].append(ended)
            else:
                told.append(_named(call, event_names, contexts, names, types))
        if shared or thread not in rank_threads:
            # Several may begin at once, and the second is told what the first has asked for.
            told = [{key: value for key, value in call.items() if key != "mask"} for call in told]
        if thread in rank_threads:
            story.ranks[rank_threads.index(thread)] = told
        elif told:
            story.jobs.append(told)
    return story


def _contexts(calls: list[Call]) -> dict[tuple[str, int], str]:
    """Names of what the plugins gave NCCL at init: a tuner's is that of the profiler before it on its thread."""
    latest: dict[int, str] = {}
    names: dict[tuple[str, int], str] = {("profiler", -2): "foreign"}
    for call in calls:
        if call["call"] == "profiler.init":
            rank = f"{call['name']}.{call['rank']}" if "name" in call else "init"
            taken = sum(name.split("#")[0] == rank for (kind, _), name in names.items() if kind == "profiler")
            latest[call["thread"]] = names["profiler", call["profiler"]] = f"{rank}#{taken}"
        elif call["call"] == "tuner.init":
            names["tuner", call["tuner"]] = latest.get(call["thread"], "alone")
    return names


def _named(
    call: Call,
    event_names: Mapping[int, str],
    contexts: Mapping[tuple[str, int], str],
    names: _Names,
    types: Mapping[int, str],
) -> Call:
    told = {key: value for key, value in call.items() if key not in ("thread", "thread_name")}
    for key in _WORDS:
        if key in told:
            told[key] = names(key, told[key])
    for key in ("parent", "parent_group"):
        if key in told:
            told[key] = event_names[told[key]]
    for key in ("profiler", "tuner"):
        if key in told:
            told[key] = contexts[key, told[key]]
    if "event" in told:
        told["event"] = event_names[call["event"]]
        if "type" in told:
            told["type"] = _TYPES[told["type"]]
    return told


def was_starved(run: Run) -> bool:
    """Whether a proxy thread came so late that kernels' timestamps had been written over, or missed a start.

    Timestamps of a channel go back then, or an event is stopped twice.
    """
    for calls in run.calls:
        latest: dict[tuple[int, int], int] = defaultdict(int)
        ended = set()
        for call in calls:
            if call["call"] == "start" and "timer" in call:
                channel, timer = (call["profiler"], call["channel"]), int(call["timer"], 16)
                if timer < latest[channel]:
                    return True
                latest[channel] = timer
            elif call["call"] == "stop" and call["event"] in ended:
                return True
            elif call["call"] == "stop":
                ended.add(call["event"])
    return False


def estimates(run: Run) -> list[str]:
    """What ncclGroupSimulateEnd said, by rank."""
    return sorted(line for text in run.printed for line in text.splitlines() if "simulated" in line)


# ---- what differs ----


def differences(real: Run, emulated: Run) -> list[str]:
    """Where the emulated NCCL did not do what real NCCL did, in words; empty if nowhere.

    Of the network's operations only the sum over all processes is compared, and not even that where there are rooted
    collectives: which rank runs them depends on rings and trees that the emulated NCCL does not build.
    """
    found: list[str] = []
    for number, (ours, theirs) in enumerate(zip(stories(emulated), stories(real), strict=True)):
        where = f"process {number}"
        for rank in sorted(ours.ranks.keys() | theirs.ranks.keys()):
            found += _unequal(f"{where}, rank {rank}", theirs.ranks.get(rank, []), ours.ranks.get(rank, []))
        jobs = [sorted(json.dumps(job) for job in story.jobs) for story in (theirs, ours)]
        for theirs_job, ours_job in zip(*jobs, strict=False):
            found += _unequal(f"{where}, a thread of NCCL's", json.loads(theirs_job), json.loads(ours_job))
        for name in sorted(ours.ends.keys() | theirs.ends.keys()):
            found += _unequal(f"{where}, the end of {name}", theirs.ends[name], ours.ends[name])
        if ours.loads != theirs.loads:
            found.append(f"{where}: the plugin's library saw {theirs.loads}, emulated {ours.loads}")
        if len(jobs[0]) != len(jobs[1]):
            found.append(f"{where}: {len(jobs[0])} threads of NCCL's spoke to the plugins, emulated {len(jobs[1])}")
        for parent in sorted(ours.proxy.keys() | theirs.proxy.keys()):
            pair = [_kernels(story.proxy.get(parent, [])) for story in (theirs, ours)]
            for what in ("start", "state", "stop"):
                found += _unequal(f"{where}, {what} under {parent}", pair[0][what], pair[1][what])
    found += [f"network operations: {line}" for line in _unequal_sums(real, emulated)]
    found += _unequal_logs(real.log, emulated.log)
    return found


def _unequal(where: str, theirs: list[Call], ours: list[Call]) -> list[str]:
    for i, (real, emulated) in enumerate(itertools.zip_longest(theirs, ours, fillvalue={})):
        keys = [key for key in {**real, **emulated} if real.get(key) != emulated.get(key)]
        if keys:
            a, b = (
                {key: call.get(key) for key in ("call", "type", "event", *keys) if key in call}
                for call in (real, emulated)
            )
            return [f"{where}, call {i} of {len(theirs)} (emulated {len(ours)}): {a}, emulated {b}"]
    return []


def _kernels(calls: list[Call]) -> dict[str, list[Call]]:
    """What proxy threads said of kernels, by channel: which channel they look at first is a matter of moments."""
    kept: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        if call["event"].startswith("KernelCh"):
            kept[call["call"]].append(call)
    for of_kind in kept.values():
        of_kind.sort(key=lambda call: call["event"])
    return kept


def _unequal_sums(real: Run, emulated: Run) -> list[str]:
    sums = []
    if np.isin(real.log["func"], (Collective.BROADCAST, Collective.REDUCE)).any():
        return []
    for run in (real, emulated):
        counter: Counter[tuple[int, int]] = Counter()
        for call in itertools.chain.from_iterable(run.calls):
            if call["call"] == "start" and _TYPES[call["type"]] == "ProxyOp":
                counter[call["channel"], call["is_send"]] += 1
        sums.append(counter)
    return [
        f"(channel, is_send) {key}: {sums[0][key]}, emulated {sums[1][key]}"
        for key in sorted(sums[0].keys() | sums[1].keys())
        if sums[0][key] != sums[1][key]
    ]


def _unequal_logs(real: LOG, emulated: LOG) -> list[str]:
    if len(real) != len(emulated):
        return [f"the GPUs played {len(real)} operations, emulated {len(emulated)}"]
    names = [name for name in LOG_DTYPE.names or () if name not in ("comm", "own", "asked")]
    for a, b in zip(real, emulated, strict=True):
        if keys := [name for name in names if a[name] != b[name]]:
            what = {name: a[name].item() for name in ("rank", "number", "func", "bytes", "ordinal", "step")}
            return [f"GPU: {what}: { ({k: (a[k].item(), b[k].item()) for k in keys}) }"]
    return []
