"""``dynamiccl bench plugin --nccl``: what plugins add to a collective under NCCL's own host code.

One small job runs again and again, each time with other plugins, in turns. A rank calls a small all-reduce many times
and notes what its thread took for that.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.table import Table

from dynamiccl_ray.actions import Action
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import CHANNEL_VALUES, Algorithm, Collective, Protocol, pair_index
from dynamiccl_ray.plugin_bridge import native_dir
from dynamiccl_ray.plugin_bridge.bench import hardware
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.doctor import require_plugin
from dynamiccl_ray.plugin_bridge.layout import Prepared
from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING, HostError, NcclJob
from dynamiccl_ray.plugin_bridge.program import Program
from dynamiccl_ray.plugin_bridge.real_nccl import RealNccl, build_nccl, cuda_headers
from dynamiccl_ray.plugin_bridge.segments import segments

RANKS: Final = 2
NBYTES: Final = 64 << 10
_WARM: Final = 2
"""Batches at the start that do not count: the first one runs before the table is in force."""
_LEAST_US: Final = 30.0
"""Kernels last so long of real time: about what the host takes for a call."""
_TIMEOUT_S: Final = 120.0

Numbers = npt.NDArray[np.float64]

NONE: Final = "no plugin"
CSV: Final = "NVIDIA's CSV tuner"
TUNER: Final = "ours, tuner"
PROFILER: Final = "ours, profiler"
BOTH: Final = "ours, tuner and profiler"
IDLE: Final = "a profiler that does nothing"
IDLE_BOTH: Final = "a tuner and a profiler that do nothing"
INSPECTOR: Final = "NVIDIA's Inspector"
SETUPS: Final = (NONE, CSV, TUNER, PROFILER, BOTH, IDLE, IDLE_BOTH, INSPECTOR)


@dataclass
class Timings:
    """Nanoseconds per collective, a number for each batch; an array for each round."""

    thread: list[Numbers] = field(default_factory=list)
    """CPU time of the thread that calls, inside of NCCL's calls."""
    wall: list[Numbers] = field(default_factory=list)
    """The same by the clock on the wall."""
    process: list[Numbers] = field(default_factory=list)
    """CPU time of the whole process: that thread, the proxy thread and the virtual GPU."""


# ---- arithmetic ----

_CLOCK: Final = re.compile(r"\[rank \d+\] clock: thread (\d+) wall (\d+) process (\d+)")


def read_clock(text: str, calls: int) -> tuple[Numbers, Numbers, Numbers]:
    """What one process with one rank printed, per call: thread, wall and process. The process's time is read once a
    batch, so there is none of the first.
    """
    lines = np.array([[int(n) for n in found] for found in _CLOCK.findall(text)], np.float64).reshape(-1, 3)
    return lines[:, 0] / calls, lines[:, 1] / calls, np.diff(lines[:, 2]) / calls


def spread(rounds: Sequence[Numbers], without: Sequence[Numbers]) -> dict[str, float]:
    """Median and spread of all batches, and how much larger than ``without`` the median and the 10th percentile are.

    What else runs on the machine only ever adds to a batch, so the 10th percentile varies less.
    """
    p10, p50, p90 = np.percentile(np.concatenate(list(rounds)), [10, 50, 90])
    base_p10, base_p50 = np.percentile(np.concatenate(list(without)), [10, 50])
    return {
        "p50": float(p50),
        "p10": float(p10),
        "p90": float(p90),
        "added": float(p50 - base_p50),
        "added_percent": float(100 * (p50 / base_p50 - 1)),
        "added_p10": float(p10 - base_p10),
        "added_p10_percent": float(100 * (p10 / base_p10 - 1)),
    }


def summary(samples: Mapping[str, Timings]) -> dict[str, dict[str, dict[str, float]]]:
    """By set-up and by clock."""
    none = samples[NONE]
    return {
        name: {
            "thread_ns": spread(of.thread, none.thread),
            "wall_ns": spread(of.wall, none.wall),
            "process_ns": spread(of.process, none.process),
        }
        for name, of in samples.items()
    }


