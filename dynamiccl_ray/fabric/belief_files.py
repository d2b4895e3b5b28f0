"""Communicators read from a file, and what NCCL believes of them written to files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.communicator import CommunicatorInfo, Graph
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol

_flag: Final = {"0": False, "1": True}.__getitem__
_Columns = dict[str, Callable[[str], Any]]
_COMMUNICATOR_COLUMNS: Final[_Columns] = {
    **dict.fromkeys(("nodes", "ranks", "compcap", "nvswitches"), int),
    **dict.fromkeys(("collnet", "nvls", "tree_pattern_is_tree"), _flag),
    "cpu_vendor": str,
}
_GRAPH_COLUMNS: Final[_Columns] = {
    **dict.fromkeys(("bw_intra", "bw_inter", "latency_inter"), float),
    **dict.fromkeys(("channels", "type_intra", "type_inter"), int),
    "same_channels": _flag,
}
_COLUMNS: Final = ("case", "algo", *_COMMUNICATOR_COLUMNS, *_GRAPH_COLUMNS)
_ALGORITHMS: Final = {a.name.lower(): a for a in Algorithm}


def read_cases(path: Path) -> dict[str, CommunicatorInfo]:
    """Communicators by name from a CSV with one row per (case, algorithm), in the file's order.

    Raises ValueError, naming the file and the case, for a missing column or value, one that does not parse,
    an algorithm that is unknown, missing or repeated, rows that disagree, or a communicator that cannot be.
    """
    cases: dict[str, list[dict[str, str]]] = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file, restval="")
        if missing := [c for c in _COLUMNS if c not in (reader.fieldnames or ())]:
            raise ValueError(f"{path}: no column {', '.join(missing)}; the columns are {','.join(_COLUMNS)}")
        for row in reader:
            cases.setdefault(row["case"], []).append(row)
    communicators = {}
    for case, rows in cases.items():
        try:
            communicators[case] = _communicator(rows)
        except ValueError as error:
            raise ValueError(f"{path}, case {case!r}: {error}") from error
    return communicators


def _communicator(rows: list[dict[str, str]]) -> CommunicatorInfo:
    names = [row["algo"] for row in rows]
    if sorted(names) != sorted(_ALGORITHMS):
        raise ValueError(f"algo is {','.join(names)}; it must be each of {','.join(_ALGORITHMS)} once")
    shared, *others = (_parse(row, _COMMUNICATOR_COLUMNS) for row in rows)
    if wrong := [other for other in others if other != shared]:
        raise ValueError(f"rows have {shared} and {wrong[0]}; they must agree")
    graphs = {_ALGORITHMS[row["algo"]]: Graph(**_parse(row, _GRAPH_COLUMNS)) for row in rows}
    return CommunicatorInfo(compute_capability=shared.pop("compcap"), graphs=graphs, **shared)


def _parse(row: Mapping[str, str], columns: _Columns) -> dict[str, Any]:
    fields = {}
    for column, kind in columns.items():
        try:
            fields[column] = kind(row[column])
        except (ValueError, KeyError):
            valid = {int: "a whole number", float: "a number"}.get(kind, "0 or 1")  # type: ignore[call-overload]
            raise ValueError(f"{column} is {row[column]!r}; it must be {valid}") from None
    return fields


def write_belief(cases: Path, out: Path) -> None:
    """Write ``latbw.csv`` and ``choice.csv`` for the communicators in ``cases`` into the directory ``out``.

    ``latbw.csv`` has a row per available (collective, algorithm, protocol). ``choice.csv`` has one per
    collective, pipe_ops of 1 and 4, and power of two from 64 B to 4 GiB, without those where CollNet direct
    wins. Raises what ``read_cases`` does.
    """
    latbw = ["case,collective,algo,proto,max_threads,latency_us,bandwidth_GBps"]
    choice = ["case,collective,bytes,pipe_ops,algo,proto,time_us,channels,warps"]
    pairs = [[f"{a},{p.name.lower()}" for p in Protocol] for a in _ALGORITHMS]
    sizes = 1 << np.arange(6, 33)
    for case, communicator in read_cases(cases).items():
        belief = Belief(communicator)
        for collective in Collective:
            start = f"{case},{collective.name.lower().replace('_', '')}"
            latency, gbps = belief.latency_us[collective], belief.bandwidth_gbps[collective]
            for a, p in np.argwhere(gbps > 0):
                threads = belief.max_threads[a, p]
                latbw.append(f"{start},{pairs[a][p]},{threads},{latency[a, p]:g},{gbps[a, p]:g}")
            for ops in (1, 4):
                best = belief.choose(collective, sizes, ops)
                columns = (best.algorithm, best.protocol, best.time_us, best.channels, best.warps)
                for size, a, p, time, channels, warps in zip(sizes, *columns, strict=True):
                    if a != Algorithm.COLLNET_DIRECT:
                        choice.append(f"{start},{size},{ops},{pairs[a][p]},{time:g},{channels},{warps}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "latbw.csv").write_text("\n".join(latbw) + "\n")
    (out / "choice.csv").write_text("\n".join(choice) + "\n")
