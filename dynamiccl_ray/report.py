"""The report of a run: one HTML file that explains itself, and the same numbers as a table for terminals."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import jinja2
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dynamiccl_ray.actions import Action
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.keys import N_KEYS, bytes_name, key_name, key_parts
from dynamiccl_ray.knobs import pair_name
from dynamiccl_ray.reward import TERMS

Doubles = npt.NDArray[np.float64]

ROLES: Final = {"default": "NCCL's own choice", "vendor": "vendor's tuner", "learned": "learned"}
# Below this size the default's measured times may be late connection set-up (data/measured/README.md).
SMALL_BYTES: Final = 128 << 10
# Differences below this are within what repeats of a measurement differ by.
TIE: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The run up to its first event, or from one event to the next."""

    name: str
    rows: list[dict[str, Any]]
    """Per key what summary.json has, and ``bytes`` and ``group`` (collective) for every kind of run."""
    geomean: dict[str, float]
    """Geometric mean of time over the best static choice, by role; empty where the best is not known."""
    gap_closed: float | None

    @property
    def measured(self) -> list[dict[str, Any]]:
        """Rows of keys that the policy was exploited on and that can be compared with NCCL's own choice."""
        return [r for r in self.rows if r["learned_us"] is not None and r["default_us"] is not None]

    @property
    def reference(self) -> str:
        """What times are divided by: the best static choice where it is known."""
        known = bool(self.rows) and all(r["oracle_us"] is not None for r in self.rows)
        return "oracle_us" if known else "default_us"


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Columns of samples.parquet in the order they were measured, N rows, and what they are compared with."""

    phase: npt.NDArray[np.str_]
    epoch: npt.NDArray[np.int64]
    key: npt.NDArray[np.int64]
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
    stages: list[Stage]
    samples: Samples
    rewards: Rewards

    @property
    def reference_name(self) -> str:
        best = bool(self.stages) and self.stages[0].reference == "oracle_us"
        return "best static choice" if best else "NCCL's own choice"


def write_report(run: Path) -> Path:
    """Writes report.html and summary.png into the directory of a finished run and returns the page's path.

    The page needs no other file. Whatever the run lacks (events, an oracle, exploitation, samples) is said there.
    Raises ConfigError if ``run`` is not the directory of a finished run.
    """
    # Matplotlib takes a second to import, which tables in a terminal need not pay for.
    from dynamiccl_ray.report_plots import draw

    data = read_run(run)
    figures = draw(data)
    if "summary" in figures:
        (run / "summary.png").write_bytes(figures["summary"])
    page = run / "report.html"
    page.write_text(_render(data, figures), encoding="utf-8")
    return page


def read_run(directory: Path) -> Run:
    """Reads what ``trainers.online.run_online`` wrote. Raises ConfigError if it is not all there."""
    summary = _read_json(directory, "summary.json")
    experiment = _read_json(directory, "experiment.json")
    if "kind" not in experiment.get("fabric", {}):
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
        )
    except KeyError as e:
        raise ConfigError(
            f"{directory / 'summary.json'}: {e} is missing; was it written by another version of DynamICCL-Ray?"
        ) from None


def terminal_table(summary: dict[str, Any]) -> Table:
    """Per key: times in us, speedup and actions; then geometric means. Takes a summary or an entry of its ``after``."""
    rows = summary["keys"]
    vendor = any(r.get("vendor_us") is not None for r in rows)
    title = f"after {summary['event']}" if "event" in summary else str(summary.get("name", "run"))
    table = Table(
        title=title,
        title_style="bold",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    # A run of one collective names it once.
    kinds = {row["key"].partition("/")[0] for row in rows}
    table.add_column(kinds.pop() if len(kinds) == 1 else "key", no_wrap=True)
    for name in ("NCCL", *(("vendor",) if vendor else ()), "learned", "best", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("configuration", no_wrap=True)
    for row in rows:
        exploited = row["learned_us"] is not None
        times = [row["default_us"], *((row.get("vendor_us"),) if vendor else ()), row["learned_us"], row["oracle_us"]]
        action, best = (row["action"] if exploited else "-"), row.get("oracle_action", "-")
        agrees = exploited and action == best
        table.add_row(
            row["key"] if kinds else row["key"].partition("/")[2],
            *(_time(t) for t in times),
            _speedup_text(speedup(row)),
            Text(action, style="green") if agrees or best == "-" else Text(f"{action}, best {best}", style="yellow"),
        )
    table.add_section()
    means = summary["geomean_vs_oracle"] or {}
    shown = ["default", *(("vendor",) if vendor else ()), "learned"]
    table.add_row(
        Text("over best", style="bold"),
        *(Text(f"{means[m]:.3f}x" if m in means else "-", style="bold") for m in shown),
        Text("1.000x" if means else "-", style="bold"),
        _speedup_text(mean_speedup(rows), bold=True),
        "geometric means",
    )
    return table


def _time(us: float | None) -> str:
    """Three significant digits with a unit: narrow enough for a terminal of 80 columns."""
    if us is None:
        return "-"
    for scale, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= scale:
            return f"{us / scale:.3g}{unit}"
    return f"{us:.3g}us"


def speedup(row: dict[str, Any]) -> float | None:
    """NCCL's own time over the learned time of a key."""
    if row["learned_us"] is None or row["default_us"] is None:
        return None
    return float(row["default_us"] / row["learned_us"])


