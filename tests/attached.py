"""A job that a run did not start: its ranks are a process each, and train for as long as they may."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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


def training(
    job: str,
    directory: Path,
    *,
    nodes: int = 2,
    ranks_per_node: int = 2,
    comms: Sequence[int] = (0, 1),
    sizes: Sequence[int] = (1 << 14, 1 << 18, 1 << 22),
    rate_hz: float = 200.0,
    env_of: Sequence[Mapping[str, str]] = (),
    within: Sequence[Sequence[str]] = (),
) -> NcclJob:
    """Communicators of all ranks, in turn, ``rate_hz`` steps a second. The emulated NCCL tells communicators apart by
    number, so that jobs of one name have ``comms`` of their own. ``env_of`` and ``within`` are for the ranks of each
    node, as in ``NcclJob``."""
    cluster = find_cluster("cloud-tcp").model_copy(update={"gpus_per_node": ranks_per_node})
    physics = Physics(cluster, nodes)
    program = Program(nodes=nodes, ranks_per_node=ranks_per_node, rate_hz=rate_hz)
    all_comms = [comm for i in range(max(comms) + 1) if (comm := program.comm(f"comm{i}")).number in comms]
    for rank in program.ranks:
        for comm in all_comms:
            rank.setup.init(comm)
            for nbytes in sizes:
                rank.step.collective(comm, Collective.ALL_REDUCE, nbytes)
            rank.end.destroy(comm)
        rank.step.sync()
    times = Times(rank_jitter=0.01)
    us = physics.time_us(Collective.ALL_REDUCE, list(sizes))
    for comm in all_comms:
        for nbytes, of_size in zip(sizes, us, strict=True):
            times.asked(
                comm.number, int(Collective.ALL_REDUCE), nbytes, of_size[None], np.full_like(of_size, 0.02)[None]
            )
    directory.mkdir()
    constants = {comm.number: Constants.of(comm, physics.belief) for comm in all_comms}
    write_constants(directory / "constants", constants)
    env = {"EMULATED_NCCL": str(directory / "constants"), "GPU_DEVICES": str(ranks_per_node), **plugin_env(job)}
    library = native_dir() / "libnccl-emulated.so"
    return NcclJob(program, library=library, directory=directory, times=times, env=env, env_of=env_of, within=within)


def goes_on(job: NcclJob, calls: int = 1) -> None:
    """Every rank makes more than so many further calls within 60 s."""
    before, deadline = job.progress().min(), time.monotonic() + 60
    while job.progress().min() <= before + calls:
        assert time.monotonic() < deadline, "training stands still"
        time.sleep(0.01)
