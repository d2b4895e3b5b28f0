"""Section measure: NCCL's default, the end of the loop, and the best static choice, by the evaluation protocol.

Ten collectives of each key warm up and a hundred are measured, in five runs. A run has processes of its own, and in
it the three choices take turns key by key, in another order every time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.gpu.cases import Case
from benchmarks.gpu.context import Context
from benchmarks.gpu.online import Loop, essence, experiment
from benchmarks.gpu.plan import TIMED, action_to_json, actions, fitted
from benchmarks.gpu.ranks import Ranks
from benchmarks.gpu.staging import Communicator, Records
from benchmarks.gpu.stats import geomean, summary
from benchmarks.gpu.verify import arrival_corrected_us, in_force
from dynamiccl_ray.actions import Action
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, Algorithm, pair_index

SECTION: Final = "measure"
WARMUP: Final = 10
MEASURED: Final = 100
SWEEP_WARMUP: Final = 2
SWEEP_MEASURED: Final = 8
LOOP_TURNS: Final = 4
RATE_HZ: Final = 500.0
"""Collectives per second while the loop learns."""

Choices = dict[str, dict[int, Action]]
"""Name of a choice -> key -> action."""


def timed_cases(sizes: Sequence[int], ranks: int) -> list[Case]:
    """What is timed: float32 sums."""
    return [
        Case(collective=collective, count=fitted(size, ranks, ragged=False) // 4)
        for collective in TIMED
        for size in sizes
    ]


def run(context: Context) -> dict[str, Any]:
    """Searches, learns, and measures all three."""
    cases = timed_cases(context.time_sizes, context.ranks)
    job = context.new_job()
    result: dict[str, Any] = {}
    choices: Choices = {"default": {}}
    with context.start(job) as ranks:
        ranks.call("loop", cases=cases, times=1)
        with context.world(job) as comm, context.timed(f"{SECTION}: best static choice"):
            first = comm.drain([case.collective for case in cases])
            offered = comm.offered()
            cases = [case for case in cases if case.key in offered]
            choices["static"], result["sweep"] = sweep(context, ranks, comm, cases, offered, _most_channels(first))
    nvls = any(pair_index(Algorithm.NVLS, p) in pairs for pairs in offered.values() for p in range(3))
    try:
        with context.timed(f"{SECTION}: the loop"):
            choices["tuned"], result["loop"] = learn(
                context, cases, fabric(context, nvls=nvls), result["sweep"]["most_channels"]
            )
    except RunError as e:
        context.fail(SECTION, f"the loop failed, so there is no tuned choice: {e}")
    with context.timed(f"{SECTION}: {context.options.runs} runs"):
        samples = [protocol(context, cases, choices, turn) for turn in range(context.options.runs)]
    result["keys"] = rows(cases, choices, samples)
    result["over_default"] = over_default(result["keys"])
    result["protocol"] = {"warmup": WARMUP, "measured": MEASURED, "runs": context.options.runs}
    return result


def fabric(context: Context, *, nvls: bool) -> dict[str, Any]:
    """What the loop is told about the machine."""
    gpu = context.facts["gpus"][0]
    intra = context.options.intra or ("none" if context.one_gpu else context.facts.get("links") or "none")
    inter = "tcp" if context.one_gpu else "none"
    return {"intra": intra, "inter": inter, "nvls": nvls, "tier_max": 2 if context.one_gpu else 1, "sms": gpu["sms"]}


def sweep(
    context: Context,
    ranks: Ranks,
    comm: Communicator,
    cases: Sequence[Case],
    offered: Mapping[int, frozenset[int]],
    most_channels: int,
) -> tuple[dict[int, Action], dict[str, Any]]:
    """Every configuration on every key, a few times each: key -> the one with the least median, and what was tried.

    Channels and chunk sizes vary one at a time. Stops when the time that it has is over, and says so.
    """
    chunks = CHUNK_VALUES if comm.takes_chunks else (0,)
    grid = actions({pair for key in offered for pair in offered[key]}, CHANNEL_VALUES, chunks, cross=False)
    # Pairs first: if time runs out, all of them have been tried under NCCL's own channels and chunk.
    grid.sort(key=lambda action: bool(action.channels or action.chunk))
    best: dict[int, tuple[float, Action]] = {}
    tried, deadline = 0, time.monotonic() + context.options.sweep_s
    total = sum(not action.pair or action.pair in offered[case.key] for action in grid for case in cases)
    for action in grid:
        mine = [case for case in cases if not action.pair or action.pair in offered[case.key]]
        if not mine or time.monotonic() > deadline:
            continue
        version = comm.stage({case.key: action for case in mine})
        for case in mine:
            ranks.call("time", case=case, warmup=SWEEP_WARMUP, measured=SWEEP_MEASURED)
        records = comm.drain([case.collective for case in mine for _ in range(SWEEP_WARMUP + SWEEP_MEASURED)])
        most_channels = max(most_channels, _most_channels(records))
        for case in mine:
            times = arrival_corrected_us(records, case.key, version)[SWEEP_WARMUP:]
            if len(times):
                tried += 1
                best[case.key] = min(
                    best.get(case.key, (np.inf, Action())), (float(np.median(times)), action), key=lambda x: x[0]
                )
    if tried < total:
        context.notes.append(
            f"the search of the best static choice measured {tried} of {total} configurations in "
            f"{context.options.sweep_s:g} s; --sweep-s gives it more"
        )
    return {key: action for key, (_, action) in best.items()}, {
        "configurations": total,
        "measured": tried,
        "samples_each": SWEEP_MEASURED,
        "most_channels": most_channels,
    }


def _most_channels(records: Sequence[Records]) -> int:
    return max(int(of["channels"].max(initial=1)) for of in records)


def learn(
    context: Context, cases: Sequence[Case], about: dict[str, Any], most_channels: int
) -> tuple[dict[int, Action], dict[str, Any]]:
    """Runs the loop for its collectives; key -> what is in force afterwards, and the loop's own account.

    Beside a job of its own: the loop takes for NCCL's choice whatever runs before its own first table.
    """
    job = context.new_job()
    described = experiment(
        job=job,
        per_key=context.options.per_key,
        seed=context.options.seed,
        fabric=about,
        most_channels=most_channels,
        ranks=context.ranks,
    )
    with context.start(job) as ranks:
        # Every key runs more than once: one that is seen a single time would keep the loop measuring baselines.
        ranks.call("loop", cases=cases, times=2)
        return _learned(context, ranks, job, cases, described)


def _learned(
    context: Context, ranks: Ranks, job: str, cases: Sequence[Case], described: dict[str, Any]
) -> tuple[dict[int, Action], dict[str, Any]]:
    loop = Loop(described, context.directory / "online", serial=context.options.serial)

    def more() -> int:
        began = time.monotonic()
        ranks.call("loop", cases=cases, times=LOOP_TURNS)
        # Faster than any training job, the loop would see only a part of what ran.
        time.sleep(max(0.0, began + LOOP_TURNS * len(cases) / RATE_HZ - time.monotonic()))
        return LOOP_TURNS * len(cases)

    ran = loop.feed(more, job=job, most_s=context.options.loop_s)
    account = essence(loop.summary())
    with context.world(job) as comm:
        comm.settle()
        comm.drain()
        ranks.call("loop", cases=cases, times=1)
        records = comm.drain([case.collective for case in cases])
    account |= {"collectives_run": ran, "experiment": described}
    if account["phase_at_the_end"] != "exploit":
        context.notes.append(
            f"the loop ended in phase {account['phase_at_the_end']}: its last table may be one that it was trying; "
            "--per-key gives it more collectives"
        )
    return in_force(records[0]), account


def protocol(context: Context, cases: Sequence[Case], choices: Choices, turn: int) -> dict[str, Any]:
    """One run with processes of its own: choice -> key -> microseconds by the GPU's timers, and the stream's."""
    job = context.new_job()
    samples: dict[str, Any] = {name: {} for name in choices}
    names = [*choices]
    with context.start(job) as ranks:
        ranks.call("loop", cases=cases, times=1)
        with context.world(job) as comm:
            comm.drain([case.collective for case in cases])
            for place, case in enumerate(cases):
                first = (turn + place) % len(names)
                for name in names[first:] + names[:first]:
                    version = comm.stage(choices[name])
                    streams = ranks.call("time", case=case, warmup=WARMUP, measured=MEASURED)
                    records = comm.drain([case.collective] * (WARMUP + MEASURED))
                    samples[name][case.key] = {
                        "gpu_us": arrival_corrected_us(records, case.key, version)[WARMUP:].tolist(),
                        # A collective is over when the last rank has it.
                        "stream_us": np.max(streams, axis=0).tolist(),
                    }
    return samples


def rows(cases: Sequence[Case], choices: Choices, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each key: per choice what it does and what that cost."""
    found = []
    for case in cases:
        row: dict[str, Any] = {"case": case.name, "bytes": case.nbytes}
        for name, chosen in choices.items():
            figures: dict[str, Any] = {"action": action_to_json(chosen.get(case.key, Action()))}
            for what in ("gpu_us", "stream_us"):
                runs = [run[name][case.key][what] for run in samples]
                figures[what] = summary(runs) if any(runs) else None
            row[name] = figures
        found.append(row)
    return found


def over_default(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per choice and clock the geometric mean over keys of its mean time over NCCL's default."""
    ratios: dict[str, dict[str, float]] = {}
    for name in ("tuned", "static"):
        for what in ("gpu_us", "stream_us"):
            both = [(row[name][what], row["default"][what]) for row in found if name in row]
            known = [mine["mean"] / default["mean"] for mine, default in both if mine and default]
            if known:
                ratios.setdefault(name, {})[what] = geomean(known)
    return ratios
