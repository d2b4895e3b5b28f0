"""What a report is made from: the files of a finished run, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from dynamiccl_ray.agent.reward import TERMS
from dynamiccl_ray.errors import DAMAGED, ConfigError, reason, short
from dynamiccl_ray.keys import N_KEYS, key_name, key_parts

Doubles = npt.NDArray[np.float64]


ROLES: Final = {"default": "NCCL's own choice", "vendor": "vendor's tuner", "learned": "learned"}


# Differences below this are within what repeats of a measurement differ by.
TIE: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class Regime:
    """The run up to its first event, or from one event to the next."""

    name: str
    rows: list[dict[str, Any]]
    """Per key what summary.json has, and for every kind of run ``bytes``, ``group`` (collective) and ``name``, with the
    communicator where there are several; and ``series``, see ``Samples``."""
    geomean: dict[str, float]
    """Geometric mean of time over the best static choice, by role; empty where the best is not known."""
    gap_closed: float | None

    @property
    def measured(self) -> list[dict[str, Any]]:
        """Rows of keys that the policy was exploited on and that can be compared with NCCL's own choice."""
        return [r for r in self.rows if r["learned_us"] is not None and r["default_us"] is not None]

    @property
    def reference(self) -> str:
        """What times are divided by: the best static choice where it is known of any key; then others are left out."""
        known = any(r["oracle_us"] is not None for r in self.rows)
        return "oracle_us" if known else "default_us"


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Columns of samples.parquet in the order they were measured, N rows, and what they are compared with."""

    phase: npt.NDArray[np.str_]
    epoch: npt.NDArray[np.int64]
    series: npt.NDArray[np.int64]
    """Number of the communicator and key."""
    dseq: npt.NDArray[np.int64]
    time_us: Doubles
    stage: npt.NDArray[np.int64]
    """Index into ``Run.stages``."""
    reference_us: Doubles
    """The stage's reference for the key; NaN where there is none."""
    default_us: Doubles


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """rewards.parquet by epoch, E of them, over all communicators."""

    epoch: npt.NDArray[np.int64]
    """(E,) ascending."""
    phase: npt.NDArray[np.str_]
    """(E,)"""
    terms: dict[str, Doubles]
    """Of each term that had a value, and ``reward``, the sum: (E,) means over keys; NaN where there was none."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that the report is made from."""

    summary: dict[str, Any]
    experiment: dict[str, Any]
    stages: list[Regime]
    samples: Samples
    rewards: Rewards
    coverage: list[tuple[str, int, float]]
    """What became of calls, how many, and their share of all; empty where none were counted."""
    overhead_percent: float | None
    """Of a training process's time, what the plugin took; None where it was not measured."""

    def since(self, event: Mapping[str, Any]) -> npt.NDArray[np.int64]:
        """(N,) collectives from an event to each sample: calls where all ranks have their calls in common, else as
        they were measured.
        """
        if event["by_call"]:
            return self.samples.dseq - int(event["at"])
        return np.arange(len(self.samples.dseq)) - int(np.searchsorted(self.samples.stage, event["phase"]))

    def alarms_since(self, event: Mapping[str, Any]) -> list[int]:
        """Collectives from an event to each alarm after it, as in ``since``."""
        after = [alarm for alarm in self.summary["alarms"] if came_after(alarm["dseq"], alarm["epoch"], event)]
        if event["by_call"]:
            return [alarm["dseq"] - event["at"] for alarm in after]
        since = self.since(event)
        return [int(np.max(since[self.samples.epoch <= alarm["epoch"]], initial=0)) for alarm in after]

    @property
    def reference_name(self) -> str:
        best = bool(self.stages) and self.stages[0].reference == "oracle_us"
        return "best static choice" if best else "NCCL's own choice"


