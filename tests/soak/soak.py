"""An attack on the agreement between control plane and ranks, and a table of what came of it.

    python tests/soak/soak.py --minutes 6 --json OUT.json [--nccl TREE_OR_TARBALL]

Ends with 1 where a promise was broken: two tables in one call, a record that nobody counted, a rank that waited for
longer than the bound, something left behind.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from accounting import beyond, two_tables, uncounted, uncounted_records
from attacking import Attacker
from growth import Growth
from plane import Planes
from table import by_part, show, stalls
from watching import Watcher

from dynamiccl_ray.plugin_bridge.segments import segments
from dynamiccl_ray.trainers.online.recorder import read_samples

TESTS = Path(__file__).parents[1]
BOUND_S = 30.0
"""docs/soak.md: no rank waits longer while there is a control plane, or beyond the first switch under the next one."""
LOOK_S = 2.0
END_S = 90.0


class Mode(StrEnum):
    COORDINATOR = "coordinator"
    IN_BAND = "in-band"


class Training:
    """The process of the job; see job.py."""

    def __init__(self, directory: Path, job: str, rate_hz: float, nccl: Path | None, *, in_band: bool) -> None:
        self._directory = directory
        options = [*(["--nccl", str(nccl)] if nccl else []), *(["--in-band"] if in_band else [])]
        with (directory / "job.txt").open("wb") as said:
            command = [sys.executable, str(Path(__file__).with_name("job.py"))]
            self._process = subprocess.Popen(
                [*command, str(directory), job, str(rate_hz), *options],
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                # The package before its tests, whose folders have its name.
                env=os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
            )
        _give_way(self._process.pid)
        up = directory / "up.json"
        while not up.exists():
            self.check()
            time.sleep(0.05)
        self.pids: list[int] = json.loads(up.read_text())

    def check(self) -> None:
        if self._process.poll() is not None:
            raise SystemExit(f"the job has ended:\n{(self._directory / 'job.txt').read_text()[-2000:]}")

    def end(self) -> dict[str, Any]:
        """Told to end in good order; what its log says."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(300)
        result: dict[str, Any] = json.loads((self._directory / "result.json").read_text())
        return result

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _give_way(pid: int) -> None:
    """NCCL's proxy threads never sleep. A node has cores for them and for us; where it has not, we go first.

    Where Linux shares the processors between sessions (man 7 sched, "The autogroup feature"), a process's own nice
    value counts only within its session.
    """
    os.setpriority(os.PRIO_PROCESS, pid, 10)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("19")


