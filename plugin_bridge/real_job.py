"""A training job on NCCL's own host code, with kernels that take as long as a physical model of a cluster says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from dynamiccl_ray.actions import Action
from dynamiccl_ray.config.communicators import Actions
from dynamiccl_ray.config.fabrics import Calls, EmulatedFabric, MeasuredFabric, RealNcclFabric, TrainingGroup
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.clusters import P5EN
from dynamiccl_ray.fabric.load import IDLE
from dynamiccl_ray.fabric.physics import OWN_CHUNK_BYTES, Physics
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_ALGORITHMS, N_PROTOCOLS, OWN_PAIR, Collective
from dynamiccl_ray.plugin_bridge.nccl_job import LOG, NcclJob
from dynamiccl_ray.plugin_bridge.played import Prices, own_tables, plugin_env
from dynamiccl_ray.plugin_bridge.program import SEND_RECV, Comm, Ops, Program
from dynamiccl_ray.plugin_bridge.real_nccl import RealNccl, build_nccl
from dynamiccl_ray.plugin_bridge.replay import Replay
from dynamiccl_ray.plugin_bridge.times import CHUNKS, Times

Offered = Mapping[tuple[int, int], Sequence[int]]
"""(Communicator, key) -> pairs that NCCL offers and takes, as the action heads count them."""
_N_PAIRS: Final = N_ALGORITHMS * N_PROTOCOLS
# Standard deviation of a rank's own share of the log of a time.
_RANK_JITTER: Final = 0.002
_MOST_CHANNELS: Final = 32


def real_job(fabric: RealNcclFabric, *, seed: int, say: Callable[[str], None] = lambda _: None) -> RealJob:
    """Lays out the job; builds NCCL first, where that has not been done. ``say`` hears of it.

    Raises ConfigError without sources of NCCL, and RunError where they do not build.
    """
    if fabric.nccl is None:
        raise ConfigError(
            "fabric.nccl: no sources of NCCL; git clone https://github.com/NVIDIA/nccl, and give its path there or "
            "with --nccl"
        )
    return RealJob(fabric=fabric, seed=seed, build=build_nccl(fabric.nccl, say=say))


def cluster_of(fabric: MeasuredFabric | EmulatedFabric | RealNcclFabric) -> Cluster:
    """The cluster that a job is played on."""
    if isinstance(fabric, MeasuredFabric):
        return find_cluster(P5EN) if fabric.path is None else next(iter(own_tables(fabric).values())).cluster
    return fabric.cluster.part(fabric.ranks_per_node) if isinstance(fabric, RealNcclFabric) else fabric.cluster


@dataclass(frozen=True, kw_only=True)
class ModelledJob(ABC):
    """A job of several communicators whose collectives take as long as the model of a cluster says."""

    fabric: RealNcclFabric | EmulatedFabric
    seed: int

    counts_calls = False
    """A step has several communicators, each of which counts its own calls."""
    valid = None
    """What may be chosen follows from the experiment alone."""

    @property
    @abstractmethod
    def processes(self) -> Mapping[str, frozenset[int]] | None:
        """Ranks that have a process, by the communicator's name; None where all have."""

    @property
    @abstractmethod
    def program(self) -> Program: ...

    @abstractmethod
    def job(self, job_id: str, directory: Path) -> NcclJob:
        """Its processes; ``job_id`` is what the plugin is told."""

    @abstractmethod
    def sample(self) -> str:
        """What runs, in words."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the job, those that have a process."""
        return tuple(range(len(self.program.ranks)))

    @property
    def sms(self) -> int:
        return self.fabric.cluster.sms

    @cached_property
    def cluster(self) -> Cluster:
        """What the job has of it."""
        return cluster_of(self.fabric)

    @cached_property
    def times(self) -> Times:
        """Of every collective that the program calls, in every configuration, under every load."""
        loads = [IDLE, *(event.load for event in self.fabric.events)]
        times = Times(n_phases=len(loads), noise_seed=self.seed, rank_jitter=_RANK_JITTER)
        algorithm, protocol = (x[:, None, None] for x in np.divmod(np.arange(_N_PAIRS), N_PROTOCOLS))
        channels = np.arange(1, _MOST_CHANNELS + 1)[:, None]
        for comm, func, nbytes in sorted(self.program.calls(), key=lambda call: (call[0].number, *call[1:])):
            physics = self.physics(comm)
            us = [
                physics.price_us(func, nbytes, algorithm, protocol, channels, chunk_bytes=np.array(CHUNKS), load=load)
                for load in loads
            ]
            times.used(comm.number, func, nbytes, np.stack(us), sigma=self.fabric.noise_sigma)
        return times

    def physics(self, comm: Comm) -> Physics:
        """Of one of its communicators."""
        nodes = len(set(comm.nodes))
        return Physics(self.fabric.cluster.part(comm.size // nodes), nodes)

    def call_of(self, step: int) -> int:
        """Where an event that comes at a step is found: in steps."""
        return step

    def step_of(self, _: int) -> int:
        raise ConfigError("events: the communicators count their own collectives; give exploit_rounds")

    def priced(self, log: LOG, actions: Actions | None = None, offered: Offered | None = None) -> RealPrices:
        """What is known of every collective's time once the job has ended, by what could be asked for."""
        return RealPrices(self, log, actions or Actions(), offered or {})


@dataclass(frozen=True, kw_only=True)
class RealJob(ModelledJob):
    """On NCCL's own host code: its program, its times, and after its end what it could have done best."""

    fabric: RealNcclFabric
    build: RealNccl

    processes = None
    """All ranks have one."""

    def sample(self) -> str:
        groups = ", ".join(f"{g.name} ({g.of})" for g in self.fabric.groups)
        if self._replay is not None:
            groups = self._replay.said
        return (
            f"NCCL {self.build.version}'s own host code, {self.fabric.nodes} nodes x {self.fabric.ranks_per_node} "
            f"ranks of {self.fabric.cluster.name}, a process each; communicators: {groups}"
        )

    @cached_property
    def _replay(self) -> Replay | None:
        trace = self.fabric.trace
        return None if trace is None else Replay.on(trace, self.fabric.nodes, self.fabric.ranks_per_node)

    @cached_property
    def program(self) -> Program:
        """Every communicator on a stream of its own; each waits for what was computed before it."""
        fabric = self.fabric
        program = Program(
            nodes=fabric.nodes, ranks_per_node=fabric.ranks_per_node, rate_hz=fabric.steps_per_s, window=1
        )
        if self._replay is not None:
            self._replay.lay_out(program, compute_us=fabric.compute_us, whole=True)
            return program
        world = program.comm("world")
        for rank in program.ranks:
            rank.setup.init(world)
        of_group = [(group, self._divided(program, world, group)) for group in fabric.groups]
        for rank in program.ranks:
            mine = [(group, next(c for c in comms if rank.rank in c.ranks)) for group, comms in of_group]
            for group, comm in mine:
                for collective, nbytes in _each(group.once):
                    rank.setup.collective(comm, collective, nbytes)
            rank.setup.sync()
            for stream, (group, comm) in enumerate(mine, 1):
                self._step(rank.step, group, comm, stream)
            rank.step.sync()
            for comm in dict.fromkeys([*(comm for _, comm in reversed(mine)), world]):
                rank.end.destroy(comm)
        return program

    def _divided(self, program: Program, world: Comm, group: TrainingGroup) -> list[Comm]:
        local, nodes = self.fabric.ranks_per_node, self.fabric.nodes
        ranks = np.arange(nodes * local).reshape(nodes, local)
        if group.of == "world":
            return program.split(world, {group.name: ranks.ravel().tolist()}) if group.name != "world" else [world]
        parts = ranks if group.of == "node" else ranks.T
        return program.split(world, {f"{group.name}{i}": part.tolist() for i, part in enumerate(parts)})

    def _step(self, ops: Ops, group: TrainingGroup, comm: Comm, stream: int) -> None:
        for collective, nbytes in _each(group.step):
            ops.compute(self.fabric.compute_us)
            ops.record(0)
            ops.wait(0, stream=stream)
            ops.collective(comm, collective, nbytes, stream=stream)
        for calls in group.grouped:
            with ops.group(comm):
                for nbytes in calls.sizes_bytes:
                    ops.collective(comm, calls.type, nbytes, stream=stream)

    def job(self, job_id: str, directory: Path) -> NcclJob:
        """Its processes; ``job_id`` is what the plugin is told."""
        directory.mkdir(parents=True, exist_ok=True)
        env = self.build.env(self.cluster, directory / "topology.xml")
        return NcclJob(
            self.program,
            library=self.build.library,
            directory=directory,
            times=self.times,
            env=env | plugin_env(job_id) | {"NCCL_DEBUG": "WARN"},
            env_of=self.build.env_of(self.fabric.nodes),
        )


def _each(calls: Sequence[Calls]) -> Iterator[tuple[Collective, int]]:
    for of_type in calls:
        for nbytes in of_type.sizes_bytes:
            yield of_type.type, nbytes


def _of_size(log: LOG, func: int, nbytes: int) -> LOG:
    found: LOG = log[(log["func"] == func) & (log["bytes"] == nbytes)]
    return found


class RealPrices:
    """Times without noise, from what NCCL did and from the model that played it."""

    def __init__(self, job: ModelledJob, log: LOG, actions: Actions, offered: Offered) -> None:
        self._job, self._actions, self._offered = job, actions, offered
        log = log[(log["func"] != SEND_RECV) & (log["rank"] == 0)]
        self._alone = log[log["members"] == 1]
        self._log = log
        numbers, at = np.unique(log["comm"], return_index=True)
        self._number = dict(zip(numbers.tolist(), log["number"][at].tolist(), strict=True))
        self._comm = {number: comm for comm, number in self._number.items()}

    def name(self, comm: int) -> str | None:
        """Of a communicator, by NCCL's hash."""
        number = self._number.get(comm)
        return None if number is None else self._job.program.comms[number].name

    def of(self, comm: int, key: int, phase: int) -> Prices | None:
        """Of one key; None for what was never called alone."""
        number = self._number.get(comm)
        if number is None:
            return None
        mine = self._alone[self._alone["number"] == number]
        for func, nbytes in np.unique(mine[["func", "bytes"]]).tolist():
            if key_of(func, nbytes, False) == key:
                return self._prices((number, func, nbytes), _of_size(mine, func, nbytes), phase)
        return None

    def _prices(self, row: tuple[int, int, int], calls: LOG, phase: int) -> Prices:
        # Nothing is asked of NCCL before its own choice has been measured.
        own = self._price(row, phase, calls[0])
        now = calls[calls["phase"] == phase]
        best, best_action = own, Action()
        for us, action in self._possible(row, calls, phase):
            if us < best:
                best, best_action = us, action
        return Prices(
            nbytes=row[2],
            default_us=own,
            oracle_us=best,
            oracle_action=best_action,
            vendor_us=None,
            in_force_us=lambda _: self._price(row, phase, now[-1]) if len(now) else None,
        )

    def _price(self, row: tuple[int, int, int], phase: int, call: Any) -> float:
        pair = int(call["algo"]) * N_PROTOCOLS + int(call["proto"])
        return self._job.times.price_us(row, phase, pair, int(call["channels"]), int(call["chunk_bytes"]))

    def _possible(self, row: tuple[int, int, int], calls: LOG, phase: int) -> Iterator[tuple[float, Action]]:
        """Everything that could have been asked for and that the model knows a time of; where NCCL was never asked,
        with the chunk that it took for the pair on any other number of channels, or the model's. What was taken, too:
        a pair on as many channels as NCCL gives it.
        """
        number, func, nbytes = row
        offered = self._offered.get((self._comm[number], key_of(func, nbytes, False)), ())
        most = int(self._log["channels"][self._log["number"] == number].max())
        for pair in (pair - 1 for pair in offered if pair != OWN_PAIR):
            of_pair = calls[(calls["algo"] == pair // N_PROTOCOLS) & (calls["proto"] == pair % N_PROTOCOLS)]
            seen = of_pair["chunk_bytes"][of_pair["chunk_bytes"] > 0]
            for call in of_pair[np.unique(of_pair["channels"], return_index=True)[1]]:
                yield self._price(row, phase, call), Action(pair=pair + 1)
            for position, channels in enumerate(CHANNEL_VALUES):
                if not 1 <= channels <= most or channels not in self._actions.channels:
                    continue
                for chunk in self._actions.chunk_bytes:
                    bytes_ = chunk or int(seen[-1] if len(seen) else OWN_CHUNK_BYTES[pair % N_PROTOCOLS])
                    us = self._job.times.price_us(row, phase, pair, channels, bytes_)
                    if us > 0:
                        yield us, Action(pair=pair + 1, channels=position, chunk=CHUNK_VALUES.index(chunk))

    def excess(self, phase: int, tail: float = 0.1) -> float | None:
        """Time of all collectives that ran alone or in groups, over what the best would have taken, in the last part
        of a phase's steps. None where nothing ran.
        """
        of_phase = self._log[self._log["phase"] == phase]
        if not len(of_phase):
            return None
        steps = of_phase["step"]
        last = of_phase[steps >= steps.max() - tail * (steps.max() - steps.min())]
        took = best = 0.0
        for number, func, nbytes in np.unique(last[["number", "func", "bytes"]]).tolist():
            calls = _of_size(last[last["number"] == number], func, nbytes)
            row = (number, func, nbytes)
            used, counts = np.unique(calls[["algo", "proto", "channels", "chunk_bytes"]], return_counts=True)
            times = [self._job.times.price_us(row, phase, a * N_PROTOCOLS + p, c, b) for a, p, c, b in used.tolist()]
            ever = _of_size(self._log[self._log["number"] == number], func, nbytes)
            least = min([us for us, _ in self._possible(row, ever, phase)] + times)
            took += float(np.dot(times, counts))
            best += least * int(counts.sum())
        return took / best
