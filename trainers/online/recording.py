"""``dynamiccl workload record``: the communicators and collectives of a run, as a trace that can be played again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import yaml

from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.config.experiment import recorded
from dynamiccl_ray.errors import DAMAGED, ConfigError, reason
from dynamiccl_ray.keys import key_name, key_parts
from dynamiccl_ray.trainers.online.left import left_coordinator
from dynamiccl_ray.trainers.online.recorder import SCHEMA, read_samples
from dynamiccl_ray.workloads.period import find_step, weighted_order
from dynamiccl_ray.workloads.recorded import MOST_CALLS, RecordedCall, RecordedCommunicator, Trace

_MOST_WEIGHTED: Final = 200
_MOST_NAME: Final = 48

Columns = dict[str, npt.NDArray[Any]]
Call = tuple[str, int, bool]
"""Collective, bytes, grouped."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A trace, and what of the run is not in it."""

    trace: Trace
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class _Heard:
    """What one communicator was called with."""

    name: str
    ranks: int
    nodes: int
    once: tuple[Call, ...] = ()
    step: tuple[Call, ...] = ()
    order: str = "found"
    steps: float = 0.0
    """That were called."""

    @property
    def alike(self) -> tuple[Any, ...]:
        """Equal for communicators that are told apart by a number only."""
        return (self.name.rstrip("0123456789") or "comm", self.ranks, self.nodes, self.once, self.step, self.order)


def record_run(run: Path) -> Recorded:
    """Raises ConfigError if ``run`` is not a run, or nothing was measured in it."""
    name = recorded(run / "experiment.json").name
    comms = left_coordinator(run).comms
    try:
        return _record(run, name, comms, read_samples(run))
    except ConfigError:
        raise
    except OSError as e:
        raise ConfigError(f"{run / 'samples.parquet'}: cannot be read: {reason(e)}") from None
    except DAMAGED as e:
        raise ConfigError(f"{run / 'samples.parquet'}: damaged: {reason(e)}; record another run") from None


def _record(run: Path, name: str, comms: Mapping[int, Communicator], samples: Columns) -> Recorded:
    if missing := [column for column in SCHEMA.names if column not in samples]:
        path = run / "samples.parquet"
        raise ConfigError(f"{path}: no column {missing[0]!r}: written by an older version; record a run of this one")
    notes: list[str] = []
    heard = []
    half = 0.0 if not len(samples["epoch"]) else (int(samples["epoch"].min()) + int(samples["epoch"].max())) / 2
    for comm_id in sorted({*samples["comm"].tolist(), *comms}, key=lambda c: comms[c].number if c in comms else -1):
        if comm_id not in comms:
            notes.append(f"communicator {comm_id:016x} is left out: the run's checkpoint does not know its ranks")
            continue
        of = {column: values[samples["comm"] == comm_id] for column, values in samples.items()}
        if (one := _heard(comms[comm_id], of, half, notes)) is not None:
            heard.append(one)
    if not any(one.step for one in heard):
        raise ConfigError(f"{run}: nothing to record: {'; '.join(notes) or 'no collective was called again and again'}")
    return Recorded(
        trace=Trace(kind="trace", name=name, communicators=tuple(sorted(_joined(heard), key=lambda c: c.name))),
        notes=notes,
    )


