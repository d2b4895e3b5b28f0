"""Section graphs: collectives inside CUDA graphs are decided when they are captured, and right in every replay."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np

from benchmarks.gpu.cases import Case
from benchmarks.gpu.context import Context
from benchmarks.gpu.plan import KIB, MIB, action_to_json, fitted
from benchmarks.gpu.ranks import Ranks
from benchmarks.gpu.staging import Communicator
from dynamiccl_ray.actions import Action
from dynamiccl_ray.knobs import N_PROTOCOLS, Algorithm, Collective, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.layout import DECIDED

SECTION: Final = "graphs"
REPLAYS: Final = 10
PAIRS: Final = (
    pair_index(Algorithm.RING, Protocol.SIMPLE),
    pair_index(Algorithm.RING, Protocol.LL),
)
"""Offered for every collective here on every machine; one table after the other."""


def cases_of(ranks: int) -> tuple[Case, ...]:
    """What is captured into one graph."""
    return tuple(
        Case(collective=collective, count=fitted(size, ranks, ragged=True) // 4)
        for collective, size in (
            (Collective.ALL_REDUCE, 64 * KIB),
            (Collective.ALL_GATHER, MIB),
            (Collective.REDUCE_SCATTER, MIB),
            (Collective.ALL_REDUCE, 4 * KIB),
        )
    )


def run(context: Context) -> dict[str, Any]:
    cases, job = cases_of(context.ranks), context.new_job()
    rounds = []
    with context.start(job) as ranks:
        ranks.call("check", cases=cases)
        with context.world(job) as comm:
            comm.drain([case.collective for case in cases])
            for turn, pair in enumerate(PAIRS):
                rounds.append(_round(context, ranks, comm, cases, Action(pair=pair), seed=1 + 100 * turn))
            # The graph still holds collectives of the table that was in force when they were captured.
            comm.stage({case.key: Action(pair=PAIRS[0]) for case in cases})
            rounds.append(_replays(context, ranks, comm, cases, Action(pair=PAIRS[1]), seed=300))
        ranks.call("drop_graph")
    return {"replays": REPLAYS, "collectives": len(cases), "rounds": rounds}


def _round(
    context: Context, ranks: Ranks, comm: Communicator, cases: tuple[Case, ...], action: Action, seed: int
) -> dict[str, Any]:
    comm.stage({case.key: action for case in cases})
    before = comm.status()[0].dseq
    ranks.call("capture", cases=cases)
    at_capture = comm.status()[0].dseq - before
    # Once to warm up, once in the graph. Records of the warm-up are drained with those of the replays.
    if at_capture < 2 * len(cases):
        context.fail(SECTION, f"the tuner was asked {at_capture} times for {2 * len(cases)} calls, capture included")
    return {"asked_at_capture": at_capture, **_replays(context, ranks, comm, cases, action, seed, warmed=len(cases))}


def _replays(
    context: Context,
    ranks: Ranks,
    comm: Communicator,
    cases: tuple[Case, ...],
    action: Action,
    seed: int,
    warmed: int = 0,
) -> dict[str, Any]:
    before = comm.status()[0]
    answers = ranks.call("replay", times=REPLAYS, seed=seed)
    for rank, answer in enumerate(answers):
        for case, wrong in zip(cases, answer, strict=True):
            if wrong is not None:
                repeat = json.dumps({"case": case.to_json(), "action": action_to_json(action)})
                context.fail(SECTION, f"wrong result of {case.name} on rank {rank} in a replay: {wrong}", repeat=repeat)
    ran = [case.collective for case in cases]
    records = comm.drain(ran * REPLAYS + ran[:warmed])[0]
    after = comm.status()[0]
    if after.dseq != before.dseq:
        context.fail(
            SECTION, f"the tuner was asked {after.dseq - before.dseq} times during replays, which decide nothing"
        )
    pairs = 1 + N_PROTOCOLS * records["algo"].astype(int) + records["proto"]
    if len(records) and not (pairs == action.pair).all():
        found = sorted({int(pair) for pair in np.unique(pairs)})
        context.fail(SECTION, f"replays used pairs {found}; {action.name} was in force at capture")
    counts = counted(records, replays=REPLAYS * len(cases), warmed=warmed)
    dropped = sum(after.dropped.values()) - sum(before.dropped.values())
    if counts["records"] + dropped < counts["expected"]:
        context.notes.append(
            f"{SECTION}: {counts['records']} records and {dropped} dropped of {counts['expected']} collectives: NCCL "
            "reported no events of some replays"
        )
    return {**counts, "dropped": dropped, "action": action_to_json(action)}


def counted(records: np.ndarray[Any, Any], *, replays: int, warmed: int) -> dict[str, int]:
    """How many collectives have a record, and how many of these were joined with a decision.

    ``warmed`` calls ran outside the graph. Of the graph's, the first replay takes the decisions of the capture; every
    later one is undecided.
    """
    decided = int((records["flags"] & DECIDED != 0).sum())
    return {
        "expected": replays + warmed,
        "records": len(records),
        "decided": decided,
        "undecided": len(records) - decided,
    }
