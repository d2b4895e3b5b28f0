"""Tables of measured collective times, read from CSV into columns.

One row is one timed (machine, algorithm, protocol, channels, size). What each file holds, where it comes from
and what to be careful about is in ``dynamiccl_ray/data/measured/README.md``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.errors import ConfigError, short
from dynamiccl_ray.knobs import CHANNEL_VALUES, OWN_PAIR, Algorithm, Collective, Protocol, pair_index

FORCED: Final = "forced"
"""The row's pair was asked for."""
NCCL: Final = "nccl"
"""NCCL chose without a tuner."""
VENDOR: Final = "region-tuner"
"""The tuner in AWS's network plugin chose."""
PARTLY: Final = "partly"
"""Only the algorithm or only the protocol was asked for: no single pair has this time."""

# The first size of each of these runs pays for connection set-up and is up to 17 times too slow.
COLD_STARTS: Final = (("ncclgauge-p5en-2025-", 8192),)
"""(start of source_id, bytes) of rows that are dropped when read."""

COLUMNS: Final = (
    *("source_id", "collective", "nodes", "ranks", "gpus_per_node", "gpu", "intra", "inter"),
    *("algo", "proto", "nchannels", "bytes", "time_us"),
)
"""What a file must have, in any order; further columns are ignored."""

_COLLECTIVES: Final[Mapping[str, Collective]] = {c.name.lower(): c for c in Collective}
_ALGORITHMS: Final[Mapping[str, Algorithm]] = {a.name.lower().replace("_", ""): a for a in Algorithm}
_PROTOCOLS: Final[Mapping[str, Protocol]] = {p.name.lower(): p for p in Protocol}
_DEFAULT: Final = re.compile(r"default(?:\(([\w-]+)\))?")


