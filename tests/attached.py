"""A job that a run did not start: two nodes of two GPUs in a process each, for as long as they may."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.plugin_bridge import native_dir
from dynamiccl_ray.plugin_bridge.constants import Constants, write_constants
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob
from dynamiccl_ray.plugin_bridge.played import plugin_env
from dynamiccl_ray.plugin_bridge.program import Program
from dynamiccl_ray.plugin_bridge.times import Times


def training(job: str, directory: Path) -> NcclJob:
    """Two communicators of all ranks, in turn."""
    cluster = find_cluster("cloud-tcp").model_copy(update={"gpus_per_node": 2})
    physics, sizes = Physics(cluster, 2), [1 << 14, 1 << 18, 1 << 22]
    program = Program(nodes=2, ranks_per_node=2, rate_hz=1000.0)
    comms = [program.comm(name) for name in ("data", "expert")]
    for rank in program.ranks:
        for comm in comms:
            rank.setup.init(comm)
            for nbytes in sizes:
                rank.step.collective(comm, Collective.ALL_REDUCE, nbytes)
            rank.end.destroy(comm)
        rank.step.sync()
    times = Times(rank_jitter=0.01)
    us = physics.time_us(Collective.ALL_REDUCE, sizes)
    for comm in comms:
        for nbytes, of_size in zip(sizes, us, strict=True):
            times.asked(
                comm.number, int(Collective.ALL_REDUCE), nbytes, of_size[None], np.full_like(of_size, 0.02)[None]
            )
    directory.mkdir()
    constants = {comm.number: Constants.of(comm, physics.belief) for comm in comms}
    write_constants(directory / "constants", constants)
    env = {"EMULATED_NCCL": str(directory / "constants"), "GPU_DEVICES": "2", **plugin_env(job)}
    library = native_dir() / "libnccl-emulated.so"
    return NcclJob(program, library=library, directory=directory, times=times, env=env)