def mean_speedup(rows: list[dict[str, Any]]) -> float | None:
    """Geometric mean over the keys that have one."""
    known = [s for s in map(speedup, rows) if s is not None]
    return float(np.exp(np.mean(np.log(known)))) if known else None


# ---- reading ----


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(
            f"{directory}: not the directory of a finished run: cannot read {name}: {e.strerror}; "
            "give the directory that `dynamiccl online` printed, after the run has ended"
        ) from None
    except ValueError as e:
        raise ConfigError(f"{path}: damaged: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _stage(name: str, result: dict[str, Any]) -> Stage:
    numbers = {key_name(k): k for k in range(N_KEYS)}
    rows = []
    for row in result["keys"]:
        if row["key"] not in numbers:
            raise ConfigError(f"summary.json: unknown key {row['key']!r}; expected names like all_reduce/64KiB")
        collective, pipelined, nbytes = key_parts(numbers[row["key"]])
        group = collective.name.lower().replace("_", "-") + (" (pipelined)" if pipelined else "")
        rows.append({"bytes": nbytes, "group": group, "number": numbers[row["key"]], **row})
    rows.sort(key=lambda r: r["number"])
    return Stage(name=name, rows=rows, geomean=result["geomean_vs_oracle"] or {}, gap_closed=result["gap_closed"])


def _read_samples(directory: Path, events: list[dict[str, Any]], stages: list[Stage]) -> Samples:
    columns = ["phase", "epoch", "key", "dseq", "time_us"]
    try:
        table = pq.read_table(directory / "samples.parquet", columns=columns)
    except OSError as e:
        raise ConfigError(f"{directory}: cannot read samples.parquet: {e}") from None
    except ValueError as e:
        raise ConfigError(f"{directory / 'samples.parquet'}: not the samples of a run: {e}") from None
    read = {name: table[name].to_numpy() for name in columns}
    dseq, key = read["dseq"].astype(np.int64), read["key"].astype(np.int64)
    stage = np.searchsorted([e["at"] for e in events], dseq, side="right").astype(np.int64)
    return Samples(
        phase=read["phase"].astype(np.str_),
        epoch=read["epoch"].astype(np.int64),
        key=key,
        dseq=dseq,
        time_us=read["time_us"].astype(np.float64),
        stage=stage,
        reference_us=_per_sample(stages, stage, key, None),
        default_us=_per_sample(stages, stage, key, "default_us"),
    )


def _read_rewards(directory: Path) -> Rewards:
    """Empty for a run that an earlier version wrote."""
    path = directory / "rewards.parquet"
    if not path.exists():
        return Rewards(epoch=np.zeros(0, np.int64), phase=np.zeros(0, np.str_), terms={})
    try:
        table = pq.read_table(path, columns=["epoch", "phase", "keys", "reward", *TERMS])
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: not the rewards of a run: {e}") from None
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


def _per_sample(
    stages: list[Stage], stage: npt.NDArray[np.int64], key: npt.NDArray[np.int64], name: str | None
) -> Doubles:
    """A column of the stages' rows for each sample; their reference without ``name``."""
    known = np.full((len(stages), N_KEYS), np.nan)
    for index, s in enumerate(stages):
        for row in s.rows:
            value = row[name or s.reference]
            known[index, row["number"]] = np.nan if value is None else value
    return known[stage, key]


# ---- the page ----


def page_environment(filters: Mapping[str, Callable[..., str]]) -> jinja2.Environment:
    """The package's templates, with these filters beside those that all pages use: ratio, times, count and bytes."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (files("dynamiccl_ray") / "templates" / name).read_text("utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    common: dict[str, Callable[..., str]] = {
        "ratio": lambda x: "-" if x is None else f"{x:.3f}",
        "times": lambda x: "-" if x is None else f"{x:.2f}\u00d7",
        "count": lambda n: f"{n:,}",
        "bytes": bytes_name,
    }
    environment.filters |= {**common, **filters}
    return environment


def inlined(figures: Mapping[str, bytes]) -> dict[str, str]:
    """PNGs in base64, for data URLs."""
    return {name: base64.b64encode(data).decode("ascii") for name, data in figures.items()}


def _render(run: Run, figures: dict[str, bytes]) -> str:
    environment = page_environment({"us": _us, "verdict": _verdict})
    return environment.get_template("report.html.j2").render(
        run=run,
        summary=run.summary,
        experiment=run.experiment,
        stages=run.stages,
        roles=ROLES,
        images=inlined(figures),
        detections=detections(run.summary),
        safety=_safety(run),
        means=[(s, *_means(s)) for s in run.stages],
        small=SMALL_BYTES,
        speedup=speedup,
        mean_speedup=mean_speedup,
        tally=_tally,
        own=pair_name(Action().pair),
        terms=TERMS,
        settings=json.dumps(run.experiment, indent=2),
    )


def detections(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Per event: its name, the collectives until its alarm (None without one), and the key that raised it."""
    found: list[dict[str, Any]] = []
    edges = [e["at"] for e in summary["events"]] + [2**62]
    for event, end in zip(summary["events"], edges[1:], strict=True):
        alarms = [a for a in summary["alarms"] if event["at"] <= a["dseq"] < end]
        first = alarms[0] if alarms else None
        found.append(
            {
                "name": event["name"],
                "delay": first["dseq"] - event["at"] if first else None,
                "key": key_name(first["key"]) if first else None,
                "own": summary["detection_delay_key_samples"] if first and not found else None,
                "further": max(0, len(alarms) - 1),
            }
        )
    return found


def _safety(run: Run) -> dict[str, Any]:
    """What the agreement box says, as numbers; None where the run cannot know."""
    fabric = run.experiment.get("fabric", {})
    processes = fabric.get("processes")
    ranks = processes["nodes"] * processes["ranks_per_node"] if processes else None
    first = min((e["at"] for e in run.summary["events"]), default=2**62)
    return {
        "ranks": ranks,
        "calls": int(run.samples.dseq.max(initial=0)),
        "false_alarms": sum(a["dseq"] < first for a in run.summary["alarms"]),
        "controlled": fabric.get("kind") != "nccl",
    }


def _means(stage: Stage) -> tuple[dict[str, float], dict[str, float], int]:
    """Geometric means of time over the best: of all keys, of those from ``SMALL_BYTES``, and how many are smaller."""
    rows = [r for r in stage.rows if r["oracle_us"] is not None and r["learned_us"] is not None]
    large = [r for r in rows if r["bytes"] >= SMALL_BYTES]
    means = {
        role: float(np.exp(np.mean([np.log(r[f"{role}_us"] / r["oracle_us"]) for r in large])))
        for role in ROLES
        if large and all(r.get(f"{role}_us") is not None for r in large)
    }
    return {role: stage.geomean[role] for role in ROLES if role in stage.geomean}, means, len(rows) - len(large)


def _tally(stage: Stage) -> tuple[int, int, int]:
    """Keys on which the learned choice is faster than NCCL's own, as fast within ``TIE``, and slower."""
    verdicts = [_verdict(speedup(r)) for r in stage.rows]
    return verdicts.count("faster"), verdicts.count("same"), verdicts.count("slower")


def _verdict(ratio: float | None) -> str:
    if ratio is None:
        return "unknown"
    return "faster" if ratio > 1 + TIE else "slower" if ratio < 1 - TIE else "same"


def _us(time_us: float | None) -> str:
    """Four significant digits below 10 ms, whole us above."""
    if time_us is None:
        return "-"
    return f"{time_us:,.0f}" if time_us >= 1000 else f"{time_us:.4g}"


def _speedup_text(ratio: float | None, *, bold: bool = False) -> Text:
    if ratio is None:
        return Text("-")
    style = {"faster": "green", "slower": "red"}.get(_verdict(ratio), "")
    return Text(f"{ratio:.2f}x", style=f"bold {style}".strip() if bold or style else style)
