"""Traces: JSON lines of (time_us, communicator, collective, bytes), written, read as a stream, and replayed.

    {"time_us": 12.5, "communicator": "dp0", "collective": "all_reduce", "bytes": 26214400}

``time_us`` is when the call was made, and never falls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.workloads.calls import CALL, Operation, Stream, StreamCommunicator

OPERATIONS = {o.name.lower(): o for o in Operation}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One line."""

    time_us: float
    communicator: str
    collective: str
    bytes: int


def write_trace(path: Path, calls: Iterable[Call]) -> int:
    """Writes one line per call, checking each as ``read_trace`` would; how many there were."""
    count, last = 0, 0.0
    with path.open("w") as file:
        for count, call in enumerate(calls, start=1):
            last = _check(asdict(call), f"{path}: call {count}", last).time_us
            file.write(json.dumps(asdict(call), allow_nan=False) + "\n")
    return count


def read_trace(path: Path) -> Iterator[Call]:
    """The calls, one line at a time; blank lines are skipped. Raises ConfigError naming the line and the field."""
    last = 0.0
    try:
        with path.open() as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}: line {number}"
                try:
                    raw = json.loads(line)
                except ValueError as e:
                    raise ConfigError(f"{where}: not JSON: {e}") from None
                call = _check(raw, where, last)
                last = call.time_us
                yield call
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the trace: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not text: {e.reason}") from None


def replay(calls: Iterable[Call]) -> Stream:
    """The same representation as a generated workload's: the gap is the time since the call before.

    The time between two calls includes the first one's own, which a trace does not tell apart from compute.
    """
    known: dict[str, int] = {}
    rows: list[tuple[Any, ...]] = []
    last = 0.0
    for call in calls:
        index = known.setdefault(call.communicator, len(known))
        rows.append((index, OPERATIONS[call.collective], call.bytes, call.bytes, call.time_us - last, 0, False, False))
        last = call.time_us
    return Stream(
        communicators=tuple(StreamCommunicator(role=name, ranks=()) for name in known),
        calls=np.array(rows, dtype=CALL),
    )


def record(stream: Stream, start_us: float = 0.0) -> Iterator[Call]:
    """The calls of a stream as a trace of a machine on which communication takes no time."""
    times = start_us + np.cumsum(stream.calls["gap_us"])
    for time_us, call in zip(times.tolist(), stream.calls, strict=True):
        index = int(call["communicator"])
        yield Call(
            time_us=time_us,
            communicator=f"{stream.communicators[index].role}{index}",
            collective=Operation(int(call["operation"])).name.lower(),
            bytes=round(float(call["effective_bytes"])),
        )


def _check(raw: Any, where: str, last_us: float) -> Call:
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected an object, found {type(raw).__name__}")
    fields = set(Call.__dataclass_fields__)
    if raw.keys() != fields:
        missing, unknown = sorted(fields - raw.keys()), sorted(raw.keys() - fields)
        raise ConfigError(f"{where}: fields missing: {missing or 'none'}; unknown: {unknown or 'none'}")
    time_us, name, collective, nbytes = (raw[k] for k in ("time_us", "communicator", "collective", "bytes"))
    if isinstance(time_us, bool) or not isinstance(time_us, (int, float)) or not isfinite(time_us):
        raise ConfigError(f"{where}: time_us = {time_us!r}: expected a number of microseconds")
    if time_us < last_us:
        raise ConfigError(f"{where}: time_us = {time_us!r} is before {last_us!r}; sort the calls by time, from 0")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: communicator = {name!r}: expected a name")
    if not isinstance(collective, str) or collective not in OPERATIONS:
        raise ConfigError(f"{where}: collective = {collective!r}; there are {', '.join(OPERATIONS)}")
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 <= nbytes < 1 << 63:
        raise ConfigError(f"{where}: bytes = {nbytes!r}: expected a whole number that is not negative")
    return Call(time_us=float(time_us), communicator=name, collective=collective, bytes=nbytes)
