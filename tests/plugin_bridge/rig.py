"""What the tests of the plugin and its channel share: small programs, and jobs with a directory of their own."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS, Algorithm, Collective
from dynamiccl_ray.table import DecisionTable
from plugin_bridge import plugin_path
from plugin_bridge.channel import Channel, Prepared, segments
from plugin_bridge.emulation import EmulatedJob, HostKey, HostProgram

KIB, MIB = 1 << 10, 1 << 20


def wait_for(condition: Callable[[], Any], timeout: float = 20.0, *, what: str = "it") -> Any:
    """The first true answer of ``condition``."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.001)
    return answer


def host_key(
    collective: Collective = Collective.ALL_REDUCE,
    n_bytes: int = MIB,
    *,
    algorithms: Sequence[Algorithm] = (Algorithm.TREE, Algorithm.RING),
    channels: int = 8,
) -> HostKey:
    """A key of which ``algorithms`` are available with every protocol; NCCL itself takes the last, LL128."""
    cost = np.full((7, 3), -1.0, np.float32)
    for rank, algorithm in enumerate(reversed(algorithms)):
        cost[algorithm] = np.array([60, 30, 45]) + 5 * rank
    return HostKey(
        collective=collective,
        n_bytes=n_bytes,
        cost_us=cost,
        own_channels=np.full((7, 3), channels, np.uint8),
        own_warps=np.full((7, 3), 16, np.uint8),
        own_chunk_bytes=np.tile(np.array([16384, 30720, 65536], np.uint32), (7, 1)),
    )


KEYS = (
    host_key(),
    host_key(Collective.ALL_REDUCE, 16 * MIB),
    host_key(Collective.ALL_GATHER, 8 * MIB, algorithms=(Algorithm.RING,)),
    host_key(Collective.REDUCE_SCATTER, 4 * MIB, algorithms=(Algorithm.RING,)),
    host_key(Collective.BROADCAST, 96 * KIB, algorithms=(Algorithm.RING,)),
    host_key(Collective.REDUCE, 2 * MIB, algorithms=(Algorithm.RING,)),
)


def host_program(keys: Sequence[HostKey] = KEYS, *, time_us: float = 20.0, **changes: Any) -> HostProgram:
    shape = (1, len(keys), N_PAIRS, len(CHANNEL_VALUES))
    defaults: dict[str, Any] = {
        "comm_id": 0xABCD,
        "comm_name": "world",
        "n_ranks": 8,
        "n_nodes": 2,
        "max_channels": 16,
        "order": np.arange(len(keys), dtype=np.uint32),
        "sigma": np.full(shape, 0.1),
        "noise_seed": 7,
        "rank_jitter": 0.01,
        "window": 16,
    }
    return HostProgram(keys=keys, time_us=np.full(shape, time_us), **{**defaults, **changes})


def table_key(key: HostKey) -> int:
    return key_of(key.collective, key.n_bytes, key.pipe_ops > 1)


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

    def start(self, program: HostProgram, *, ranks: Sequence[int] = (0,), **options: Any) -> EmulatedJob:
        """A running job that begins nothing yet: it has no credit."""
        self._jobs += 1
        env = {"DYNAMICCL_SHM_DIR": str(self.shm), "NCCL_ALGO": "", "NCCL_PROTO": "", **options.pop("env", {})}
        job = EmulatedJob(
            program,
            ranks=ranks,
            job_id=self.job_id,
            plugin=options.pop("plugin", plugin_path()),
            directory=self.directory / self.job_id,
            env=env,
            **options,
        )
        self._open.append(job)
        job.set_credit(0)
        job.start()
        return job

    def channels(self, job: EmulatedJob, communicators: int = 1) -> list[list[Channel]]:
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
            if isinstance(thing, EmulatedJob):
                thing.__exit__(None, None, None)
            else:
                thing.close()
        self._open.clear()
