"""python benchmarks/one_gpu/run.py --nccl libnccl.so.2 --out DIR [SECTION ...]; see README.md beside it."""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
# As a script only its own folder is on the path, and its modules have common names.
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent)]

from benchmarks.one_gpu.ranks import Rank, Ranks, environment  # noqa: E402
from dynamiccl_ray.actions import Action  # noqa: E402
from dynamiccl_ray.control.table import DecisionTable  # noqa: E402
from dynamiccl_ray.keys import key_of  # noqa: E402
from dynamiccl_ray.knobs import CHANNEL_VALUES, Algorithm, Collective, Protocol, pair_index  # noqa: E402
from dynamiccl_ray.plugin_bridge import plugin_path  # noqa: E402
from dynamiccl_ray.plugin_bridge.clocks import Clock  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
AR, AG, RS, BC = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.BROADCAST
SIZES: Final = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
STEP: Final = ((AR, 64 * KIB), (AR, MIB), (AR, 16 * MIB), (AG, 4 * MIB), (RS, 4 * MIB), (AR, 256 * KIB))
"""What one step of the job that is tuned calls."""
CHANNELS: Final = (0, 1, 2, 4, 8, 16)
SINGLE: Final = 6
"""Calls of a configuration that begin when the one before has ended on all ranks."""
PAUSE_S: Final = 0.002
"""Between two steps of the job: what it computes."""

Row = dict[str, Any]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def possible() -> list[tuple[str, str, int, Action]]:
    """(algorithm, protocol, channels, action) of what is tried for an all-reduce; NCCL's own choice first."""
    found = [("default", "default", 0, Action())]
    for algorithm in (Algorithm.RING, Algorithm.TREE):
        for protocol in Protocol:
            for channels in CHANNELS:
                action = Action(pair=pair_index(algorithm, protocol), channels=CHANNEL_VALUES.index(channels))
                found.append((algorithm.name.lower(), protocol.name.lower(), channels, action))
    return found