def soak(
    name: str, mode: Mode, nccl: Path | None, *, minutes: float, switches: int, rate_hz: float, serial: bool, seed: int
) -> dict[str, Any]:
    """One run, and what came of it."""
    job = f"soak_{uuid.uuid4().hex[:8]}"
    directory = Path(tempfile.mkdtemp(prefix="dynamiccl-soak-"))
    chance = random.Random(seed)
    planes, growth = Planes(directory, job, seed, serial=serial), Growth()
    training = Training(directory, job, rate_hz, nccl, in_band=mode is Mode.IN_BAND)
    try:
        watcher = Watcher(sorted(segments(job)))
        planes.start(resume=False)
        began = looked = time.monotonic()

        def meanwhile() -> None:
            nonlocal looked
            training.check()
            if time.monotonic() > looked + LOOK_S:
                looked = time.monotonic()
                growth.look(looked, {**planes.parts(), "rank": training.pids})

        attacker = Attacker(planes, watcher, chance, meanwhile)
        attacker.begin(300.0)
        until = time.monotonic() + 60 * minutes
        attacker.run(until, switches)
        attacker.calm(END_S)
        seconds = time.monotonic() - began
        code = planes.end(END_S)
        left = planes.left(30.0)
        in_force = [w["base"] >> 8 for w in watcher.look()]
        result = training.end()
        watcher.end()
    finally:
        planes.kill()
        training.kill()
    kept = directory
    counted = watcher.counted()
    played = {(comm, rank): n for comm, rank, n in result["calls"]}
    wrong = uncounted(counted, played)
    two = two_tables(watcher.taken)
    longest = max((span.seconds for span in watcher.waits), default=0.0)
    segments_left = [path.name for path in segments(job)]
    delivered = sum(of.read for of in counted)
    handed = sum(len(read_samples(run).get("dseq", ())) for run in planes.runs if (run / "samples.parquet").is_dir())
    totals = {
        "switches on all ranks": watcher.switches(),
        "attacks": len(attacker.attacks),
        "control planes": len(planes.runs),
        "... with --resume": planes.resumed,
        "minutes": seconds / 60,
        "calls": sum(of.calls for of in counted),
        "collectives that two ranks ran differently": result["violations"],
        "versions from two calls on": len(two),
        "longest wait of a rank, s": longest,
        "waits of ranks in all, s": watcher.total_hold_s(),
        "training stood still longest, s": max((span.seconds for span in watcher.gaps), default=0.0),
        "records": sum(of.records for of in counted),
        "... delivered to a runner": delivered,
        "... left in the ring at the end": sum(of.records - of.read for of in counted),
        "... delivered, and not in the samples": delivered - watcher.ranks * handed,
        "calls counted as dropped": sum(of.dropped for of in counted),
        "calls outside of windows": sum(of.unprofiled for of in counted),
        "uncounted records": uncounted_records(counted),
        "processes left": len(left),
        "segments left": len(segments_left),
        "exit code of the last control plane": code,
        "control plane lost to first switch, worst, s": max((span.seconds for span in attacker.anew), default=0.0),
    }
    if result["violations"]:
        wrong.append(f"{result['violations']} collectives were run differently by two ranks")
    if two:
        wrong.append(f"tables came into force at two calls: {two[:5]}")
    for span in beyond(watcher.waits, attacker.anew, BOUND_S):
        wrong.append(f"a rank waited for {span.seconds:.1f} s beside a control plane; the bound is {BOUND_S:.0f} s")
    if any(result["codes"]):
        wrong.append(f"ranks ended with {result['codes']}")
    if code != 0:
        wrong.append(f"the last control plane ended with {code}: {planes.last_words()}")
    if left:
        wrong.append(f"processes left: {left}")
    if segments_left:
        wrong.append(f"segments left: {segments_left}")
    rows = stalls(attacker.attacks, watcher.waits)
    if not wrong:
        shutil.rmtree(kept)
    else:
        wrong.append(f"the files are in {kept}")
    return {
        "name": name,
        "totals": totals,
        "stalls": by_part(rows),
        "gaps": by_part(stalls(attacker.attacks, watcher.gaps)),
        "attacks": [asdict(attack) for attack in attacker.attacks],
        "growth": growth.longest(),
        "in_force_at_the_end": in_force,
        "wrong": wrong,
    }


def main(
    minutes: Annotated[float, typer.Option(help="On each host, shared by the modes.")] = 6.0,
    mode: Annotated[list[Mode] | None, typer.Option(help="Both by default.")] = None,
    switches: Annotated[int, typer.Option(help="A run ends early after so many.")] = 1_000_000,
    rate: Annotated[float, typer.Option(help="Steps per second and rank, each of four collectives; 0: all.")] = 30.0,
    nccl: Annotated[list[Path] | None, typer.Option(help="Also on these sources of NCCL.")] = None,
    emulated: Annotated[bool, typer.Option(help="On the emulated NCCL.")] = True,
    serial: Annotated[bool, typer.Option(help="Control planes of one process, without Ray.")] = False,
    seed: int = 0,
    json_out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Ends with 1 where a promise was broken."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hosts: list[Path | None] = [*([None] if emulated else []), *(nccl or [])]
    modes = mode or list(Mode)
    results = []
    for host, of in itertools.product(hosts, modes):
        name = f"{'emulated' if host is None else host.name}, {of}"
        share = minutes / len(modes)
        results.append(soak(name, of, host, minutes=share, switches=switches, rate_hz=rate, serial=serial, seed=seed))
    show(results)
    if json_out is not None:
        json_out.write_text(json.dumps(results, indent=1))
    if any(result["wrong"] for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