@dataclass(frozen=True, kw_only=True, eq=False)
class Measurements:
    """Columns of equal length, one entry per row."""

    source: NDArray[np.str_]
    machine: NDArray[np.str_]
    """GPU, link inside and link between nodes."""
    collective: NDArray[np.int64]
    nodes: NDArray[np.int64]
    ranks: NDArray[np.int64]
    gpus_per_node: NDArray[np.int64]
    chooser: NDArray[np.str_]
    """Who chose the pair: ``FORCED``, ``NCCL``, ``PARTLY``, or the name of a tuner."""
    pair: NDArray[np.int64]
    """Index of the pair head; ``OWN_PAIR`` unless forced."""
    channels: NDArray[np.int64]
    """Index into ``CHANNEL_VALUES``; 0 where NCCL's own count was used."""
    nbytes: NDArray[np.int64]
    time_us: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.nbytes)

    def where(self, rows: NDArray[np.bool_]) -> Measurements:
        """The rows of a mask of shape (len,)."""
        return Measurements(**{name: column[rows] for name, column in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rows make one surface."""

    collective: Collective
    nodes: int
    ranks: int
    gpus_per_node: int
    sources: tuple[str, ...] = ()
    """Starts of source_id; none: all sources. Runs of different NCCL versions are best kept apart."""

    def __str__(self) -> str:
        of = _shape(self.collective, self.nodes, self.ranks, self.gpus_per_node)
        return f"{of} from sources {', '.join(self.sources)}" if self.sources else of

    def of(self, measurements: Measurements) -> Measurements:
        """The rows. Raises ConfigError where there are none, or they come from machines that differ."""
        m = measurements
        shape = (m.collective, m.nodes, m.ranks, m.gpus_per_node)
        wanted = (int(self.collective), self.nodes, self.ranks, self.gpus_per_node)
        rows = np.logical_and.reduce([column == value for column, value in zip(shape, wanted, strict=True)])
        if self.sources:
            rows &= np.logical_or.reduce([np.char.startswith(m.source, start) for start in self.sources])
        if not rows.any():
            known = "; ".join(sorted({_shape(*of) for of in zip(*shape, strict=True)}))
            sources = short(", ".join(sorted(set(m.source))))
            raise ConfigError(f"{self}: nothing was measured; there are {short(known)}; from sources {sources}")
        if len(machines := sorted(set(m.machine[rows]))) > 1:
            raise ConfigError(f"{self}: measured on several machines; choose sources of one of: {'; '.join(machines)}")
        return m.where(rows)


def _shape(collective: int, nodes: int, ranks: int, gpus_per_node: int) -> str:
    some = "" if ranks == nodes * gpus_per_node else f", {ranks} ranks"
    return f"{Collective(collective).name.lower()} on {nodes} nodes of {gpus_per_node} GPUs{some}"


def read_measurements(paths: Iterable[Path], *, cold_starts: Sequence[tuple[str, int]] = COLD_STARTS) -> Measurements:
    """All rows of some CSV files, without the cold starts.

    Raises ConfigError, naming the file, the line, the column, the value and what is valid, for a file that is
    missing, empty or not a CSV, for a missing column, and for a value that does not parse or is not known.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        found = list(_read(path))
        if not found:
            raise ConfigError(f"{path}: no rows; it must hold at least one measurement")
        rows += found
    kept = [
        row
        for row in rows
        if not any(row["source"].startswith(run) and row["nbytes"] == size for run, size in cold_starts)
    ]
    if not kept:
        raise ConfigError("no measurements: no file was named, or every row is a cold start")
    return Measurements(**{name: np.array([row[name] for row in kept]) for name in kept[0]})


def _read(path: Path) -> Iterable[dict[str, Any]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="", strict=True)
            if missing := [c for c in COLUMNS if c not in (reader.fieldnames or ())]:
                raise ConfigError(f"{path}: no column {', '.join(missing)}; needed are {','.join(COLUMNS)}")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row:
                    raise ConfigError(f"{where}: more values than columns; quote values that contain a comma")
                yield _parse(row, where)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a CSV file of measurements") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}; it must be a CSV in UTF-8") from error


def _parse(row: Mapping[str, str], where: str) -> dict[str, Any]:
    chooser, pair = _choice(row, where)
    channels = 0
    if row["nchannels"]:
        counts = {str(count): index for index, count in enumerate(CHANNEL_VALUES) if count}
        channels = _known(row, "nchannels", counts, where, "empty, ")
    return {
        "source": row["source_id"],
        "machine": ", ".join(row[column] for column in ("gpu", "intra", "inter")),
        "collective": int(_known(row, "collective", _COLLECTIVES, where)),
        "nodes": _count(row, "nodes", where),
        "ranks": _count(row, "ranks", where),
        "gpus_per_node": _count(row, "gpus_per_node", where),
        "chooser": chooser,
        "pair": pair,
        "channels": channels,
        "nbytes": _count(row, "bytes", where),
        "time_us": _time(row, where),
    }


def _choice(row: Mapping[str, str], where: str) -> tuple[str, int]:
    """(chooser, pair) of a row."""
    algorithm, protocol = _DEFAULT.fullmatch(row["algo"]), _DEFAULT.fullmatch(row["proto"])
    if algorithm and protocol:
        if algorithm[1] != protocol[1]:
            raise _error(row, "proto", where, f"{row['algo']!r} as in column algo, or a protocol")
        return algorithm[1] or NCCL, OWN_PAIR
    if (algorithm and algorithm[1]) or (protocol and protocol[1]):
        raise _error(row, "algo" if algorithm else "proto", where, "the same tuner in algo and proto")
    asked = "default, default(tuner), "
    a = None if algorithm else _known(row, "algo", _ALGORITHMS, where, asked)
    p = None if protocol else _known(row, "proto", _PROTOCOLS, where, asked)
    return (PARTLY, OWN_PAIR) if a is None or p is None else (FORCED, pair_index(a, p))


def _known(row: Mapping[str, str], column: str, values: Mapping[str, int], where: str, also: str = "") -> int:
    try:
        return values[row[column].lower()]
    except KeyError:
        raise _error(row, column, where, f"one of {also}{', '.join(values)}") from None


def _count(row: Mapping[str, str], column: str, where: str) -> int:
    try:
        value = int(row[column])
    except ValueError:
        value = 0
    if not 1 <= value < 2**63:
        raise _error(row, column, where, "a whole number from 1 to 2^63 - 1")
    return value


def _time(row: Mapping[str, str], where: str) -> float:
    try:
        value = float(row["time_us"])
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise _error(row, "time_us", where, "a number of microseconds above 0")
    return value


def _error(row: Mapping[str, str], column: str, where: str, valid: str) -> ConfigError:
    return ConfigError(f"{where}: column {column} is {row[column]!r}; it must be {valid}")
