"""Jobs on real NCCL that load the plugin, and what their channels and GPUs say."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.errors import ChannelError
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.plugin_bridge import plugin_path
from dynamiccl_ray.plugin_bridge.channel import Channel, Status
from dynamiccl_ray.plugin_bridge.layout import RECORD_DTYPE
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob
from dynamiccl_ray.plugin_bridge.program import Program
from dynamiccl_ray.plugin_bridge.real_nccl import RealNccl
from dynamiccl_ray.plugin_bridge.segments import segments

AR, AG, RS = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER
BC = Collective.BROADCAST
KIB, MIB = 1 << 10, 1 << 20
SLOW_US = 500.0
"""Kernels that last so long of real time are seen by a proxy thread that gets a fair share of the processors."""


def wait_for(condition: Callable[[], Any], timeout: float = 30.0, *, what: str = "it") -> Any:
    """The first true answer of ``condition``."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.002)
    return answer


@dataclass
class Seen:
    """One communicator on one rank, as its channel told it."""

    channel: Channel
    parts: list[np.ndarray[Any, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.channel.identity.comm_name

    @property
    def status(self) -> Status:
        return self.channel.status

    @property
    def records(self) -> np.ndarray[Any, Any]:
        return np.concatenate([np.zeros(0, RECORD_DTYPE), *self.parts])


class Reader(threading.Thread):
    """Opens every channel of a job as soon as it is there, and drains it for as long as the job runs."""

    def __init__(self, job_id: str) -> None:
        super().__init__(daemon=True)
        self.seen: dict[Path, Seen] = {}
        self.lock = threading.Lock()
        """A channel has one user at a time."""
        self._job_id = job_id
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            self._look()
            time.sleep(0.001)
        self._look()

    def _look(self) -> None:
        for path in segments(self._job_id):
            if path not in self.seen:
                # Still starting, or gone.
                with contextlib.suppress(ChannelError):
                    self.seen[path] = Seen(Channel(path))
        for seen in self.seen.values():
            with self.lock:
                while len(drained := seen.channel.drain()):
                    seen.parts.append(drained.copy())

    def finish(self) -> list[Seen]:
        """All communicators, after everything that they told has been read."""
        self._over.set()
        self.join()
        return list(self.seen.values())


@dataclass
class Jobs:
    nccl: RealNccl
    directory: Path
    shm: Path
    preloaded: Path
    """What the job's processes load before everything else."""
    _open: list[NcclJob] = field(default_factory=list)
    _readers: list[Reader] = field(default_factory=list)

    def start(
        self, program: Program, *, plugin: Path | None = None, env: Mapping[str, str] | None = None,
        ranks_per_process: int = 1, least_us: float = SLOW_US, credit: int | None = None,
    ) -> tuple[NcclJob, Reader]:  # fmt: skip
        """A running job and the reader of its channels. ``plugin`` is the project's own by default; "none" for none."""
        number = len(self._open)
        directory = self.directory / f"job{number}"
        directory.mkdir()
        nodes = 1 + max(rank.node for rank in program.ranks)
        cluster = find_cluster("dgx-h100-ndr").model_copy(update={"gpus_per_node": len(program.ranks) // nodes})
        path = str(plugin_path() if plugin is None else plugin)
        job = NcclJob(
            program,
            library=self.nccl.library,
            directory=directory,
            env={
                **self.nccl.env(cluster, directory / "topology.xml"),
                "NCCL_TUNER_PLUGIN": path,
                "NCCL_PROFILER_PLUGIN": path,
                "LD_PRELOAD": str(self.preloaded),
                "DYNAMICCL_SHM_DIR": str(self.shm),
                "DYNAMICCL_JOB_ID": f"job{number}",
                **(env or {}),
            },
            env_of=self.nccl.env_of(nodes),
            ranks_per_process=ranks_per_process,
            least_us=least_us,
        )
        reader = Reader(f"job{number}")
        self._open.append(job)
        self._readers.append(reader)
        reader.start()
        if credit is not None:
            job.set_credit(credit)
        job.start()
        return job, reader

    def run(self, program: Program, timeout: float = 60.0, **options: Any) -> tuple[NcclJob, list[Seen]]:
        """Runs a job to its end."""
        job, reader = self.start(program, **options)
        job.wait(timeout)
        return job, reader.finish()

    def close(self) -> None:
        for job in self._open:
            job.__exit__(None, None, None)
        for reader in self._readers:
            for seen in reader.finish() if reader.is_alive() else reader.seen.values():
                seen.channel.close()
