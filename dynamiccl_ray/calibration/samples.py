"""Measured times of many machines, as calibration reads them: CSV tables and the logs of nccl-tests.

A row says what was forced and what was left to NCCL. A machine is the rows of one CSV on one kind of hardware, or of
all logs in one directory with one name of GPU: nccl-tests is run once for each setting.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.calibration.nccl_tests import is_nccl_tests, read_nccl_tests
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

COLUMNS: Final = (
    *("source_id", "collective", "nodes", "ranks", "gpus_per_node", "gpu", "intra", "inter"),
    *("algo", "proto", "nchannels", "bytes", "time_us"),
)
"""What a CSV must have, in any order, to be read as measurements."""

FREE: Final = -1
"""Left to NCCL, or to a tuner."""
COLLNET: Final = 7
"""CollNet, without saying which of the two."""

_COLLECTIVES: Final[Mapping[str, int]] = {c.name.lower(): int(c) for c in Collective}
_ALGORITHMS: Final[Mapping[str, int]] = {
    **{a.name.lower().replace("_", ""): int(a) for a in Algorithm},
    "collnet": COLLNET,
    "default": FREE,
}
_PROTOCOLS: Final[Mapping[str, int]] = {**{p.name.lower(): int(p) for p in Protocol}, "default": FREE}
_TUNER: Final = re.compile(r"default\((.+)\)")


@dataclass(frozen=True, kw_only=True, eq=False)
class Machine:
    """The rows of one machine; every array has one entry per row."""

    name: str
    file: str
    """Without directory and suffix."""
    gpu: str
    intra: str
    inter: str
    source: NDArray[np.str_]
    tuner: NDArray[np.str_]
    """Who chose what was not forced, where it was not NCCL."""
    collective: Int64
    nodes: Int64
    gpus_per_node: Int64
    algorithm: Int64
    """``Algorithm``, ``COLLNET`` or ``FREE``."""
    protocol: Int64
    """``Protocol`` or ``FREE``."""
    channels: Int64
    """0 where NCCL chose."""
    nbytes: Int64
    time_us: Float64

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def ranks(self) -> Int64:
        """Of each row's communicator."""
        return self.nodes * self.gpus_per_node

    def where(self, rows: NDArray[np.bool_]) -> Machine:
        """The rows of a mask."""
        columns: dict[str, Any] = {k: v[rows] for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        return replace(self, **columns)

    @property
    def settings(self) -> NDArray[np.str_]:
        """What was asked for, in words: ``ring/ll``, ``ring/ll/8``, ``nccl``."""
        return np.array(
            [
                _setting(*row)
                for row in zip(
                    self.tuner.tolist(),
                    self.algorithm.tolist(),
                    self.protocol.tolist(),
                    self.channels.tolist(),
                    strict=True,
                )
            ]
        )

    @property
    def forced(self) -> NDArray[np.bool_]:
        """Rows on which a user asked for something."""
        free = (self.algorithm == FREE) & (self.protocol == FREE) & (self.channels == 0)
        return np.asarray(~free, np.bool_)


@dataclass(frozen=True, kw_only=True)
class Library:
    """Everything that was found under a directory."""

    machines: tuple[Machine, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Why -> how many rows, or files, were left out."""


def read_library(directory: Path, name: str | None = None) -> Library:
    """All measurements under a directory: CSV files with ``COLUMNS`` and logs of nccl-tests. ``name``: what the machine
    is called whose logs are there, in place of their directory's name.

    Other files are passed over. Rows of collectives that NCCL's tuner never sees (all-to-all, send) and empty
    messages are counted and left out. Raises ConfigError, naming file, line, column, value and what is valid, for
    a measurement that does not parse, and where nothing is found.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; name one that holds CSV files or logs of nccl-tests")
    rows: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    skipped: Counter[str] = Counter()
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        of = path.stem if path.suffix == ".csv" else name or path.resolve().parent.name
        for row in _rows(path, skipped):
            rows.setdefault((of, row.pop("gpu"), row.pop("intra"), row.pop("inter")), []).append(row)
    if not rows:
        raise ConfigError(
            f"{directory} holds no measurements; expected CSV files with the columns {','.join(COLUMNS)}, or logs of "
            "nccl-tests"
        )
    several = Counter(key[0] for key in rows)
    used: Counter[str] = Counter()
    machines = []
    for (stem, gpu, intra, inter), found in rows.items():
        used[stem] += 1
        name = stem if several[stem] == 1 else f"{stem}#{used[stem]}"
        columns = {column: np.array([row[column] for row in found]) for column in found[0]}
        machines.append(Machine(name=name, file=stem, gpu=gpu, intra=intra, inter=inter, **columns))
    return Library(machines=tuple(machines), skipped=dict(skipped))


def _rows(path: Path, skipped: Counter[str]) -> Iterable[dict[str, Any]]:
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            if missing := [c for c in COLUMNS if c not in (reader.fieldnames or ())]:
                skipped[f"{path.name}: no column {', '.join(missing)}"] += 1
                return
            raw: Iterable[tuple[str, Mapping[str, str]]] = [(f"{path}, line {reader.line_num}", row) for row in reader]
    elif is_nccl_tests(path):
        raw = read_nccl_tests(path)
    else:
        return
    for where, row in raw:
        if row["collective"] not in _COLLECTIVES:
            skipped[f"{path.name}: {row['collective']}, which NCCL's tuner never sees"] += 1
        elif row["bytes"] == "0":
            skipped[f"{path.name}: empty messages"] += 1
        else:
            yield _parse(row, where)


def _parse(row: Mapping[str, str], where: str) -> dict[str, Any]:
    tuner = _TUNER.fullmatch(row["algo"])
    algorithm, protocol = ("default", "default") if tuner else (row["algo"], row["proto"])
    nodes, local = _number(row, "nodes", where), _number(row, "gpus_per_node", where)
    if nodes * local != (ranks := _number(row, "ranks", where)):
        raise ConfigError(f"{where}: {ranks} ranks, but {nodes} nodes x {local} GPUs; they must be the same")
    return {
        "source": row["source_id"],
        "tuner": tuner[1] if tuner else "",
        "gpu": row["gpu"],
        "intra": row["intra"],
        "inter": row["inter"],
        "collective": _COLLECTIVES[row["collective"]],
        "nodes": nodes,
        "gpus_per_node": local,
        "algorithm": _known(algorithm, "algo", _ALGORITHMS, where),
        "protocol": _known(protocol, "proto", _PROTOCOLS, where),
        "channels": _number(row, "nchannels", where) if row["nchannels"] else 0,
        "nbytes": _number(row, "bytes", where),
        "time_us": _time(row["time_us"], where),
    }


def _known(value: str, column: str, values: Mapping[str, int], where: str) -> int:
    try:
        return values[value.lower()]
    except KeyError:
        raise ConfigError(f"{where}: column {column} is {value!r}; it must be one of {', '.join(values)}") from None


def _number(row: Mapping[str, str], column: str, where: str) -> int:
    value = int(row[column]) if row[column].isdecimal() else 0
    if not 1 <= value < 2**62:
        raise ConfigError(f"{where}: column {column} is {row[column]!r}; it must be a whole number from 1 to 2^62")
    return value


def _time(value: str, where: str) -> float:
    try:
        time = float(value)
    except ValueError:
        time = 0.0
    if not 0 < time < float("inf"):
        raise ConfigError(f"{where}: column time_us is {value!r}; it must be a number of microseconds above 0")
    return time


def _setting(tuner: str, algorithm: int, protocol: int, channels: int) -> str:
    if tuner:
        return tuner
    if algorithm == FREE and protocol == FREE and not channels:
        return "nccl"
    name = "any" if algorithm == FREE else "collnet" if algorithm == COLLNET else Algorithm(algorithm).name.lower()
    asked = f"{name}/{'any' if protocol == FREE else Protocol(protocol).name.lower()}"
    return f"{asked}/{channels}" if channels else asked
