"""The command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamiccl_ray.errors import ConfigError

SECTIONS: Final = ("check", "measure", "overhead", "graphs", "communicators")
MOST_RANKS: Final = 8
RANKS_ON_ONE_GPU: Final = 3
"""Two groups of different sizes need three; every further one waits longer for its turn on the GPU."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for; ``ranks`` is chosen once the GPUs are known."""

    out: Path
    sections: tuple[str, ...]
    ranks: int | None = None
    as_json: bool = False
    dry_run: bool = False
    quick: bool = False
    runs: int = 5
    per_key: int = 600
    """Collectives of each key that the loop may learn from."""
    sweep_s: float = 300.0
    loop_s: float = 600.0
    timeout_s: float = 180.0
    seed: int = 0
    serial: bool = False
    intra: str | None = None
    repeat: str | None = None


def parse(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.py", description="The plugin and the loop on this machine's GPUs."
    )
    add = parser.add_argument
    add("--ranks", type=int, help="2 to 8; one GPU each where there are several, else all on the only one (3)")
    add("--out", type=Path, default=Path("runs/gpu"), help="directory of the report")
    add("--json", dest="as_json", action="store_true", help="the report as one JSON document on stdout")
    add("--only", default=",".join(SECTIONS), help=f"sections, with commas between: {', '.join(SECTIONS)}")
    add("--quick", action="store_true", help="channels and chunks one at a time, fewer sizes, two runs")
    add("--runs", type=int, default=5, help="independent runs of the evaluation protocol (5)")
    add("--per-key", type=int, default=600, help="collectives of each size that the loop may learn from (600)")
    add("--sweep-s", type=float, default=300.0, help="seconds for the search of the best static choice (300)")
    add("--loop-s", type=float, default=600.0, help="seconds after which the loop is told to end (600)")
    add("--timeout-s", type=float, default=180.0, help="seconds after which ranks count as hanging (180)")
    add("--seed", type=int, default=0)
    add("--serial", action="store_true", help="the loop in one process, without Ray")
    add("--intra", choices=("nvlink", "pcie", "c2c", "none"), help="link between the GPUs, if nvidia-smi is wrong")
    add("--repeat", metavar="JSON", help="check this one case and nothing else: a `repeat` of a report")
    add("--dry-run", action="store_true", help="print the plan and stop")
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    asked = tuple(name for name in given.pop("only").split(",") if name)
    if unknown := [name for name in asked if name not in SECTIONS]:
        raise ConfigError(f"--only: {', '.join(unknown)} unknown; valid are {', '.join(SECTIONS)}")
    for name, least in (("runs", 1), ("per_key", 16), ("sweep_s", 0), ("loop_s", 1), ("timeout_s", 1)):
        if given[name] < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {given[name]}; at least {least} is needed")
    if given["quick"]:
        given["runs"] = min(given["runs"], 2)
    return Options(sections=tuple(name for name in SECTIONS if name in asked), **given)


def ranks_for(asked: int | None, gpus: int) -> int:
    """How many ranks run on ``gpus`` GPUs. Raises ConfigError where the number asked for cannot."""
    ranks = asked if asked is not None else (RANKS_ON_ONE_GPU if gpus <= 1 else min(gpus, MOST_RANKS))
    if not 2 <= ranks <= MOST_RANKS:
        raise ConfigError(f"--ranks is {ranks}; 2 to {MOST_RANKS} are valid")
    if 1 < gpus < ranks:
        raise ConfigError(
            f"--ranks is {ranks} and there are {gpus} GPUs; give at most {gpus}, or one GPU (CUDA_VISIBLE_DEVICES=0) "
            "for several ranks on it"
        )
    return ranks
