"""Published throughputs against the schedule model: errors per row, and whether the order of the schedules is right."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.workloads.network import Network, Networks, load_networks
from dynamiccl_ray.workloads.schedule import DEFAULT_STACK, SCHEDULES, Schedule, predict
from dynamiccl_ray.workloads.stack import Stack

_COLUMNS = ("source", "model", "hardware", "gpus", "quantity", "value", "unit")
_SINGLE = re.compile(r"throughput single GPU, batch (\d+)/GPU")
_MEASURED = re.compile(r"throughput ([\w-]+), batch (\d+)/GPU(?: \(std ([\d.]+)\))?")
_NODES = re.compile(r"\d+ nodes x (\d+)")
# Unknown networks that are named.
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One published throughput and what is needed to predict it."""

    model: str
    network: Network
    gpus: int
    gpus_per_node: int
    schedule: Schedule
    batch: int
    single_gpu_samples_per_s: float
    samples_per_s: float
    std: float

    @property
    def group(self) -> tuple[str, str, int]:
        """Facts that differ in the schedule only."""
        return self.model, self.network.name, self.gpus

    def predicted(self, stack: Stack = DEFAULT_STACK) -> float:
        """Samples per second; fewer GPUs than a node has stay on one node. Nodes are whole."""
        per_node = min(self.gpus, self.gpus_per_node)
        return predict(
            self.model,
            self.schedule,
            self.network,
            self.gpus // per_node,
            per_node,
            self.single_gpu_samples_per_s,
            self.batch,
            stack=stack,
        )


@dataclass(frozen=True, kw_only=True)
class Order:
    """Pairs of schedules within a group. A tie is a pair whose values differ by less than 1% or than the root sum of
    squares of their standard deviations."""

    pairs: int
    right: int
    untied: int
    untied_right: int


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """``errors`` are predicted / measured - 1, in the order of ``facts``."""

    facts: tuple[Fact, ...]
    predicted: tuple[float, ...]
    skipped: tuple[str, ...]
    """Throughputs that cannot be predicted, and why: a line for each row, one for all rows on unknown networks."""

    @property
    def errors(self) -> npt.NDArray[np.float64]:
        measured = np.array([f.samples_per_s for f in self.facts], dtype=np.float64)
        return np.asarray(self.predicted, dtype=np.float64) / measured - 1

    @property
    def median_error(self) -> float:
        """Median of the absolute relative errors."""
        return float(np.median(np.abs(self.errors)))

    @property
    def order(self) -> Order:
        """Over all groups."""
        return order(self.facts, self.predicted)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        found = self.order
        return {
            "rows": [
                {
                    "model": f.model,
                    "network": f.network.name,
                    "gpus": f.gpus,
                    "schedule": f.schedule,
                    "measured_samples_per_s": f.samples_per_s,
                    "predicted_samples_per_s": p,
                    "error": float(e),
                }
                for f, p, e in zip(self.facts, self.predicted, self.errors, strict=True)
            ],
            "median_error": self.median_error,
            "order_accuracy": found.right / max(found.pairs, 1),
            "order_accuracy_without_ties": found.untied_right / max(found.untied, 1),
            "order": asdict(found),
            "skipped": list(self.skipped),
        }


