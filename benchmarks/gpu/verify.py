"""Were the decisions really in force? What the plugin recorded against what was asked for. Pure.

NCCL itself names algorithm, protocol and channels in what it reports to the profiler; it does not name the chunk size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.cases import Case
from benchmarks.gpu.plan import Step
from dynamiccl_ray.actions import Action
from dynamiccl_ray.actors.ranks import collectives_of
from dynamiccl_ray.actors.reduction import Matching, by_the_node
from dynamiccl_ray.control.table import OWN
from dynamiccl_ray.knobs import (
    CHANNEL_VALUES,
    CHUNK_VALUES,
    N_PROTOCOLS,
    OWN_PAIR,
    Algorithm,
    Collective,
    pair_index,
    pair_name,
)
from dynamiccl_ray.plugin_bridge.clocks import Clock
from dynamiccl_ray.plugin_bridge.layout import AGGREGATE, APPLIED, DECIDED

Records = npt.NDArray[Any]

# Offered for some types and reductions only, so a key's cost row can promise more than one of its calls gets.
BY_TYPE: Final = frozenset({Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN})
# Here NCCL takes a count as it stands, so the plugin passes none on.
OWN_CHANNELS: Final = frozenset({Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN, Algorithm.NVLS})
_AGREED: Final = ("func", "bytes", "version", "algo", "proto", "channels")


@dataclass(kw_only=True)
class Verdict:
    """Of one step. ``problems`` are sentences; a right step has none."""

    problems: list[str] = field(default_factory=list)
    recorded: int = 0
    unrecorded: int = 0
    """Calls of which NCCL reports nothing: broadcasts from 2.29.2 on."""
    missing: int = 0
    """Calls of the others without a record. NCCL's proxy can miss a kernel that starts and ends between two looks."""
    refused: int = 0
    """Calls that NCCL did not offer the pair for, by their type."""
    channels: Counter[int] = field(default_factory=Counter)
    """Channels that NCCL used, of calls under the table."""


def verify(
    step: Step,
    by_rank: Sequence[Records],
    version: int,
    *,
    silent: frozenset[Collective] = frozenset(),
    since: int = 1,
) -> Verdict:
    """Compares the records of a step, per rank, with its table ``version``. ``silent`` collectives have none.

    ``since`` is the step's first call of the tuner; records of earlier ones are late and say nothing about it.
    """
    verdict = Verdict()
    under = [records[(records["flags"] & DECIDED != 0) & (records["dseq"] >= since)] for records in by_rank]
    for rank, records in enumerate(under):
        unmatched = Counter((int(case.collective), case.nbytes) for case in step.cases)
        for record in records:
            call = (int(record["func"]), int(record["bytes"]))
            if unmatched[call] == 0:
                verdict.problems.append(f"rank {rank} recorded {_call(record)}, which nobody called")
                continue
            unmatched[call] -= 1
            verdict.recorded += 1
            _judge(step, record, version, f"rank {rank}: {_call(record)}", verdict)
        for (func, _), count in unmatched.items():
            if func in silent:
                verdict.unrecorded += count
            else:
                verdict.missing += count
    verdict.problems += _disagreements(under)
    return verdict


def _asked_chunk(record: Any) -> int:
    """Bytes; 0 for NCCL's own."""
    return (1 << int(record["asked_chunk_log2"])) & ~1