def write_trace_yaml(trace: Trace, path: Path) -> None:
    """Raises ConfigError where it cannot be written."""
    raw = trace.model_dump(mode="json", exclude_defaults=True)
    text = yaml.dump(raw, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    try:
        path.write_text(text)
    except OSError as e:
        raise ConfigError(f"--out {path}: cannot be written: {e.strerror}") from None


class _Dumper(yaml.SafeDumper):
    """A call is a line."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        return super().represent_mapping(tag, mapping, flow_style="collective" in mapping)

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _heard(comm: Communicator, of: Columns, half: float, notes: list[str]) -> _Heard | None:
    member = comm.example
    name = member.name or f"{member.comm:016x}"
    number, first = np.unique(of["dseq"], return_index=True)
    key, nbytes = of["key"][first].astype(np.int64), of["bytes"][first].astype(np.int64)
    for unmeasured in np.setdiff1d(comm.keys, key).tolist():
        notes.append(f"{name}: {key_name(unmeasured)} is left out: none of its calls was measured by all ranks")
    if not len(number):
        return None
    if member.ranks < 2:
        notes.append(f"{name} is left out: it has one rank")
        return None
    if missing := int(number[-1] - number[0]) + 1 - len(number):
        notes.append(f"{name}: {missing} of {missing + len(number)} calls were not measured by all ranks")
    parts = [key_parts(k) for k in key.tolist()]
    grouped = of["aggregate"][first].tolist()
    calls = [(p[0].name.lower(), b, g) for p, b, g in zip(parts, nbytes.tolist(), grouped, strict=True)]
    symbols = {call: at for at, call in enumerate(dict.fromkeys(calls))}
    symbol = np.array([symbols[call] for call in calls])
    shape: dict[str, Any] = {"name": member.name[:_MOST_NAME], "ranks": member.ranks, "nodes": member.nodes}
    if of["epoch"].max() < half and len(calls) <= MOST_CALLS:
        return _Heard(**shape, once=tuple(calls))
    return _steps(shape, name, number, symbol, list(symbols), notes)


def _steps(
    shape: dict[str, Any], name: str, number: Int64, symbol: Int64, calls: list[Call], notes: list[str]
) -> _Heard | None:
    found = find_step(number, symbol)
    span = int(number[-1] - number[0]) + 1
    if found is None or len(found.symbols) > MOST_CALLS:
        order = weighted_order(np.bincount(symbol), _MOST_WEIGHTED)
        notes.append(f"{name}: its calls repeat in no order that was found; {len(calls)} kinds are spread by frequency")
        return _Heard(**shape, step=tuple(calls[s] for s in order), order="weighted", steps=span / len(order))
    before, later = symbol[number < found.first], symbol[number >= found.first]
    outside = int(np.count_nonzero(~np.isin(later, found.symbols)))
    # What is missing from the start was called by nobody, or by a job that was joined later.
    whole = number[0] == 1 and len(before) == found.first - 1 <= MOST_CALLS
    if extra := outside + (0 if whole else len(before)):
        notes.append(f"{name}: {extra} calls are left out: they are of no step")
    steps = (int(number[-1]) - found.first + 1) / len(found.symbols)
    once = tuple(calls[s] for s in before) if whole else ()
    return _Heard(**shape, once=once, step=tuple(calls[s] for s in found.symbols), steps=steps)


def _joined(heard: Sequence[_Heard]) -> Iterator[RecordedCommunicator]:
    """Those that are alike are one entry."""
    groups: dict[tuple[Any, ...], list[_Heard]] = {}
    for one in heard:
        groups.setdefault(one.alike, []).append(one)
    fewest = min(one.steps for one in heard if one.step)
    taken: set[str] = set()
    for (stem, ranks, nodes, once, step, order), same in groups.items():
        name = same[0].name if len(same) == 1 and same[0].name else stem
        entry = {"ranks": ranks, "nodes": nodes, "once": _calls(once), "step": _calls(step), "order": order}
        entry |= {"count": len(same), "repeat": max(1, round(float(np.median([s.steps for s in same])) / fewest))}
        while taken & {*(found := RecordedCommunicator(name=name, **entry)).names}:
            name = f"{name[: _MOST_NAME - 1]}-"
        taken |= {*found.names}
        yield found


def _calls(calls: Sequence[Call]) -> tuple[RecordedCall, ...]:
    return tuple(
        RecordedCall(collective=collective, bytes=nbytes, grouped=grouped, times=len(list(same)))  # type: ignore[arg-type]
        for (collective, nbytes, grouped), same in groupby(calls)
    )
