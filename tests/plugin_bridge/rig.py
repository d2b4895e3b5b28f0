"""What the tests of the plugin and its channel share: small programs for the emulated NCCL, and jobs that play them."""

from __future__ import annotations

import dataclasses
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import N_ALGORITHMS, N_PROTOCOLS, Collective
from dynamiccl_ray.plugin_bridge import native_dir, plugin_path
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.constants import Constants, write_constants
from dynamiccl_ray.plugin_bridge.layout import Prepared
from dynamiccl_ray.plugin_bridge.nccl_job import LOG, NcclJob
from dynamiccl_ray.plugin_bridge.program import SEND_RECV, Comm, Ops, Program
from dynamiccl_ray.plugin_bridge.segments import segments
from dynamiccl_ray.plugin_bridge.times import CHUNKS, Times

KIB, MIB = 1 << 10, 1 << 20
SIZE, NODES = 8, 2
"""Ranks and nodes of every communicator here; most of its ranks are only said to exist."""

Call = tuple[Collective, int]
CALLS: tuple[Call, ...] = (
    (Collective.ALL_REDUCE, MIB),
    (Collective.ALL_REDUCE, 16 * MIB),
    (Collective.ALL_GATHER, 8 * MIB),
    (Collective.REDUCE_SCATTER, 4 * MIB),
    (Collective.BROADCAST, 96 * KIB),
    (Collective.REDUCE, 2 * MIB),
)
"""Of which NCCL itself gives each a pair of its own."""