def read_run(directory: Path) -> Run:
    """Reads what ``dynamiccl_ray.trainers.online.run.run_online`` wrote. Raises ConfigError if it is not all there."""
    summary = _read_json(directory, "summary.json")
    experiment = _read_json(directory, "experiment.json")
    fabric = experiment.get("fabric")
    if not isinstance(fabric, dict) or "kind" not in fabric:
        raise ConfigError(f"{directory / 'experiment.json'}: not an online experiment: fabric.kind is missing")
    try:
        events = summary["events"]
        first = f"before {events[0]['name']}" if events else "whole run"
        stages = [_stage(first, summary), *(_stage(f"after {e['event']}", e) for e in summary["after"])]
        return Run(
            summary=summary,
            experiment=experiment,
            stages=stages,
            samples=_read_samples(directory, events, stages),
            rewards=_read_rewards(directory),
            coverage=_coverage(summary.get("coverage", {})),
            overhead_percent=None
            if (percent := summary.get("overhead", {}).get("percent")) is None
            else float(percent),
        )
    except ConfigError:
        raise
    except KeyError as e:
        raise ConfigError(
            f"{directory / 'summary.json'}: {short(str(e))} is missing; was it written by another version of "
            "DynamICCL-Ray?"
        ) from None
    except DAMAGED as e:
        raise ConfigError(
            f"{directory}: damaged, or written by another version of DynamICCL-Ray: {short(repr(e))}"
        ) from None


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(
            f"{directory}: not the directory of a finished run: cannot read {name}: {e.strerror}; "
            "give the directory that `dynamiccl online` printed, after the run has ended"
        ) from None
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: damaged: {reason(e)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _stage(name: str, result: dict[str, Any]) -> Regime:
    numbers = {key_name(k): k for k in range(N_KEYS)}
    rows = []
    several = len({row["comm"] for row in result["keys"]}) > 1
    for row in result["keys"]:
        if row["key"] not in numbers:
            raise ConfigError(
                f"summary.json: unknown key {short(repr(row['key']))}; expected names like all_reduce/64KiB"
            )
        collective, pipelined, nbytes = key_parts(numbers[row["key"]])
        group = collective.name.lower().replace("_", "-") + (" (pipelined)" if pipelined else "")
        of = f"{row['communicator'] or row['comm']} " if several else ""
        series = _series(int(row["comm"], 16), numbers[row["key"]])
        rows.append({"bytes": nbytes, **row, "group": of + group, "name": of + row["key"], "series": series})
    rows.sort(key=lambda r: (r["communicator"] or r["comm"], numbers[r["key"]]))
    return Regime(name=name, rows=rows, geomean=result["geomean_vs_oracle"] or {}, gap_closed=result["gap_closed"])


def _read_samples(directory: Path, events: list[dict[str, Any]], stages: list[Regime]) -> Samples:
    columns = ["comm", "phase", "epoch", "key", "dseq", "time_us"]
    try:
        table = pq.read_table(directory / "samples.parquet", columns=columns)
    except OSError as e:
        raise ConfigError(f"{directory}: cannot read samples.parquet: {reason(e)}") from None
    except ValueError as e:
        raise ConfigError(f"{directory / 'samples.parquet'}: not the samples of a run: {reason(e)}") from None
    read = {name: table[name].to_numpy() for name in columns}
    dseq, epoch = read["dseq"].astype(np.int64), read["epoch"].astype(np.int64)
    pairs, of = np.unique(np.stack([read["comm"], read["key"].astype(np.uint64)], -1), axis=0, return_inverse=True)
    series = np.array([_series(int(comm), int(key)) for comm, key in pairs], np.int64)[of.reshape(-1)]
    stage = np.zeros(len(dseq), np.int64)
    for event in events:
        stage += dseq >= event["at"] if event["by_call"] else epoch >= event["epoch"]
    return Samples(
        phase=read["phase"].astype(np.str_),
        epoch=epoch,
        series=series,
        dseq=dseq,
        time_us=read["time_us"].astype(np.float64),
        stage=stage,
        reference_us=_per_sample(stages, stage, series, None),
        default_us=_per_sample(stages, stage, series, "default_us"),
    )


def _read_rewards(directory: Path) -> Rewards:
    """Empty for a run that an earlier version wrote."""
    path = directory / "rewards.parquet"
    if not path.exists():
        return Rewards(epoch=np.zeros(0, np.int64), phase=np.zeros(0, np.str_), terms={})
    try:
        table = pq.read_table(path, columns=["epoch", "phase", "keys", "reward", *TERMS])
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: not the rewards of a run: {reason(e)}") from None
    epoch, first, of = np.unique(table["epoch"].to_numpy(), return_index=True, return_inverse=True)
    keys, terms = table["keys"].to_numpy().astype(np.float64), {}
    for name in ("reward", *TERMS):
        values = table[name].to_numpy().astype(np.float64)
        weight = np.where(np.isfinite(values), keys, 0.0)
        count = np.bincount(of, weight, len(epoch))
        if count.any():
            total = np.bincount(of, weight * np.nan_to_num(values), len(epoch))
            terms[name] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    phase = table["phase"].to_numpy().astype(np.str_)[first]
    return Rewards(epoch=epoch.astype(np.int64), phase=phase, terms=terms)


def _coverage(counts: dict[str, Any]) -> list[tuple[str, int, float]]:
    """Runs of earlier versions have none."""
    calls = int(counts.get("calls", 0))
    if calls <= 0:
        return []
    rows = {"all": calls, "tuned": counts["tuned"]}
    rows |= {f"bypassed: {cause}": n for cause, n in counts["bypassed"].items()}
    rows |= {"measured": counts["measured"], "not profiled": counts["not_profiled"], "lost": counts["lost"]}
    rows |= {"not heard of": counts["unheard"]}
    return [(what, int(n), int(n) / calls) for what, n in rows.items()]


def _series(comm: int, key: int) -> int:
    """One number for a communicator (64 bits) and a key."""
    return (comm * N_KEYS + key) % (1 << 63)


def _per_sample(
    stages: list[Regime], stage: npt.NDArray[np.int64], series: npt.NDArray[np.int64], name: str | None
) -> Doubles:
    """A column of the stages' rows for each sample; their reference without ``name``."""
    numbers, of = np.unique(series, return_inverse=True)
    at = {int(number): i for i, number in enumerate(numbers)}
    known = np.full((len(stages), len(numbers)), np.nan)
    for index, s in enumerate(stages):
        for row in s.rows:
            value = row[name or s.reference]
            if value is not None and row["series"] in at:
                known[index, at[row["series"]]] = value
    return known[stage, of]


def came_after(dseq: int, epoch: int, event: Mapping[str, Any]) -> bool:
    """Whether an alarm, at this call and in this epoch, belongs to the time since an event."""
    return bool(dseq >= event["at"] if event["by_call"] else epoch >= event["epoch"])


def speedup(row: dict[str, Any]) -> float | None:
    """NCCL's own time over the learned time of a key."""
    if row["learned_us"] is None or row["default_us"] is None:
        return None
    return float(row["default_us"] / row["learned_us"])


def mean_speedup(rows: list[dict[str, Any]]) -> float | None:
    """Geometric mean over the keys that have one."""
    known = [s for s in map(speedup, rows) if s is not None]
    return float(np.exp(np.mean(np.log(known)))) if known else None


def verdict(ratio: float | None) -> str:
    """``faster``, ``slower``, ``same`` within ``TIE``, or ``unknown`` of a speedup."""
    if ratio is None:
        return "unknown"
    return "faster" if ratio > 1 + TIE else "slower" if ratio < 1 - TIE else "same"


def detections(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Per event: its name, the key that raised its alarm (None without one), the collectives until then where calls
    count them, how often that key had been measured by then, and how many alarms followed.
    """
    found: list[dict[str, Any]] = []
    for event, following in zip_longest(summary["events"], summary["events"][1:]):
        alarms = [
            alarm
            for alarm in summary["alarms"]
            if came_after(alarm["dseq"], alarm["epoch"], event)
            and not (following and came_after(alarm["dseq"], alarm["epoch"], following))
        ]
        first = alarms[0] if alarms else None
        found.append(
            {
                "name": event["name"],
                "delay": first["dseq"] - event["at"] if first and event["by_call"] else None,
                "key": key_name(first["key"]) if first else None,
                "own": summary["detection_delay_key_samples"] if first and not found else None,
                "further": max(0, len(alarms) - 1),
            }
        )
    return found
