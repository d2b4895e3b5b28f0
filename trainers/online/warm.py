"""What earlier runs left, read as a prior of the next one: Parquet alone, and every value of it checked.

``decisions.parquet`` is what is read: a decision's mean, without outliers, next to what NCCL's own choice took at that
time. It is a fraction of ``samples.parquet``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dynamiccl_ray.actions import N_ACTIONS, action_of
from dynamiccl_ray.agent.earlier import Decisions, Earlier, Record, record
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.errors import DAMAGED, ConfigError, reason, short
from dynamiccl_ray.keys import N_KEYS
from dynamiccl_ray.trainers.online.recorder import DECISION_SCHEMA, distinct, part_files

_TABLE: Final = "decisions.parquet"
_COLUMNS: Final = (
    *("unix_s", "comm", "ranks", "nodes", "name", "key", "phase", "action", "samples", "got_us", "own_us"),
)
# Of one run: decisions that are read, the last ones; bytes that they take in memory; files that hold them; keys of all
# communicators, 3 KiB each once they are read.
MOST_ROWS: Final = 2_000_000
MOST_BYTES: Final = 1 << 29
MOST_FILES: Final = 100_000
MOST_KEYS: Final = 1 << 18
MOST_NAME: Final = 256
# A short file may repeat a long text in every row: of these each different one is read once.
_TEXTS: Final = ("name", "action")
_TYPES: Final = {name: DECISION_SCHEMA.field(name).type for name in _COLUMNS}
_READ_AS: Final = _TYPES | {name: pa.dictionary(pa.int32(), pa.string()) for name in _TEXTS}
# Times that may be: of what was decided and not tried, and of NCCL's own choice before it was measured.
_UNKNOWN: Final = ("got_us", "own_us")
# Kinds of communicators that a message names.
_SHOWN: Final = 4
# Where no communicator of a run has fewer than one collective.
_MOST_US: Final = 1e12


def read_earlier(directories: Sequence[Path]) -> Earlier:
    """What runs have learned that wrote to these directories. Raises ConfigError for one that is no run's, is damaged,
    or was written by another version."""
    runs = [_run(directory) for directory in distinct(directories)]
    return Earlier([records for _, records in sorted(runs, key=lambda run: -run[0])])


def unlike(earlier: Earlier, job: Collection[tuple[int, int, str]]) -> str | None:
    """That earlier runs say nothing of a job, by ranks, nodes and name of its communicators; None where they do."""
    if any(earlier.fits(*of) for of in job):
        return None
    recorded = earlier.recorded
    if not recorded:
        return "warm: the earlier runs have tried nothing but NCCL's own choice; this run begins cold"
    count = "1 communicator" if len(recorded) == 1 else f"{len(recorded)} communicators"
    return (
        f"warm: none of the job's communicators ({_shapes(job)}) is like one of the earlier runs' {count} "
        f"({_shapes(recorded)}), in ranks, nodes and name; this run begins cold"
    )


def _shapes(communicators: Collection[tuple[int, int, str]]) -> str:
    """Ranks, nodes and name of each kind; of many kinds some."""
    kinds = sorted(set(communicators))
    words = [f"{ranks} ranks on {nodes} nodes{f', {short(name)}' if name else ''}" for ranks, nodes, name in kinds]
    return "; ".join([*words[:_SHOWN], *([f"and {len(words) - _SHOWN} more kinds"] if len(words) > _SHOWN else [])])


def _run(directory: Path) -> tuple[float, list[Record]]:
    """When a run ended, in Unix seconds, and a record of each of its communicators of which it says anything."""
    table = _read(directory)
    if table is None:
        return 0.0, []
    try:
        columns = {name: table[name].to_numpy() for name in _COLUMNS if name not in ("name", "phase", "action")}
        flat = {action_of(action).name: action for action in range(N_ACTIONS)}
        columns["action"] = _numbered(table, "action", flat)
        columns["phase"] = _numbered(table, "phase", {phase.name.lower(): phase.value for phase in Phase})
        names, at = _encoded(table, "name")
        columns["name"] = np.array(names, object)[at]
        _check(columns)
        order = np.argsort(columns["comm"], kind="stable")
        edges = 1 + np.flatnonzero(np.diff(columns["comm"][order]))
        comms = [_communicator(columns, rows) for rows in np.split(order, edges)]
        said = [of for of in comms if np.isfinite(of.ratio).any()]
    except DAMAGED as e:
        raise ConfigError(f"warm: {directory / _TABLE}: damaged: {reason(e)}; leave it out") from None
    return float(columns["unix_s"].max()), said


def _read(directory: Path) -> pa.Table | None:
    """The last decisions of a run; None of a run that made none."""
    try:
        files = part_files(directory, _TABLE)[-MOST_FILES:]
        tables: list[pa.Table] = []
        rows = nbytes = 0
        for path in reversed(files):
            if not path.is_file():
                raise ValueError(f"{path.name} is no file")
            file = pq.ParquetFile(path, read_dictionary=_TEXTS)
            _check_version(path, file.schema_arrow)
            rows += file.metadata.num_rows
            groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
            nbytes += sum(group.total_byte_size for group in groups)
            if tables and (rows > MOST_ROWS or nbytes > MOST_BYTES):
                break
            if rows > MOST_ROWS or nbytes > MOST_BYTES:
                raise ValueError(f"{path.name} has {rows} rows in {nbytes} bytes, more than a run writes to a file")
            tables.append(file.read(columns=list(_COLUMNS)))
    except ConfigError as e:
        raise ConfigError(f"warm: {e}") from None
    except DAMAGED as e:
        raise ConfigError(f"warm: {directory / _TABLE}: damaged: {reason(e)}; leave it out") from None
    table = pa.concat_tables(tables[::-1])
    return table if len(table) else None


def _check_version(path: Path, schema: pa.Schema) -> None:
    for name in _COLUMNS:
        if name not in schema.names or schema.field(name).type != _READ_AS[name]:
            raise ConfigError(
                f"{path}: written by another version of DynamICCL-Ray: no column {name!r} of type "
                f"{_TYPES[name]}; leave it out, or run it again"
            )


def _encoded(table: pa.Table, name: str) -> tuple[list[str], Int64]:
    """The different values of a column, and which of them each row has. Raises ValueError where one has none."""
    if table[name].null_count:
        raise ValueError(f"a decision has no {name}")
    one = table[name].unify_dictionaries().combine_chunks()
    return one.dictionary.to_pylist(), one.indices.to_numpy().astype(np.int64)


def _numbered(table: pa.Table, name: str, numbers: dict[str, int]) -> Int64:
    """The number of each value; a ValueError for one that has none."""
    values, at = _encoded(table, name)
    if unknown := [value for value in values if value not in numbers]:
        raise ValueError(f"{short(repr(unknown[0]))} is unknown")
    return np.asarray(np.array([numbers[value] for value in values], np.int64)[at])


def _check(columns: dict[str, npt.NDArray[Any]]) -> None:
    """ValueError for what no run writes; a time that is not known is NaN."""
    longest = max(set(columns["name"].tolist()), key=len)
    if len(longest) > MOST_NAME:
        raise ValueError(f"a communicator's name has {len(longest)} characters, of at most {MOST_NAME}")
    valid = {
        "unix_s": (0, 1e11),
        "comm": (0, 2.0**64),
        "ranks": (1, 1 << 22),
        "nodes": (1, 1 << 22),
        "key": (0, N_KEYS - 1),
        "samples": (1, 1 << 31),
        "got_us": (1e-3, _MOST_US),
        "own_us": (1e-3, _MOST_US),
    }
    for name, (least, most) in valid.items():
        # What is null is a float's NaN.
        values = columns[name].astype(np.float64)
        wrong = ~((values >= least) & (values <= most))
        if name in _UNKNOWN:
            wrong &= ~np.isnan(values)
        if wrong.any():
            raise ValueError(f"{name} is {values[wrong][0]:g}")
    comm, key = columns["comm"], columns["key"].astype(np.int64)
    keys = np.unique(np.unique(comm, return_inverse=True)[1] * N_KEYS + key)
    if len(keys) > MOST_KEYS:
        raise ValueError(f"it has {len(keys)} keys, more than the {MOST_KEYS} that are read")


def _communicator(columns: dict[str, npt.NDArray[Any]], rows: Int64) -> Record:
    of = {name: column[rows] for name, column in columns.items()}
    if len(set(zip(of["ranks"].tolist(), of["nodes"].tolist(), of["name"].tolist(), strict=True))) > 1:
        # A communicator keeps its shape; whoever wrote this did not.
        raise ValueError(f"communicator {of['comm'][0]:x} has several shapes")
    key = of["key"].astype(np.int64)
    return record(
        int(of["ranks"][0]),
        int(of["nodes"][0]),
        str(of["name"][0]),
        Decisions(
            key=key,
            action=of["action"],
            samples=of["samples"].astype(np.float64),
            log_us=np.log(of["got_us"].astype(np.float64)),
            own_log_us=np.log(of["own_us"].astype(np.float64)),
            anew=_anew(key, of["phase"] == Phase.ADAPT),
        ),
    )


def _anew(key: Int64, adapts: npt.NDArray[np.bool_]) -> Int64:
    """(N,) how often the key of each decision had begun to learn anew by then."""
    order = np.argsort(key, kind="stable")
    key, adapts = key[order], adapts[order]
    same = np.append(False, key[1:] == key[:-1])
    began = adapts & ~(np.append(False, adapts[:-1]) & same)
    counts = np.cumsum(began)
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(key))))
    out = np.zeros(len(key), np.int64)
    out[order] = counts - counts[first] + began[first]
    return out