def _judge(step: Step, record: Any, version: int, where: str, verdict: Verdict) -> None:
    action = step.action
    asked_algo, asked_proto = divmod(action.pair - 1, N_PROTOCOLS) if action.pair != OWN_PAIR else (OWN, OWN)
    asked = (asked_algo, asked_proto, CHANNEL_VALUES[action.channels], CHUNK_VALUES[action.chunk])
    entry = (*(int(record[f"asked_{name}"]) for name in ("algo", "proto", "channels")), _asked_chunk(record))
    complain = verdict.problems.append
    if record["version"] != version:
        complain(f"{where} ran under table {record['version']}, not {version}")
        return
    if entry != asked:
        complain(f"{where}: the table's entry reads {entry}, not {asked} (algorithm, protocol, channels, chunk)")
        return
    if record["flags"] & AGGREGATE:
        complain(f"{where} was joined with a decision of other bytes")
        return
    used = (int(record["algo"]), int(record["proto"]))
    applied = bool(record["flags"] & APPLIED)
    if step.refused:
        if applied or used == (asked_algo, asked_proto):
            complain(f"{where} used {action.name}, which NCCL does not offer")
        return
    if not applied:
        if asked_algo in BY_TYPE:
            verdict.refused += 1
        else:
            complain(f"{where}: {action.name} was not applied, though NCCL offers it")
        return
    if action.pair != OWN_PAIR and used != (asked_algo, asked_proto):
        complain(f"{where} asked for {action.name} and got {_pair(*used)}")
    channels = int(record["channels"])
    verdict.channels[channels] += 1
    if asked[2] and used[0] not in OWN_CHANNELS and not 1 <= channels <= asked[2]:
        complain(f"{where} asked for at most {asked[2]} channels and got {channels}")


def _disagreements(by_rank: Sequence[Records]) -> list[str]:
    """Calls that two ranks ran differently. NCCL hangs or corrupts data at such a call."""
    first, *others = by_rank
    found = []
    for rank, records in enumerate(others, start=1):
        _, mine, theirs = np.intersect1d(first["dseq"], records["dseq"], return_indices=True)
        differs = np.zeros(len(mine), bool)
        for name in _AGREED:
            differs |= first[name][mine] != records[name][theirs]
        found += [
            f"ranks 0 and {rank} differ: {_call(first[mine[i]])} and {_call(records[theirs[i]])}"
            for i in np.flatnonzero(differs)[:3]
        ]
    return found


def _call(record: Any) -> str:
    name = Collective(int(record["func"])).name.lower() if record["func"] < len(Collective) else record["func"]
    pair = _pair(int(record["algo"]), int(record["proto"]))
    return f"call {record['dseq']}, {name} of {record['bytes']} bytes, {pair} on {record['channels']} channels"


def _pair(algo: int, proto: int) -> str:
    known = algo < len(Algorithm) and proto < N_PROTOCOLS
    return pair_name(pair_index(algo, proto)) if known else f"algorithm {algo}, protocol {proto}"


def in_force(records: Records) -> dict[int, Action]:
    """Key -> what its last call was asked to do; NCCL's own where nothing was applied."""
    found: dict[int, Action] = {}
    for record in records[records["flags"] & DECIDED != 0]:
        action = Action()
        if record["flags"] & APPLIED:
            algo, proto = int(record["asked_algo"]), int(record["asked_proto"])
            action = Action(
                pair=OWN_PAIR if algo == OWN else pair_index(algo, proto),
                channels=CHANNEL_VALUES.index(int(record["asked_channels"])),
                chunk=CHUNK_VALUES.index(_asked_chunk(record)),
            )
        found[int(record["key"])] = action
    return found


def arrival_corrected_us(by_rank: Sequence[Records], key: int, version: int) -> npt.NDArray[np.float64]:
    """Per call of a key under a table, what it cost without waiting for late ranks; see ``by_the_node``: all ranks are
    on this machine, whatever NCCL takes them for.

    Calls that a rank has no record of are left out.
    """
    parts = []
    for records in by_rank:
        mine = (records["flags"] & DECIDED != 0) & (records["key"] == key) & (records["version"] == version)
        parts.append(collectives_of(records[mine], Clock()))
    n = len(by_rank)
    return np.asarray(by_the_node(Matching().take(parts, n), range(n), n, 1)["least_ns"] / 1e3)


def keyed(cases: Sequence[Case], actions: Mapping[int, Action]) -> dict[str, Action]:
    """Case name -> action, for reports."""
    return {case.name: actions.get(case.key, Action()) for case in cases}