def wait_for(condition: Callable[[], Any], timeout: float = 60.0, *, what: str = "it") -> Any:
    """The first true answer of ``condition``."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.001)
    return answer


def belief_of(preset: str = "dgx-h100-ndr", **changes: Any) -> Belief:
    """NCCL's own of ``SIZE`` ranks on ``NODES`` nodes of a cluster; ``changes`` to the communicator."""
    cluster = find_cluster(preset).model_copy(update={"gpus_per_node": SIZE // NODES})
    return Belief(dataclasses.replace(cluster.nccl_belief(NODES).communicator, **changes))


BELIEF = belief_of()

PerStep = Callable[[Ops, Comm], None]


@dataclass(kw_only=True)
class Play:
    """What a job does, what NCCL believes of its communicators, and how long everything takes."""

    program: Program
    belief: Belief
    times: Times | None
    calls: Sequence[Call]

    def comm(self, index: int = 0) -> Comm:
        return self.program.comms[index]

    def constants(self) -> dict[int, Constants]:
        return {comm.number: Constants.of(comm, self.belief) for comm in self.program.comms}


def collectives(calls: Sequence[Call]) -> PerStep:
    """One after the other; the last is waited for."""

    def step(ops: Ops, comm: Comm) -> None:
        for collective, nbytes in calls:
            ops.collective(comm, collective, nbytes)

    return step


def play(
    calls: Sequence[Call] = CALLS,
    *,
    places: Sequence[int] = (0,),
    comms: int = 1,
    steps: int = 0,
    window: int = 4,
    rate_hz: float = 0.0,
    us: float | Sequence[float] | None = 20.0,
    sigma: float = 0.1,
    per_step: PerStep | None = None,
    belief: Belief = BELIEF,
    call_us: float = 3.0,
    syncs: bool = True,
) -> Play:
    """A job of the ranks ``places`` of one or more communicators, a process each, that make ``calls`` in each step.

    ``us`` is the median time of everything, one per phase, or None for the GPU's own formula. Without ``syncs`` the
    host does not wait for the end of a step.
    """
    program = Program(ranks_per_node=len(places), steps=steps, window=window, rate_hz=rate_hz, call_us=call_us)
    nodes = [place // (SIZE // NODES) for place in range(SIZE)]
    for index in range(comms):
        program.comm("world" if index == 0 else f"world{index}", places=places, size=SIZE, nodes=nodes)
    for rank in program.ranks:
        for comm in program.comms:
            rank.setup.init(comm)
            (per_step or collectives(calls))(rank.step, comm)
            rank.end.destroy(comm)
        if syncs:
            rank.step.sync()
    times = None if us is None else times_of(program, np.atleast_1d(us), sigma, belief)
    return Play(program=program, belief=belief, times=times, calls=calls)


def times_of(program: Program, us: np.ndarray[Any, Any], sigma: float, belief: Belief) -> Times:
    """Each phase's time for everything that a program does."""
    times = Times(n_phases=len(us), noise_seed=7, rank_jitter=0.01 if sigma else 0.0)
    channels = max(belief.channels, belief.nvls_channels)
    table = np.empty((len(us), N_ALGORITHMS * N_PROTOCOLS, channels, len(CHUNKS)))
    table[:] = us[:, None, None, None]
    for comm, func, nbytes in program.calls():
        if func == SEND_RECV:
            times.sent(comm.number, nbytes, np.stack([us, us], axis=1), sigma=sigma)
        else:
            times.used(comm.number, func, nbytes, table, sigma=sigma)
    return times


def table_key(call: Call) -> int:
    return key_of(*call, False)


def exec_ns(log: LOG) -> np.ndarray[Any, Any]:
    """What a profiler can see of the times in a log: the GPU's timer goes in steps of 32 ns."""
    return np.asarray(log["stop_ns"] // 32 * 32 - log["start_ns"] // 32 * 32)


def used_of(log: LOG, comm: int = 0) -> LOG:
    """What one rank used in the collectives of a communicator, in the order of the calls."""
    mine = log[(log["number"] == comm) & (log["func"] != SEND_RECV)]
    assert len(np.unique(mine["rank"])) <= 1
    return mine[np.argsort(mine["ordinal"], kind="stable")]


def indices(log: LOG, calls: Sequence[Call] = CALLS) -> np.ndarray[Any, Any]:
    """Which of ``calls`` each record is of."""
    return np.array([calls.index((Collective(int(row["func"])), int(row["bytes"]))) for row in log], np.int64)


def stage(channel: Channel, table: DecisionTable, margin: int) -> int:
    """PREPARE and COMMIT on one rank alone; returns S."""
    outcome, switch_at, digest = channel.prepare(table, margin)
    assert outcome is Prepared.PREPARED
    assert digest == table.digest
    assert channel.decide(table.version, switch_at)
    return switch_at


def write_at(path: Path, offset: int, data: bytes) -> None:
    """Writes into a segment behind everybody's back."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[offset : offset + len(data)] = data


@dataclass
class Rig:
    """Starts jobs whose segments live in a directory of their own."""

    directory: Path
    shm: Path
    _open: list[Any] = field(default_factory=list)
    _jobs: int = 0

    @property
    def job_id(self) -> str:
        """Of the job that was started last."""
        return f"job{self._jobs}"

    def job(
        self,
        what: Play,
        *,
        release: str = "2.30",
        plugin: Path | None = None,
        env: Mapping[str, str] | None = None,
        job_id: str | None = None,
        **options: Any,
    ) -> NcclJob:
        """A job on the emulated NCCL of a release, not started; ``plugin`` is ours by default."""
        self._jobs += 1
        directory = self.directory / self.job_id
        directory.mkdir()
        write_constants(directory / "constants", what.constants())
        path = str(plugin or plugin_path())
        all_env = {
            "DYNAMICCL_JOB_ID": job_id or self.job_id,
            "DYNAMICCL_SHM_DIR": str(self.shm),
            "EMULATED_NCCL": str(directory / "constants"),
            "EMULATED_NCCL_VERSION": release,
            "GPU_DEVICES": "16",
            "NCCL_ALGO": "",
            "NCCL_PROTO": "",
            "NCCL_TUNER_PLUGIN": path,
            "NCCL_PROFILER_PLUGIN": path,
            **(env or {}),
        }
        job = NcclJob(
            what.program,
            library=native_dir() / "libnccl-emulated.so",
            directory=directory,
            times=what.times,
            env=all_env,
            **options,
        )
        self._open.append(job)
        return job

    def start(self, what: Play, **options: Any) -> NcclJob:
        """A running job that begins nothing yet: it has no credit."""
        job = self.job(what, **options)
        job.set_credit(0)
        job.start()
        return job

    def channels(self, job: NcclJob, communicators: int = 1) -> list[list[Channel]]:
        """The job's channels, claimed: per process, per communicator."""
        pids = job.pids()

        def ready() -> bool:
            job_states = job.states()
            assert "failed" not in job_states, [job.stderr(i) for i in range(len(pids))]
            return all(state == "waiting" for state in job_states)

        wait_for(ready, what="the start of every rank")
        found: dict[int, list[Channel]] = {pid: [] for pid in pids}
        for path in segments(self.job_id):
            channel = self.channel(path)
            found[channel.identity.pid].append(channel)
        assert all(len(of_pid) == communicators for of_pid in found.values())
        return [sorted(found[pid], key=lambda c: c.identity.ordinal) for pid in pids]

    def channel(self, path: Path) -> Channel:
        channel = Channel(path)
        self._open.append(channel)
        return channel

    def close(self) -> None:
        for thing in reversed(self._open):
            if isinstance(thing, NcclJob):
                thing.__exit__(None, None, None)
            else:
                thing.close()
        self._open.clear()
