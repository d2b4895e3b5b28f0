"""The report: one JSON document, and the same in Markdown for people."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import Facts
from dynamiccl_ray.keys import bytes_name

Document = dict[str, Any]


def document(
    *,
    date: str,
    command: str,
    commit: str | None,
    ranks: int,
    facts: Facts,
    environment: dict[str, str],
    sections: dict[str, Any],
    failures: Sequence[dict[str, Any]],
    notes: Sequence[str],
) -> Document:
    """Everything that a run found. ``environment`` has the variables that NCCL and PyTorch read."""
    return {
        "date": date,
        "command": command,
        "commit": commit,
        "ranks": ranks,
        "machine": facts,
        "environment": environment,
        "ok": not failures,
        "failures": list(failures),
        "notes": list(notes),
        "sections": sections,
    }


def name_of(found: Document) -> str:
    """``2026-01-31-nvidia-h100-8ranks``: the file's name without its ending."""
    gpus = found["machine"]["gpus"]
    gpu = re.sub(r"[^a-z0-9]+", "-", (gpus[0]["name"] if gpus else "no-gpu").lower()).strip("-")
    return f"{found['date'][:10]}-{gpu}-{found['ranks']}ranks"


def write(found: Document, directory: Path, name: str) -> tuple[Path, Path]:
    """Writes both and returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = directory / f"{name}.json", directory / f"{name}.md"
    as_json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    as_markdown.write_text(markdown(found))
    return as_json, as_markdown


def free_name(directory: Path, name: str) -> str:
    """``name``, or with a number where a report of that name is there already."""
    taken = {path.stem for path in directory.glob("*.json")} if directory.is_dir() else set()
    numbered = (f"{name}-{n}" for n in range(2, len(taken) + 3))
    return name if name not in taken else next(n for n in numbered if n not in taken)


def markdown(found: Document) -> str:
    """The document for people."""
    lines = [f"# GPU run of {found['date']}", "", *_machine(found), ""]
    lines += [f"**{len(found['failures'])} failures.**" if found["failures"] else "No failure.", ""]
    for failure in found["failures"]:
        lines.append(f"- {failure['section']}: {_line(failure['what'])}")
        if failure.get("repeat"):
            lines.append(
                f"  Repeat: `python benchmarks/gpu/run.py --ranks {found['ranks']} --repeat '{failure['repeat']}'`"
            )
    lines += [*(f"- {note}" for note in found["notes"]), ""]
    for name, render in _SECTIONS.items():
        result = found["sections"].get(name)
        if result is None:
            continue
        lines += [f"## {name}", ""]
        lines += [f"Failed: {_line(result['error'])}"] if "error" in result else render(result)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows),
    ]


def _machine(found: Document) -> list[str]:
    machine = found["machine"]
    gpus = machine["gpus"]
    rows = [
        (
            "GPU",
            f"{len(gpus)} x {gpus[0]['name']}, {gpus[0]['memory'] >> 30} GiB, {gpus[0]['sms']} SMs" if gpus else "-",
        ),
        ("links", machine.get("links", "-")),
        ("driver", machine.get("driver") or "unknown"),
        ("CUDA", machine.get("cuda") or "-"),
        ("NCCL", ".".join(map(str, machine["nccl"])) if machine.get("nccl") else "-"),
        ("PyTorch", machine.get("torch") or "-"),
        ("Python", machine.get("python", "-")),
        ("CPU", f"{machine.get('cores')} x {machine.get('cpu')}"),
        ("MPS", "yes" if machine.get("mps") else "no"),
        ("ranks", found["ranks"]),
        ("commit", found["commit"] or "unknown"),
        ("command", f"`{found['command']}`"),
        ("environment", ", ".join(f"{k}={v}" for k, v in sorted(found["environment"].items())) or "-"),
    ]
    lines = _table(("what", "value"), rows)
    if len(gpus) == 1 and found["ranks"] > 1:
        lines += ["", "All ranks share one GPU and talk over loopback. These times show the mechanism, not a cluster."]
    return lines


def _check(result: Document) -> list[str]:
    rows = [
        ("tables", result["tables"]),
        ("collectives on every rank", result["collectives"]),
        ("wrong results", result["wrong"]),
        ("records compared", result["recorded"]),
        ("calls that NCCL reports no events of", result["unrecorded"]),
        ("records that are missing", result["missing"]),
        ("not offered for the type", result["not_offered_for_type"]),
        ("never offered, and left alone", result["left_alone"]),
        ("tuner and profiler interface", f"v{result['tuner_abi']}, v{result['profiler_abi']}"),
        ("nodes as NCCL sees it", result["nodes"]),
    ]
    lines = _table(("what", "count"), rows)
    lines += ["", *_table(("pair", "collectives"), sorted(result["per_pair"].items()))]
    used = [
        (asked, ", ".join(f"{count} ({n})" for count, n in counts.items()))
        for asked, counts in sorted(result["channels"].items(), key=lambda item: int(item[0]))
    ]
    return [*lines, "", *_table(("channels asked for", "channels used (records)"), used)] if used else lines


def _figure(figures: Document | None) -> str:
    if figures is None:
        return "-"
    return f"{figures['mean']:.1f} ± {figures['std']:.1f}, {figures['p99']:.1f}"


def _action(action: Document) -> str:
    parts = [action["pair"]]
    if action["channels"]:
        parts.append(f"{action['channels']}ch")
    if action["chunk_bytes"]:
        parts.append(f"chunk {bytes_name(action['chunk_bytes'])}")
    return " ".join(parts)


def _measure(result: Document) -> list[str]:
    plan = result["protocol"]
    lines = [
        f"{plan['warmup']} warm-up and {plan['measured']} measured collectives, {plan['runs']} runs. Microseconds: "
        "mean, standard deviation after ±, p99. By the GPU's timers a time is the least over the ranks, without the "
        "wait for late ranks; by the stream it is the slowest rank's, with the launch in it.",
        "",
    ]
    names = [name for name in ("default", "tuned", "static") if result["keys"] and name in result["keys"][0]]
    for what, title in (("gpu_us", "GPU timers"), ("stream_us", "stream")):
        rows = [
            [
                row["case"],
                *(f"{_figure(row[name][what])} ({_action(row[name]['action'])})" for name in names),
            ]
            for row in result["keys"]
        ]
        lines += [f"### {title}", "", *_table(("collective", *names), rows), ""]
    ratios = [
        (name, *(f"{of[what]:.3f}" if what in of else "-" for what in ("gpu_us", "stream_us")))
        for name, of in result["over_default"].items()
    ]
    lines += [*_table(("over default, geometric mean", "GPU timers", "stream"), ratios), ""]
    sweep, loop = result["sweep"], result.get("loop")
    lines.append(f"Best static: {sweep['measured']} of {sweep['configurations']} configurations measured.")
    if loop:
        lines.append(
            f"The loop: {loop['collectives_run']} collectives ran, {loop.get('switches')} switches, phase "
            f"{loop['phase_at_the_end']} at the end, {loop.get('dropped_records')} records dropped."
        )
    return lines


def _overhead(result: Document) -> list[str]:
    lines = [f"Medians of {result['runs']} alternating runs, least to largest; microseconds per collective.", ""]
    rows = []
    for row in result["cases"]:
        for name, of in row["configurations"].items():
            cells = [
                f"{of[what]['median']:.2f} ({of[what]['low']:.2f} to {of[what]['high']:.2f}), "
                f"{of[f'{what}_over_none']:+.2f}"
                for what in ("host_us", "gpu_us")
            ]
            rows.append((row["case"], name, *cells))
    return [*lines, *_table(("collective", "loaded", "host, over none", "GPU, over none"), rows)]


def _graphs(result: Document) -> list[str]:
    head = ("in force at capture", "asked at capture", "collectives", "records", "decided", "undecided", "dropped")
    rows = [
        (
            _action(turn["action"]),
            turn.get("asked_at_capture", "replayed again"),
            *(turn[name] for name in ("expected", "records", "decided", "undecided", "dropped")),
        )
        for turn in result["rounds"]
    ]
    return [f"{result['collectives']} collectives in a graph, {result['replays']} replays.", "", *_table(head, rows)]


def _communicators(result: Document) -> list[str]:
    both, cycles = result["interleaved"], result["cycles"]
    sizes = " and ".join(f"{name} of {size}" for name, size in both["sizes"].items())
    rows = [
        (name, *(f"{cycles['growth_per_cycle'][loaded][name]:.1f}" for loaded in ("none", "both")), f"{most:g}")
        for name, most in cycles["most"].items()
    ]
    return [
        f"{both['calls']} calls of two communicators in turns ({sizes}).",
        "",
        f"Growth per communicator, of {cycles['cycles']} that came and went:",
        "",
        *_table(("what", "without the plugin", "with it", "most that it may add"), rows),
    ]


_SECTIONS: dict[str, Callable[[Document], list[str]]] = {
    "check": _check,
    "measure": _measure,
    "overhead": _overhead,
    "graphs": _graphs,
    "communicators": _communicators,
}
