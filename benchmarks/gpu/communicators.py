"""Section communicators: several at once, each under a table of its own, and many that come and go."""

from __future__ import annotations

import json
import time
from typing import Any, Final

from benchmarks.gpu.cases import Case
from benchmarks.gpu.context import Context, Loaded
from benchmarks.gpu.plan import KIB, MIB, Step, action_to_json, fitted
from benchmarks.gpu.stats import slope
from benchmarks.gpu.verify import verify
from dynamiccl_ray.actions import Action
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.segments import segments

SECTION: Final = "communicators"
TURNS: Final = 20
LEFT_S: Final = 10.0
CYCLES: Final = 20
WARM_CYCLES: Final = 5
"""The first allocate what every later one uses again."""
ACTIONS: Final = {
    "world": Action(pair=pair_index(Algorithm.RING, Protocol.LL)),
    "part": Action(pair=pair_index(Algorithm.RING, Protocol.SIMPLE)),
}
# What 20 cycles may add to a process beside what NCCL and PyTorch add themselves.
MOST_GROWTH: Final = {"anonymous_bytes": 128 * KIB, "gpu_bytes": MIB, "threads": 0.5, "files": 0.5}


def run(context: Context) -> dict[str, Any]:
    with context.timed(f"{SECTION}: two at once"):
        both = interleaved(context)
    with context.timed(f"{SECTION}: {CYCLES} that come and go, with the plugin and without"):
        grown = cycles(context)
    return {"interleaved": both, "cycles": grown}


def interleaved(context: Context) -> dict[str, Any]:
    """All ranks, and all but the last; with two ranks the same two, as a communicator of their own."""
    job = context.new_job()
    sizes = {"world": context.ranks, "part": max(2, context.ranks - 1)}
    cases = {name: _cases(size) for name, size in sizes.items()}
    with context.start(job) as ranks:
        ranks.call("check", cases=cases["world"])
        with context.world(job) as first:
            world = first.comm
        ranks.call("group", name="part", members=list(range(sizes["part"])))
        ranks.call("check", cases=cases["part"], group="part")
        with context.claimed(job, size=sizes["part"]) as found:
            if len(found) != 2:
                raise RunError(f"two groups made {len(found)} communicators")
            comms = {"world" if comm.comm == world else "part": comm for comm in found}
            for name, comm in comms.items():
                comm.drain([case.collective for case in cases[name]])
            since = {name: 1 + comm.status()[0].dseq for name, comm in comms.items()}
            versions = {
                name: comm.stage({case.key: ACTIONS[name] for case in cases[name]}) for name, comm in comms.items()
            }
            calls = [
                (name, cases[name][turn % len(cases[name])]) for turn in range(TURNS) for name in ("world", "part")
            ]
            answers = ranks.call("interleave", calls=calls)
            for rank, answer in enumerate(answers):
                mine = [call for call in calls if call[0] == "world" or rank < sizes["part"]]
                for (name, case), wrong in zip(mine, answer, strict=True):
                    if wrong is not None:
                        repeat = json.dumps({"case": case.to_json(), "action": action_to_json(ACTIONS[name])})
                        context.fail(SECTION, f"wrong {case.name} in {name} on rank {rank}: {wrong}", repeat=repeat)
            for name, comm in comms.items():
                ran = tuple(case for of, case in calls if of == name)
                records = comm.drain([case.collective for case in ran])
                step = Step(action=ACTIONS[name], cases=ran)
                verdict = verify(step, records, versions[name], since=since[name])
                for problem in verdict.problems:
                    context.fail(SECTION, f"{name}: {problem}")
        ranks.call("ungroup", name="part")
        _check_left(context, job)
    return {"sizes": sizes, "calls": len(calls)}


def _check_left(context: Context, job: str) -> None:
    """Every rank keeps the segment of the world's communicator, and no other."""
    deadline = time.monotonic() + LEFT_S
    while (left := len(list(segments(job)))) != context.ranks and time.monotonic() < deadline:
        time.sleep(0.1)
    if left != context.ranks:
        context.fail(SECTION, f"{left} segments are left when only the world's {context.ranks} should be")


def _cases(ranks: int) -> tuple[Case, ...]:
    return tuple(
        Case(collective=collective, count=fitted(size, ranks, ragged=True) // 4)
        for collective, size in (
            (Collective.ALL_REDUCE, 64 * KIB),
            (Collective.ALL_GATHER, 256 * KIB),
            (Collective.REDUCE_SCATTER, 16 * KIB),
        )
    )


def cycles(context: Context) -> dict[str, Any]:
    """Growth per communicator that came and went, with the plugin and without."""
    case = Case(collective=Collective.ALL_REDUCE, count=fitted(64 * KIB, context.ranks, ragged=False) // 4)
    samples: dict[str, list[list[dict[str, Any]]]] = {}
    loads: tuple[Loaded, ...] = ("none", "both")
    for loaded in loads:
        job = context.new_job()
        with context.start(job, loaded) as ranks:
            ranks.call("check", cases=[case])
            limit = context.options.timeout_s + 10.0 * CYCLES
            samples[loaded] = ranks.call("cycles", case=case, times=WARM_CYCLES + CYCLES, timeout_s=limit)
            if loaded == "both":
                _check_left(context, job)
    for name, by_rank in samples.items():
        for rank, cycle in ((rank, cycle) for rank, of in enumerate(by_rank) for cycle in of):
            if cycle["wrong"] is not None:
                context.fail(SECTION, f"wrong {case.name} on rank {rank} with {name} loaded: {cycle['wrong']}")
    growth = {name: growth_of(by_rank) for name, by_rank in samples.items()}
    for problem in too_much(growth["none"], growth["both"]):
        context.fail(SECTION, problem)
    return {"cycles": CYCLES, "growth_per_cycle": growth, "most": MOST_GROWTH}


def growth_of(by_rank: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Of every figure the growth per cycle, on the rank where it grew most; the first cycles are left out."""
    return {name: max(slope([cycle[name] for cycle in of[WARM_CYCLES:]]) for of in by_rank) for name in MOST_GROWTH}


def too_much(without: dict[str, float], with_plugin: dict[str, float]) -> list[str]:
    """What grows with the plugin by more than it does without, and more than it may."""
    return [
        f"{name} grow by {with_plugin[name]:.0f} with each communicator that comes and goes; without the plugin by "
        f"{without[name]:.0f}, and {most:g} more is the limit"
        for name, most in MOST_GROWTH.items()
        if with_plugin[name] - max(0.0, without[name]) > most
    ]
