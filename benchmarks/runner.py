"""What a runner takes beside ranks whose keys all exploit: a share of a core, and memory.

    python benchmarks/runner.py OUT.json [--ranks 8] [--rate 1000] [--rounds 40]

The ranks are processes that load the plugin and play measured tables, on one node; each issues so many collectives a
second. The run is as ``dynamiccl online`` starts it. CPU time is what the kernel has booked to the runner's process
between the first and the last round in which all keys exploited, memory what is resident in the end.

Then, without a job: records a second that one core takes from full rings to what is reported, matched over the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.actors.ranks import Rank
from dynamiccl_ray.actors.reduction import Matching
from dynamiccl_ray.config.experiment import Online, load
from dynamiccl_ray.plugin_bridge.bench import hardware
from dynamiccl_ray.plugin_bridge.layout import APPLIED, DECIDED, GPU_TIMING, RECORD_DTYPE, RING_RECORDS, SURE
from dynamiccl_ray.trainers.online.run import run_online

EXPERIMENT = Path(__file__).parents[1] / "experiments" / "online" / "p5en-warm.yaml"
# Ray names an actor's process after its class and method.
_NAME = b"ray::RankRunner"


def runner() -> int:
    """The process of the only runner on this machine; raises RuntimeError for none or several."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                name = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended since
            if name.startswith(_NAME):
                found.append(int(entry.name))
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} runners on this machine, {found}; measure with one, and no other run beside")
    return found[0]


def cpu_s(process: int) -> float:
    """User and system time so far (proc(5), stat)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def experiment_of(ranks: int, rate: float, rounds: int) -> Online:
    said = load(EXPERIMENT).model_dump(mode="json")
    said["fabric"] |= {"rate_hz": rate, "processes": {"nodes": 1, "ranks_per_node": ranks}}
    said["stop"] = {"exploit_rounds_after_last_event": rounds}
    return Online.model_validate(said)


def measured(ranks: int, rate: float, rounds: int) -> dict[str, Any]:
    marks: list[tuple[float, float, dict[str, Any]]] = []
    resident = 0.0

    def progress(status: dict[str, Any]) -> None:
        nonlocal resident
        if [phase for phase, keys in status["keys"].items() if keys] == ["exploit"]:
            process = runner()
            resident = resident_mb(process)
            marks.append((time.monotonic(), cpu_s(process), status))

    with tempfile.TemporaryDirectory() as directory:
        run_online(experiment_of(ranks, rate, rounds), Path(directory), progress=progress)
    if len(marks) < 2:
        raise RuntimeError(f"all keys exploited after {len(marks)} rounds; at least 2 are needed: more --rounds")
    (began, before, first), (ended, after, last) = marks[0], marks[-1]
    took = ended - began
    return {
        "ranks": ranks,
        "keys": last["keys"]["exploit"],
        "collectives_per_s": (last["collectives"] - first["collectives"]) / took,
        "epochs_per_s": (last["epoch"] - first["epoch"]) / took,
        "seconds": took,
        "cores": (after - before) / took,
        "resident_mb": resident,
    }


class _FullRing:
    """As a rank's channel: full whenever it is drained, of a job that says nothing."""

    job = None

    def __init__(self) -> None:
        self._records = np.zeros(RING_RECORDS, RECORD_DTYPE)
        self._records["dseq"] = self._records["plan"] = np.arange(RING_RECORDS)
        self._records["flags"] = DECIDED | APPLIED | SURE
        self._records["timing"] = GPU_TIMING
        self._records["key"] = np.arange(RING_RECORDS) % 35
        self._records["exec_ns"] = 50_000
        self._records["start_ns"] = 60_000 * np.arange(RING_RECORDS)

    def drain(self, into: npt.NDArray[Any]) -> npt.NDArray[Any]:
        into[:RING_RECORDS] = self._records
        self._records["dseq"] += RING_RECORDS
        self._records["plan"] += RING_RECORDS
        self._records["start_ns"] += 60_000 * RING_RECORDS
        return into[:RING_RECORDS]


def records_per_s(ranks: int, drains: int = 20) -> float:
    served = [Rank(_FullRing(), 1, rank) for rank in range(ranks)]  # type: ignore[arg-type]
    matching = Matching()
    matched = 0
    began = time.process_time()
    for _ in range(drains):
        matched += len(matching.take([rank.drain(applied_since=0) for rank in served], ranks))
    took = time.process_time() - began
    if matched != drains * RING_RECORDS:
        raise RuntimeError(f"{matched} collectives of {drains * RING_RECORDS} were matched; none may be lost")
    return ranks * matched / took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1000.0, help="collectives a second of each rank")
    parser.add_argument("--rounds", type=int, default=40, help="of exploitation")
    given = parser.parse_args()
    result = measured(given.ranks, given.rate, given.rounds)
    result["records_per_s"] = records_per_s(given.ranks)
    given.out.write_text(json.dumps({**result, "hardware": hardware()}, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