def order(facts: Sequence[Fact], predicted: Sequence[float]) -> Order:
    """Compares every pair of schedules that ran on the same model, network and number of GPUs."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    for index, fact in enumerate(facts):
        groups.setdefault(fact.group, []).append(index)
    pairs = right = untied = untied_right = 0
    for members in groups.values():
        for i, j in combinations(members, 2):
            a, b = facts[i], facts[j]
            gap = a.samples_per_s - b.samples_per_s
            good = gap * (predicted[i] - predicted[j]) > 0
            tie = abs(gap) < max(np.hypot(a.std, b.std), 0.01 * max(a.samples_per_s, b.samples_per_s))
            pairs += 1
            right += good
            untied += not tie
            untied_right += good and not tie
    return Order(pairs=pairs, right=right, untied=untied, untied_right=untied_right)


def read_facts(path: Path, networks: Networks) -> tuple[list[Fact], list[str]]:
    """The throughputs of a facts CSV (columns source, model, hardware, gpus, quantity, value, unit), and what was left
    out and why, in a line for each row and one for all unknown networks. A row without its model's single-GPU row, or
    on an unknown network or schedule, is left out.

    Raises ConfigError naming the file, the line and the field.
    """
    rows = list(_rows(path))
    single: dict[tuple[str, int], float] = {}
    for line, row in rows:
        if found := _SINGLE.fullmatch(row["quantity"]):
            single[row["model"], int(found[1])] = _number(path, line, row, "value")
    facts, skipped = [], []
    unknown: Counter[str] = Counter()
    for line, row in rows:
        found = _MEASURED.fullmatch(row["quantity"])
        if not found:
            continue
        key = row["model"], int(found[2])
        network = networks.find(row["hardware"])
        if network is None:
            unknown[row["hardware"].rsplit(";", 1)[-1].strip()] += 1
        elif found[1] not in SCHEDULES:
            skipped.append(f"line {line}: unknown schedule {found[1]!r} ({', '.join(SCHEDULES)})")
        elif key not in single:
            skipped.append(f"line {line}: no single-GPU throughput of {key[0]} with batch {key[1]}")
        else:
            per_node = _NODES.search(row["hardware"])
            facts.append(
                Fact(
                    model=row["model"],
                    network=network,
                    gpus=int(_number(path, line, row, "gpus")),
                    gpus_per_node=int(per_node[1]) if per_node else networks.default_gpus_per_node,
                    schedule=cast(Schedule, found[1]),
                    batch=key[1],
                    single_gpu_samples_per_s=single[key],
                    samples_per_s=_number(path, line, row, "value"),
                    std=float(found[3] or 0.0),
                )
            )
    if unknown:
        skipped.append(_unknown(unknown, networks))
    return facts, skipped


def reproduce(
    facts_csv: Path | None = None, networks_yaml: Path | None = None, *, stack: Stack = DEFAULT_STACK
) -> Reproduction:
    """Predicts every throughput of a facts file, by default the shipped rows of Shi et al. 2020.

    A network that the package does not know is described by a YAML like ``data/networks.yaml``. Raises ConfigError.
    """
    networks = load_networks(networks_yaml)
    if facts_csv is None:
        with resources.as_file(resources.files("dynamiccl_ray") / "data" / "training" / "shi2020.csv") as shipped:
            facts, skipped = read_facts(shipped, networks)
    else:
        facts, skipped = read_facts(facts_csv, networks)
    if not facts:
        why = "; ".join(skipped) or "no such row"
        raise ConfigError(f"{facts_csv or 'the shipped facts'}: no throughput to predict; left out: {why}")
    return Reproduction(facts=tuple(facts), predicted=tuple(f.predicted(stack) for f in facts), skipped=tuple(skipped))


def _unknown(rows: Counter[str], networks: Networks) -> str:
    """One line for what may be a whole file of rows."""
    known = ", ".join(n.match or n.name for n in networks.networks)
    # Hardware that never names its network may differ in every row.
    most = [repr(name) for name, _ in rows.most_common(_NAMED)]
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return (
        f"rows on unknown networks ({rows.total()}): {', '.join(most)}{more}; known are {known}; "
        "describe yours with `--networks YAML`"
    )


def _rows(path: Path) -> Iterable[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = set(_COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise ConfigError(f"{path}: columns {sorted(missing)} are missing; needed are {', '.join(_COLUMNS)}")
            yield from ((reader.line_num, row) for row in reader)
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the facts: {e.strerror}") from None


def _number(path: Path, line: int, row: dict[str, str], field: str) -> float:
    try:
        value = float(row[field])
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{path}: line {line}: {field} = {row[field]!r}: expected a positive number")
    return value