_TARGETS: Final = (
    ("our profiler to one that does nothing", PROFILER, IDLE, 1.05),
    ("ours to a tuner and a profiler that do nothing", BOTH, IDLE_BOTH, 1.05),
    ("ours to a profiler that does nothing", BOTH, IDLE, 1.05),
    ("ours to NVIDIA's Inspector", BOTH, INSPECTOR, 1.0),
    ("our tuner to NVIDIA's CSV tuner", TUNER, CSV, 1.0),
)


def targets(by_setup: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, Any]]:
    """What the plugin shall not exceed, as shares of the calling thread's time, where there are numbers of both."""
    thread = {name: of["thread_ns"] for name, of in by_setup.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, ours, other, most in _TARGETS:
        if ours in thread and other in thread:
            p50, p10 = (thread[ours][p] / thread[other][p] for p in ("p50", "p10"))
            found[name] = {"p50": p50, "p10": p10, "at_most": most, "met": p50 <= most, "met_p10": p10 <= most}
    return found


# ---- the plugins ----


def _compile(command: Sequence[str], out: Path) -> Path:
    """Compiles to a name of its own, then renames: somebody may be using what is there."""
    partial = out.with_suffix(f".{os.getpid()}")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
        raise RunError(errors[0])
    partial.replace(out)
    return out


def _folder(build: RealNccl, *names: str) -> Path:
    for name in names:
        if (build.tree / name).is_dir():
            return build.tree / name
    raise RunError(f"NCCL {build.version} has no {names[0]}")


def csv_tuner(build: RealNccl) -> Path:
    """NVIDIA's example, from the tree of this NCCL. Raises RunError where it does not build."""
    source = _folder(build, "plugins/tuner/example", "ext-tuner/example")
    flags = ["-O2", "-w", "-fPIC", "-shared", f"-I{source / 'nccl'}", f"-I{build.headers}"]
    return _compile(["gcc", *flags, str(source / "plugin.c")], _plugins(build) / "libnccl-tuner-csv.so")


def _inspector(build: RealNccl) -> Path:
    """On the fake CUDA, which is all that there is here."""
    source = _folder(build, "plugins/profiler/inspector", "ext-profiler/inspector")
    version = _plugins(build) / "version.cc"
    version.write_text(f'extern "C" const char *get_git_version_info() {{ return "{build.version}"; }}\n')
    files = [str(path) for path in sorted(source.glob("*.cc")) if path.name != "version.cc"]
    includes = [f"-I{path}" for path in (source, source / "nccl", build.headers, cuda_headers()[0])]
    runtime = next(build.directory.glob("libcudart.so.*"))
    command = ["g++", "-std=c++17", "-O2", "-DNDEBUG", "-w", "-fPIC", "-shared", *includes, *files, str(version)]
    return _compile([*command, str(runtime), "-ldl", "-lpthread"], _plugins(build) / "libnccl-profiler-inspector.so")


def _plugins(build: RealNccl) -> Path:
    path = build.directory / "plugins"
    path.mkdir(exist_ok=True)
    return path


# ---- the jobs ----


@dataclass(frozen=True, kw_only=True)
class _Played:
    """What NCCL ran."""

    algorithm: Algorithm
    protocol: Protocol
    channels: int

    def __str__(self) -> str:
        return f"{self.algorithm.name} {self.protocol.name} {self.channels}"


class _Bench:
    def __init__(self, build: RealNccl, directory: Path, *, batches: int, calls: int) -> None:
        self._build, self._directory, self._calls = build, directory, calls
        self._batches = batches
        self._n = 0
        self.played: dict[str, str] = {}
        self.recorded = 0
        self._choice: _Played | None = None

    def run(self, plugins: Mapping[str, str], setup: str) -> Timings:
        """One job of this set-up."""
        self._n += 1
        directory = self._directory / f"job{self._n}"
        directory.mkdir()
        name = f"dynamiccl_bench_{os.getpid()}_{self._n}"
        cluster = find_cluster("dgx-h100-ndr").model_copy(update={"gpus_per_node": RANKS})
        env = {
            **self._build.env(cluster, directory / "topology.xml"),
            "NCCL_TUNER_PLUGIN": "none",
            "NCCL_PROFILER_PLUGIN": "none",
            "DYNAMICCL_JOB_ID": name,
            # It writes what it has seen when the communicator ends, and by default does not look at small ones.
            "NCCL_INSPECTOR_ENABLE": "1",
            "NCCL_INSPECTOR_DUMP_DIR": str(directory / "inspector"),
            "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "1000000",
            "NCCL_TUNER_CONFIG_FILE": str(directory / "tuner.csv"),
            **plugins,
        }
        (directory / "tuner.csv").write_text(self._csv())
        job = NcclJob(
            self._program(),
            library=self._build.library,
            directory=directory,
            env=env,
            env_of=self._build.env_of(1),
            least_us=_LEAST_US,
        )
        with job:
            # The first batch, then whatever has to be put in force, then the rest.
            job.set_credit(1)
            job.start()
            _until(lambda: job.states() == ["waiting"] * RANKS and min(job.progress()) == 1, job)
            with contextlib.ExitStack() as stack:
                channels = [stack.enter_context(Channel(path)) for path in segments(name)]
                if (setup in (TUNER, PROFILER, BOTH)) != bool(channels):
                    raise RunError(f"{setup}: {len(channels)} channels of the plugin; see `dynamiccl doctor`")
                if setup in (TUNER, BOTH):
                    self._decide(channels)
                job.set_credit(FREE_RUNNING)
                recorded = 0
                deadline = time.monotonic() + _TIMEOUT_S
                while None in job.returncodes() and time.monotonic() < deadline:
                    recorded += sum(len(channel.drain()) for channel in channels)
                    time.sleep(0.005)
            job.wait(1.0)
            log = job.logs()
            stderr = [job.stderr(i) for i in range(RANKS)]
        if setup == BOTH:
            self.recorded += recorded
        if setup == INSPECTOR and not any((directory / "inspector").glob("*")):
            raise RunError("it wrote nothing")
        last = log[log["own"] == 1] if np.any(log["own"] == 1) else log
        played = _Played(
            algorithm=Algorithm(int(last[-1]["algo"])),
            protocol=Protocol(int(last[-1]["proto"])),
            channels=int(last[-1]["channels"]),
        )
        if setup == NONE:
            self._choice = played
        self.played[setup] = str(played)
        clocks = [read_clock(text, self._calls) for text in stderr]
        if any(len(thread) != self._batches for thread, _, _ in clocks):
            raise RunError(f"{setup}: {[len(thread) for thread, _, _ in clocks]} batches of {self._batches}")
        return Timings(
            thread=[np.concatenate([thread[_WARM:] for thread, _, _ in clocks])],
            wall=[np.concatenate([wall[_WARM:] for _, wall, _ in clocks])],
            process=[np.concatenate([process[_WARM:] for _, _, process in clocks])],
        )

    def _program(self) -> Program:
        program = Program(ranks_per_node=RANKS, steps=self._batches)
        world = program.comm("world")
        for rank in program.ranks:
            rank.setup.init(world)
            with rank.step.measured():
                for _ in range(self._calls):
                    rank.step.collective(world, Collective.ALL_REDUCE, NBYTES)
            rank.step.sync()
            rank.end.destroy(world)
        return program

    def _csv(self) -> str:
        """NCCL's own choice as a line for NVIDIA's tuner, so that all set-ups launch the same."""
        if self._choice is None:
            return ""
        algorithm, protocol = self._choice.algorithm.name.lower(), self._choice.protocol.name.lower()
        return f"allreduce,0,4294967295,{algorithm},{protocol},{self._choice.channels},-1,-1,-1,-1\n"

    def _decide(self, channels: Sequence[Channel]) -> None:
        """The same for ours."""
        if self._choice is None:
            return
        count = self._choice.channels
        action = Action(
            pair=pair_index(self._choice.algorithm, self._choice.protocol),
            channels=CHANNEL_VALUES.index(count) if count in CHANNEL_VALUES else 0,
        )
        key = key_of(Collective.ALL_REDUCE, NBYTES, False)
        table = DecisionTable.of(1, {key: action}, max_channels=64)
        prepared = [channel.prepare(table, 0) for channel in channels]
        if any(outcome is not Prepared.PREPARED for outcome, _, _ in prepared):
            raise RunError(f"the table was not accepted: {[outcome.name for outcome, _, _ in prepared]}")
        switch_at = max(hold_at for _, hold_at, _ in prepared)
        if not all(channel.decide(1, switch_at) for channel in channels):
            raise RunError("the table was not put in force")


def _until(condition: Callable[[], bool], job: NcclJob) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        job.check()
        if time.monotonic() > deadline:
            raise RunError(f"the job did not start within {_TIMEOUT_S:.0f} s: {job.states()}")
        time.sleep(0.005)


# ---- the whole ----


def bench_plugin_on_nccl(
    source: Path, *, rounds: int = 10, batches: int = 82, calls: int = 100, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Nanoseconds per collective for each of :data:`SETUPS`, in ``rounds`` turns; those that cannot be built are named
    in ``left_out``.
    """
    plugin = str(require_plugin())
    idle = native_dir() / "libnccl-profiler-idle.so"
    if not idle.is_file():
        raise RunError(f"{idle} does not exist; build it with `make native`")
    build = build_nccl(source, say=say)
    environments: dict[str, dict[str, str]] = {
        NONE: {},
        TUNER: {"NCCL_TUNER_PLUGIN": plugin},
        PROFILER: {"NCCL_PROFILER_PLUGIN": plugin},
        BOTH: {"NCCL_TUNER_PLUGIN": plugin, "NCCL_PROFILER_PLUGIN": plugin},
        IDLE: {"NCCL_PROFILER_PLUGIN": str(idle)},
        IDLE_BOTH: {"NCCL_TUNER_PLUGIN": str(idle), "NCCL_PROFILER_PLUGIN": str(idle)},
    }
    left_out: dict[str, str] = {}
    theirs: tuple[tuple[str, str, Callable[[RealNccl], Path]], ...] = (
        (CSV, "NCCL_TUNER_PLUGIN", csv_tuner),
        (INSPECTOR, "NCCL_PROFILER_PLUGIN", _inspector),
    )
    for setup, variable, make in theirs:
        try:
            environments[setup] = {variable: str(make(build))}
        except RunError as e:
            left_out[setup] = f"does not build: {e}"
    samples: dict[str, Timings] = {setup: Timings() for setup in SETUPS if setup in environments}
    with tempfile.TemporaryDirectory(prefix="dynamiccl-bench-", dir="/dev/shm") as directory:
        bench = _Bench(build, Path(directory), batches=batches, calls=calls)
        for number in range(rounds):
            # No set-up always comes after the same one; the first of all says what the others shall play.
            turn = number % len(samples)
            for setup in [*list(samples)[turn:], *list(samples)[:turn]]:
                say(f"round {number + 1} of {rounds}: {setup}")
                try:
                    got = bench.run(environments[setup], setup)
                except (RunError, HostError) as e:
                    if setup not in (CSV, INSPECTOR):
                        raise
                    left_out[setup] = f"does not run: {str(e).splitlines()[0]}"
                    del samples[setup]
                    continue
                of = samples[setup]
                of.thread += got.thread
                of.wall += got.wall
                of.process += got.process
                shutil.rmtree(next(Path(directory).glob("job*")), ignore_errors=True)
    by_setup = summary(samples)
    return {
        "nccl": build.version,
        "setups": by_setup,
        "targets": targets(by_setup),
        "left_out": left_out,
        "played": bench.played,
        "records_per_call": bench.recorded / (rounds * batches * calls * RANKS),
        "collective": {"name": "AllReduce", "bytes": NBYTES, "ranks": RANKS, "processes": RANKS},
        "rounds": rounds,
        "batches": batches - _WARM,
        "calls": calls,
        "hardware": hardware(),
    }


def render(document: Mapping[str, Any]) -> Table:
    """For people: microseconds per collective."""
    table = Table(title=f"CPU time of an all-reduce in the calling thread, NCCL {document['nccl']}, µs")
    for name in ("", "median", "10 to 90 %", "added", "", "process"):
        table.add_column(name, justify="right" if table.columns else "left", no_wrap=True)
    for setup, clocks in document["setups"].items():
        thread = clocks["thread_ns"]
        added = "", ""
        if setup != NONE:
            added = f"{thread['added'] / 1e3:+.2f}", f"{thread['added_percent']:+.0f} %"
        table.add_row(
            setup,
            f"{thread['p50'] / 1e3:.2f}",
            f"{thread['p10'] / 1e3:.2f} to {thread['p90'] / 1e3:.2f}",
            *added,
            f"{clocks['process_ns']['p50'] / 1e3:.1f}",
        )
    table.caption = "\n".join(f"{setup}: {why}" for setup, why in document["left_out"].items()) or None
    return table