def landscape(ranks: Ranks, out: Path, *, turns: int, calls: int) -> Row:
    """Every configuration of every size, ``turns`` times in another order, ``calls`` in a row each: one row a call."""
    rng = np.random.default_rng(0)
    rows, clocks = [], [Clock() for _ in ranks.list]

    def add(of: Row, events: np.ndarray[Any, Any], records: np.ndarray[Any, Any]) -> None:
        on_host = [clock.on_host(mine)[0] for clock, mine in zip(clocks, records, strict=True)]
        first = records["start_ns"].astype(np.int64).min(0)
        for call in range(records.shape[1]):
            mine = records[:, call]
            start = mine["start_ns"].astype(np.int64) - first[call]
            row = {**of, "channels_used": mine["channels"][0], "event_us": round(float(events[:, call].max()), 2)}
            for rank in range(len(ranks.list)):
                row[f"start{rank}"], row[f"exec{rank}"] = start[rank], mine["exec_ns"][rank]
                # Of the same GPU's timer, and so the same for all ranks if it is estimated well.
                row[f"clock{rank}"] = int((on_host[rank] - mine["start_ns"].astype(np.uint32)[rank])[call])
            rows.append(row)

    for turn in range(turns):
        for nbytes in SIZES:
            tried = possible()
            for at in rng.permutation(len(tried)):
                algorithm, protocol, channels, action = tried[at]
                ranks.use({(AR, nbytes): action})
                of = {"turn": turn, "bytes": nbytes, "algo": algorithm, "proto": protocol, "nchannels": channels}
                events, records = ranks.measured(AR, nbytes, calls)
                add({**of, "mode": "row"}, events[:, 2:], records[:, 2:])
                for _ in range(SINGLE):
                    add({**of, "mode": "single"}, *ranks.measured(AR, nbytes, 1))
        say(f"landscape: turn {turn + 1} of {turns}")
    with gzip.open(out / "landscape.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return {"rows": len(rows)}


# ---- what the plugin costs ----

SET_UPS: Final = ("none", "tuner", "idle", "profiler", "both")


def cost_environment(set_up: str) -> dict[str, str]:
    """Of one set-up: no plugin, our tuner, a profiler that does nothing, our profiler, both of ours."""
    ours, idle = str(plugin_path()), str(plugin_path().parent / "libnccl-profiler-idle.so")
    return {
        **environment("gpu-cost", plugin=False),
        "DYNAMICCL_JOB_ID": "gpu-cost",
        **({"NCCL_TUNER_PLUGIN": ours} if set_up in ("tuner", "both") else {}),
        **({"NCCL_PROFILER_PLUGIN": ours} if set_up in ("profiler", "both") else {}),
        **({"NCCL_PROFILER_PLUGIN": idle} if set_up == "idle" else {}),
    }


def cost_of_one(nccl: Path, n: int) -> Row:
    """In a process of its own: what calls take of the calling thread, and of the GPU, back to back."""
    found: Row = {}
    with Ranks(n, nccl=nccl) as ranks:
        for nbytes, calls in ((1 * KIB, 400), (64 * KIB, 400), (MIB, 200), (16 * MIB, 50)):

            def burst(rank: Rank, nbytes: int = nbytes, calls: int = calls) -> tuple[float, float]:
                rank.cuda.record(rank.event(0), rank.stream)
                began = time.thread_time_ns()
                for _ in range(calls):
                    rank.call(AR, nbytes)
                took = time.thread_time_ns() - began
                rank.cuda.record(rank.event(1), rank.stream)
                rank.cuda.sync(rank.stream)
                return took / 1e3 / calls, rank.cuda.elapsed_us(rank.event(0), rank.event(1)) / calls

            bursts = np.array([ranks.all(burst) for _ in range(12)])[2:]
            # The slowest rank ends a collective; what a call costs its thread is an average.
            found[str(nbytes)] = {
                "cpu_us": float(np.median(bursts[..., 0])),
                "gpu_us": float(np.median(bursts[..., 1].max(1))),
            }
    return found


def cost(nccl: Path, n: int, rounds: int) -> Row:
    """Set-ups take turns, each in a process of its own."""
    found: dict[str, list[Row]] = {name: [] for name in SET_UPS}
    for turn in range(rounds):
        for name in SET_UPS:
            done = subprocess.run(
                [sys.executable, __file__, "--nccl", str(nccl), "--ranks", str(n), "--one-cost"],
                env={**os.environ, **cost_environment(name)}, capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
            if done.returncode:
                return {"error": f"{name}: {done.stderr[-500:]}"}
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
        say(f"cost: turn {turn + 1} of {rounds}")
    return found


# ---- the loop ----


def congest(ranks: Ranks, over: threading.Event, nbytes: int = 64 * MIB) -> threading.Thread:
    """A neighbour that keeps the GPU's memory busy until ``over``."""
    cuda = ranks.list[0].cuda
    cuda.use(0)
    stream, one, other = cuda.stream(), cuda.memory(nbytes), cuda.memory(nbytes)

    def copy() -> None:
        cuda.use(0)
        while not over.is_set():
            for _ in range(8):
                cuda.copy(one, other, nbytes, stream)
            cuda.sync(stream)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def steps(ranks: Ranks, n: int, pause_s: float = PAUSE_S) -> float:
    """Seconds that ``n`` steps of the job take."""

    def run(rank: Rank) -> None:
        for _ in range(n):
            time.sleep(pause_s)
            for call in STEP:
                rank.call(*call)
            rank.cuda.sync(rank.stream)

    began = time.perf_counter()
    ranks.all(run)
    return time.perf_counter() - began


def online(
    ranks: Ranks, job: str, directory: Path, *, serial: bool, rounds: int | None, learn_s: float, congested_s: float
) -> Row:
    """`dynamiccl online` beside the job, for so many ``rounds`` of exploitation, or until it is interrupted.

    A neighbour comes after ``learn_s``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stop = {"keep": True} if rounds is None else {"keep": True, "exploit_rounds_after_last_event": rounds}
    described = {
        "name": "one-gpu", "job": job, "mode": "active", "policy": "default", "fabric": {"kind": "nccl"},
        "actions": {"channels": list(CHANNELS)}, "stop": stop,
    }  # fmt: skip
    (directory / "experiment.yaml").write_text(yaml.safe_dump(described, sort_keys=False))
    command = [sys.executable, "-m", "dynamiccl_ray", "online", str(directory / "experiment.yaml"), "--json"]
    command += ["--out", str(directory / "run"), *(["--serial"] if serial else [])]
    with (directory / "said.json").open("wb") as said, (directory / "log").open("wb") as log:
        loop = subprocess.Popen(
            command, cwd=ROOT, stdout=said, stderr=log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        )  # fmt: skip
        per_step: list[tuple[float, float]] = []
        began = time.monotonic()

        def job_runs(until: float) -> None:
            while time.monotonic() - began < until and loop.poll() is None:
                per_step.append((time.monotonic() - began, 1e6 * steps(ranks, 20) / 20))

        over, came_unix_s = threading.Event(), None
        try:
            job_runs(learn_s)
            if loop.poll() is None:
                say("online: the neighbour comes")
                came_unix_s = time.time()
                neighbour = congest(ranks, over)
                job_runs(learn_s + congested_s)
                over.set()
                neighbour.join()
                loop.send_signal(signal.SIGINT)
            while loop.poll() is None and time.monotonic() - began < learn_s + congested_s + 40:
                steps(ranks, 20)
        finally:
            if loop.poll() is None:
                loop.kill()
            over.set()
    text = (directory / "said.json").read_text()
    if loop.returncode or "{" not in text:
        return {"error": f"ended with {loop.returncode}: {(directory / 'log').read_text()[-1500:]}"}
    summary = json.loads(text[text.index("{") :])
    (directory / "summary.json").write_text(json.dumps(summary, indent=1))
    np.savetxt(directory / "steps.csv", np.array(per_step), "%.3f", ",", header="s,us_per_step", comments="")
    return {
        "steps": len(per_step) * 20,
        "neighbour_came_unix_s": came_unix_s,
        **{k: summary[k] for k in ("epochs", "switches") if k in summary},
    }


def compared(ranks: Ranks, job: str, *, rounds: int = 12, calls: int = 20) -> Row:
    """What is in force against NCCL's own choice, in turns: medians of CUDA's events, the slowest rank's, us."""
    ranks.claim(job)
    learned = ranks.channels[0].table
    if learned is None:
        return {"error": "no table is in force"}
    per_step: dict[str, list[float]] = {"own": [], "learned": []}
    samples: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, table in (("own", DecisionTable.of(0, {}, max_channels=16)), ("learned", learned)):
            ranks.switch(table)
            for collective, nbytes in STEP:
                events = ranks.timed(collective, nbytes, calls)[:, 3:].max(0)
                of_call = samples.setdefault(f"{collective.name.lower()} {nbytes}", {"own": [], "learned": []})
                of_call[name].append(float(np.median(events)))
            per_step[name].append(1e6 * steps(ranks, 60, 0.0) / 60)
    entries = {f"{c.name.lower()} {b}": learned.entries[key_of(c, b, False)].tolist() for c, b in STEP}
    ratios = [np.median(of["learned"]) / np.median(of["own"]) for of in samples.values()]
    return {
        "ratio": float(np.exp(np.mean(np.log(ratios)))),
        "step_us": {name: float(np.median(us)) for name, us in per_step.items()},
        "calls": {
            name: {
                "entry": entries[name],
                **{which: {"median": float(np.median(us)), "spread": float(np.std(us))} for which, us in of.items()},
            }
            for name, of in samples.items()
        },
    }  # fmt: skip


# ---- facts ----


def facts(ranks: Ranks) -> Row:
    """What NCCL's profiler is told of graphs that are replayed."""
    nbytes, other = 4 * MIB, MIB
    key = key_of(AR, nbytes, False)
    ranks.use({})

    def capture(rank: Rank) -> Any:
        rank.cuda.begin_capture(rank.stream)
        rank.call(AR, nbytes)
        return rank.cuda.end_capture(rank.stream)

    graphs = ranks.all(capture)

    def replay(late_s: float) -> Callable[[Rank], float]:
        def run(rank: Rank) -> float:
            if rank.number == 1:
                time.sleep(late_s)
            rank.cuda.record(rank.event(0), rank.stream)
            rank.cuda.launch(graphs[rank.number], rank.stream)
            rank.cuda.record(rank.event(1), rank.stream)
            rank.cuda.sync(rank.stream)
            return rank.cuda.elapsed_us(rank.event(0), rank.event(1))

        return run

    found = []
    for late_s in (0.0, 0.0, 0.02, 0.0, 0.0):
        took = ranks.all(replay(late_s))
        time.sleep(0.05)
        drained = [channel.drain().copy() for channel in ranks.channels]
        seen = [(mine[mine["key"] == key]["exec_ns"] / 1e3).round(1).tolist() for mine in drained]
        found.append({"late_ms": 1e3 * late_s, "events_us": np.round(took, 1).tolist(), "records_us": seen})
        ranks.timed(AR, other, 3)
        for channel in ranks.channels:
            channel.drain()
    ranks.all(lambda rank: rank.cuda.drop(graphs[rank.number]))
    return {"replays": found}


SECTIONS: Final = ("landscape", "facts", "online", "watched", "cost")


def main() -> int:
    parser = argparse.ArgumentParser(description="The plugin and the loop on one GPU that all ranks share.")
    add = parser.add_argument
    add("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all by default")
    add("--nccl", type=Path, required=True, help="libnccl.so.2, of NCCL 2.30 or later")
    add("--ranks", type=int, default=4)
    add("--out", type=Path, default=Path("runs/one-gpu"))
    add("--turns", type=int, default=3)
    add("--calls", type=int, default=22)
    add("--serial", action="store_true", help="the loop in one process, without Ray")
    add("--learn-s", type=float, default=60.0)
    add("--congested-s", type=float, default=40.0)
    add("--one-cost", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_cost:
        print(json.dumps(cost_of_one(options.nccl, options.ranks)))
        return 0
    sections = options.sections or SECTIONS
    options.out.mkdir(parents=True, exist_ok=True)
    result: Row = {"nccl": str(options.nccl), "ranks": options.ranks}

    def keep(name: str, found: Row) -> None:
        result[name] = found
        (options.out / "one-gpu.json").write_text(json.dumps(result, indent=1))
        say(f"{name}: {json.dumps(found)[:1500]}")

    with tempfile.TemporaryDirectory(prefix="dynamiccl-gpu-", dir="/dev/shm") as shm:
        os.environ["DYNAMICCL_SHM_DIR"] = shm
        if "cost" in sections:
            keep("cost", cost(options.nccl, options.ranks, options.turns))
        os.environ.update(environment("one-gpu"))
        if {"landscape", "facts"} & set(sections):
            with Ranks(options.ranks, nccl=options.nccl, job="one-gpu") as ranks:
                if "facts" in sections:
                    keep("facts", facts(ranks))
                if "landscape" in sections:
                    keep("landscape", landscape(ranks, options.out, turns=options.turns, calls=options.calls))
        for name, rounds in (("online", 3), ("watched", None)):
            if name not in sections:
                continue
            with Ranks(options.ranks, nccl=options.nccl) as ranks:
                steps(ranks, 20)
                found = online(
                    ranks, "one-gpu", options.out / name, serial=options.serial, rounds=rounds,
                    learn_s=options.learn_s, congested_s=options.congested_s,
                )  # fmt: skip
                if "error" not in found and rounds is not None:
                    found["compared"] = compared(ranks, "one-gpu")
                keep(name, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
