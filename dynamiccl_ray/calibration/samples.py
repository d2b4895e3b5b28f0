"""Measured times of many machines, as calibration reads them: CSV tables and the logs of nccl-tests.

A row says what was forced and what was left to NCCL. A machine is the rows of one CSV on one kind of hardware, or of
all logs in one directory with one name of GPU, of which NCCL was told the same apart from what was forced: nccl-tests
is run once for each setting.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.calibration.nccl_tests import is_nccl_tests, read_nccl_tests
from dynamiccl_ray.errors import ConfigError, nearest
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

_COLLECTIVES: Final[Mapping[str, int]] = {c.name.lower().replace("_", ""): int(c) for c in Collective}
_UNTUNED: Final = {"alltoall", "alltoallv", "sendrecv", "send", "recv", "gather", "scatter", "hypercube"}
_ALGORITHMS: Final[Mapping[str, int]] = {
    **{a.name.lower().replace("_", ""): int(a) for a in Algorithm},
    "collnet": COLLNET,
    "default": FREE,
}
_PROTOCOLS: Final[Mapping[str, int]] = {**{p.name.lower(): int(p) for p in Protocol}, "default": FREE}
# What the description of a cluster takes.
_MOST_GPUS: Final = 72
_TIMES_US: Final = (1e-3, 1e12)
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
    environment: str
    """What else NCCL was told, as in ``NCCL_NVLS_ENABLE=0``."""
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

    Other files are passed over. They, what cannot be read, and rows that say nothing (of collectives that NCCL's tuner
    never sees, empty messages, wrong results), are counted and left out. Raises ConfigError, naming file, line, column,
    value and what is valid, for a measurement that does not parse, and where nothing is found.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; name one that holds CSV files or logs of nccl-tests")
    rows: dict[tuple[Path, str, str, str, str], list[dict[str, Any]]] = {}
    skipped: Counter[str] = Counter()
    for path in sorted(_files(directory, skipped)):
        of = path if _is_csv(path) else path.parent
        try:
            read = list(_rows(path, directory, skipped))
        except OSError as e:
            skipped[f"{path.name}: cannot be read: {e.strerror}"] += 1
            continue
        for row in read:
            gpu, intra, inter, environment = (row.pop(column) for column in ("gpu", "intra", "inter", "environment"))
            rows.setdefault((of, gpu, intra, inter, environment), []).append(row)
    if not rows:
        why = "".join(f"; left out, {count}: {reason}" for reason, count in skipped.items())
        raise ConfigError(
            f"{directory} holds no measurements; expected CSV files with the columns {','.join(COLUMNS)}, or logs of "
            f"nccl-tests{why}"
        )
    stems = {of: (name or of.resolve().name) if of.is_dir() else of.stem for of, *_ in rows}
    alike = Counter(stems.values())
    called = {
        of: stem if alike[stem] == 1 else str(of.relative_to(directory).parent / stem) for of, stem in stems.items()
    }
    several = Counter(key[0] for key in rows)
    used: Counter[Path] = Counter()
    machines = []
    for (of, gpu, intra, inter, environment), found in rows.items():
        used[of] += 1
        columns = {column: np.array([row[column] for row in found]) for column in found[0]}
        machines.append(
            Machine(
                name=called[of] if several[of] == 1 else f"{called[of]}#{used[of]}",
                file=stems[of],
                gpu=gpu,
                intra=intra,
                inter=inter,
                environment=environment,
                **columns,
            )
        )
    return Library(machines=tuple(machines), skipped=dict(skipped))


def _files(directory: Path, skipped: Counter[str]) -> Iterator[Path]:
    """All below it. A folder that is somebody else's may be closed."""

    def closed(e: OSError) -> None:
        skipped[f"{Path(e.filename).name}: cannot be read: {e.strerror}"] += 1

    for folder, _, names in os.walk(directory, onerror=closed):
        yield from (path for name in names if (path := Path(folder, name)).is_file())


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def _rows(path: Path, within: Path, skipped: Counter[str]) -> Iterable[dict[str, Any]]:
    if _is_csv(path):
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                header = file.readline()
                file.seek(0)
                between = max(",;\t", key=header.count)
                reader = csv.DictReader(file, restval="", delimiter=between, skipinitialspace=True)
                missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
                raw: Iterable[tuple[str, Mapping[str, str]]] = [
                    (f"{path}, line {reader.line_num}", {"environment": "", **row}) for row in reader if not missing
                ]
        except (UnicodeDecodeError, csv.Error) as e:
            raise ConfigError(f"{path} is no CSV file in UTF-8: {e}; save it as one, with commas") from None
        if missing:
            skipped[f"{path.name}: no column {', '.join(missing)}"] += 1
    elif is_nccl_tests(path):
        raw = read_nccl_tests(path, within, skipped)
    else:
        skipped["files that are neither CSV nor a log of nccl-tests"] += 1
        return
    for where, row in raw:
        if any(row.get(None, ())):  # type: ignore[call-overload]
            raise ConfigError(f"{where}: more fields than the header has columns; a comma inside a field needs quotes")
        if (collective := _plain(row["collective"])) in _UNTUNED:
            skipped[f"{path.name}: {row['collective']}, which NCCL's tuner never sees"] += 1
        elif row["bytes"] == "0":
            skipped[f"{path.name}: empty messages"] += 1
        elif row["ranks"] == "1":
            skipped[f"{path.name}: one rank, which has nobody to talk to; was nccl-tests built without MPI=1?"] += 1
        else:
            yield _parse({**row, "collective": collective}, where)


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _parse(row: Mapping[str, str], where: str) -> dict[str, Any]:
    tuner = _TUNER.fullmatch(row["algo"])
    algorithm, protocol = ("default", "default") if tuner else (row["algo"], row["proto"])
    nodes, local = _number(row, "nodes", where), _number(row, "gpus_per_node", where, _MOST_GPUS)
    if nodes * local != (ranks := _number(row, "ranks", where)):
        raise ConfigError(f"{where}: {ranks} ranks, but {nodes} nodes x {local} GPUs; they must be the same")
    return {
        "source": row["source_id"],
        "tuner": tuner[1] if tuner else "",
        "gpu": row["gpu"],
        "intra": row["intra"],
        "inter": row["inter"],
        "environment": row["environment"],
        "collective": _known(row["collective"], "collective", _COLLECTIVES, where),
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
        return values[_plain(value)]
    except KeyError:
        raise ConfigError(
            f"{where}: column {column} is {value!r}; it must be one of {', '.join(values)}{nearest(value, values)}"
        ) from None


def _number(row: Mapping[str, str], column: str, where: str, most: int = 2**62) -> int:
    value = int(row[column]) if row[column].isdecimal() else 0
    if not 1 <= value <= most:
        up_to = "2^62" if most == 2**62 else str(most)
        raise ConfigError(f"{where}: column {column} is {row[column]!r}; it must be a whole number from 1 to {up_to}")
    return value


def _time(value: str, where: str) -> float:
    try:
        time = float(value)
    except ValueError:
        time = 0.0
    if not _TIMES_US[0] <= time <= _TIMES_US[1]:
        raise ConfigError(
            f"{where}: column time_us is {value!r}; it must be a number of microseconds from {_TIMES_US[0]:g} to "
            f"{_TIMES_US[1]:g}"
        )
    return time


def _setting(tuner: str, algorithm: int, protocol: int, channels: int) -> str:
    if tuner:
        return tuner
    if algorithm == FREE and protocol == FREE and not channels:
        return "nccl"
    name = "any" if algorithm == FREE else "collnet" if algorithm == COLLNET else Algorithm(algorithm).name.lower()
    asked = f"{name}/{'any' if protocol == FREE else Protocol(protocol).name.lower()}"
    return f"{asked}/{channels}" if channels else asked
