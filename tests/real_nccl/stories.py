"""What a spy wrote down, with names instead of addresses and numbers: where two such stories differ."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from spying import Call, Run

from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.plugin_bridge.nccl_job import LOG, LOG_DTYPE

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
