"""A recorded trace on the emulated NCCL: several communicators, of which some ranks are played."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dynamiccl_ray.config.fabrics import EmulatedFabric
from dynamiccl_ray.plugin_bridge.constants import Constants
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob
from dynamiccl_ray.plugin_bridge.played import emulated_job
from dynamiccl_ray.plugin_bridge.program import Program
from dynamiccl_ray.plugin_bridge.real_job import ModelledJob
from dynamiccl_ray.plugin_bridge.replay import Replay


@dataclass(frozen=True, kw_only=True)
class EmulatedReplay(ModelledJob):
    """The job of a fabric that has a trace."""

    fabric: EmulatedFabric

    @cached_property
    def _replay(self) -> Replay:
        assert self.fabric.trace is not None
        return Replay.on(self.fabric.trace, self.fabric.nodes, self.fabric.gpus_per_node)

    @cached_property
    def program(self) -> Program:
        """As fast as the experiment says, all communicators together."""
        processes = self.fabric.processes
        program = Program(
            nodes=processes.nodes,
            ranks_per_node=processes.ranks_per_node,
            rate_hz=self.fabric.rate_hz / self._replay.most_calls,
        )
        self._replay.lay_out(program, compute_us=0, whole=False)
        return program

    @property
    def processes(self) -> dict[str, frozenset[int]]:
        return {comm.name: frozenset(comm.places) for comm in self.program.comms}

    def sample(self) -> str:
        return (
            f"{len(self.ranks)} processes stand for {self.fabric.nodes} nodes x {self.fabric.gpus_per_node} GPUs of "
            f"{self.fabric.cluster.name}; communicators: {self._replay.said}"
        )

    def job(self, job_id: str, directory: Path) -> NcclJob:
        constants = {comm.number: Constants.of(comm, self.physics(comm).belief) for comm in self.program.comms}
        gpus = self.fabric.gpus_per_node
        return emulated_job(self.program, self.times, constants, gpus_per_node=gpus, job_id=job_id, directory=directory)
