"""Section overhead: what a collective costs with nothing loaded, with the tuner, and with the profiler.

Jobs with different plugins take turns, in another order every run. In the last of them events are turned off and on
through NCCL's activation mask, in turns too. Every figure is a median; the spread is over the runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.gpu.cases import Case
from benchmarks.gpu.context import Context, Loaded, plugin_variables
from benchmarks.gpu.plan import KIB, MIB, fitted
from benchmarks.gpu.ranks import Ranks
from benchmarks.gpu.stats import spread
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.knobs import Collective

SECTION: Final = "overhead"
SIZES: Final = (4 * KIB, 64 * KIB, MIB)
BLOCKS: Final = 10
"""Of 32 collectives each."""
SOURCE: Final = Path(__file__).parent / "events.c"

NONE, TUNER, OFF, NOTHING, BOTH = "no plugin", "tuner", "tuner, profiler off", "tuner, idle profiler", "tuner, profiler"
ORDER: Final = (NONE, TUNER, OFF, NOTHING, BOTH)

Figures = dict[str, dict[str, dict[str, list[float]]]]
"""Configuration -> case -> host_us or gpu_us -> a median for each run."""


def run(context: Context) -> dict[str, Any]:
    cases = [
        Case(collective=Collective.ALL_REDUCE, count=fitted(size, context.ranks, ragged=False) // 4) for size in SIZES
    ]
    library = build(context.directory)
    if library is None:
        context.notes.append("no C compiler here, so the profiler was measured neither switched off nor idle")
    jobs: list[Loaded] = ["none", "tuner", "both"] if library is None else ["none", "tuner", "swallowed", "switched"]
    figures: Figures = {}
    with context.timed(f"{SECTION}: {context.options.runs} runs of {len(jobs)} jobs"):
        for turn in range(context.options.runs):
            first = turn % len(jobs)
            for loaded in jobs[first:] + jobs[:first]:
                job = context.new_job()
                with context.start(job, loaded, extra(library, job, loaded)) as ranks:
                    _measure(figures, ranks, cases, loaded, library, turn)
    return {"blocks": BLOCKS, "runs": context.options.runs, "cases": rows(cases, figures)}


def build(directory: Path) -> Path | None:
    """Compiles events.c; None where there is no compiler. Raises RunError if it does not compile."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / "libevents.so"
    flags = ["-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-shared"]
    done = subprocess.run(
        [compiler, *flags, "-o", str(library), str(SOURCE), "-ldl"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RunError(f"{compiler} does not compile {SOURCE.name}: {done.stderr.strip()}")
    return library.resolve()


def extra(library: Path | None, job: str, loaded: Loaded) -> dict[str, str]:
    """Variables that put events.c between NCCL and our profiler."""
    if loaded not in ("switched", "swallowed"):
        return {}
    assert library is not None
    return {
        "NCCL_PROFILER_PLUGIN": str(library),
        "GPU_BENCH_PROFILER": plugin_variables(job)["NCCL_PROFILER_PLUGIN"],
        "GPU_BENCH_SWALLOW": "1" if loaded == "swallowed" else "0",
    }


def _measure(
    figures: Figures, ranks: Ranks, cases: Sequence[Case], loaded: Loaded, library: Path | None, turn: int
) -> None:
    name = {"none": NONE, "tuner": TUNER, "swallowed": NOTHING, "both": BOTH}.get(loaded)
    for case in cases:
        if name is not None:
            _book(figures, name, case, ranks.call("throughput", case=case, blocks=BLOCKS))
            continue
        # The mask's address is known once a communicator is there.
        ranks.call("loop", cases=[case], times=1)
        for on in (True, False) if turn % 2 else (False, True):
            ranks.call("mask", library=str(library), on=on)
            _book(figures, BOTH if on else OFF, case, ranks.call("throughput", case=case, blocks=BLOCKS))


def _book(figures: Figures, name: str, case: Case, answers: Sequence[dict[str, list[float]]]) -> None:
    mine = figures.setdefault(name, {}).setdefault(case.name, {})
    for what in ("host_us", "gpu_us"):
        # Rank 0's host: hosts of several ranks on one machine are alike. The GPU's time is that of the slowest rank.
        per_block = answers[0][what] if what == "host_us" else np.max([answer[what] for answer in answers], axis=0)
        mine.setdefault(what, []).append(float(np.median(per_block)))


def rows(cases: Sequence[Case], figures: Figures) -> list[dict[str, Any]]:
    """Per case and configuration medians, spreads, and the difference of medians to no plugin."""
    found = []
    for case in cases:
        row: dict[str, Any] = {"case": case.name, "bytes": case.nbytes, "configurations": {}}
        for name in [name for name in ORDER if name in figures]:
            of: dict[str, Any] = {what: spread(values) for what, values in figures[name][case.name].items()}
            for what in ("host_us", "gpu_us"):
                bare = spread(figures[NONE][case.name][what])["median"]
                of[f"{what}_over_none"] = of[what]["median"] - bare
            row["configurations"][name] = of
        found.append(row)
    return found
