"""A job on the emulated NCCL that plays a measured or a modelled fabric: its processes, its collectives, what they
cost, what shifts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.actions import Action
from dynamiccl_ray.calibration.cells import JOINT, joined
from dynamiccl_ray.calibration.samples import read_library
from dynamiccl_ray.config.fabrics import EmulatedFabric, EmulatedJob, Event, MeasuredFabric
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric import measured
from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.clusters import MEASURED, P5EN, P5EN_FILES, P5EN_GPUS, p5en_belief
from dynamiccl_ray.fabric.load import IDLE
from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import CHANNEL_VALUES, Collective
from dynamiccl_ray.plugin_bridge import native_dir, plugin_path
from dynamiccl_ray.plugin_bridge.constants import Constants, write_constants
from dynamiccl_ray.plugin_bridge.nccl_job import LOG, NcclJob
from dynamiccl_ray.plugin_bridge.program import Comm, Program
from dynamiccl_ray.plugin_bridge.times import Times
from dynamiccl_ray.simulation.tables import LEAST_OPTIONS, Table, tables

# The release of NCCL that the emulated one calls itself.
_VERSION: Final = "2.30.7"
# Standard deviation of a rank's own share of the log of a time.
_RANK_JITTER: Final = 0.002


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Times of one key in one phase without noise, in us."""

    nbytes: int
    default_us: float
    """Of NCCL's own choice."""
    oracle_us: float
    """Of the best that could have been chosen."""
    oracle_action: Action
    vendor_us: float | None
    """Of the vendor's tuner, where it was measured."""
    in_force_us: Callable[[Action], float | None]
    """Of the action that was in force at the end of the phase; None where the key was not called in it."""


@dataclass(frozen=True, kw_only=True)
class PlayedFabric:
    """A fabric laid out for the emulated NCCL, one collective of each key a step. P phases, K keys."""

    nbytes: npt.NDArray[np.int64]
    """(K,) sizes, as NCCL counts them."""
    keys: npt.NDArray[np.int64]
    """(K,) their keys."""
    time_us: npt.NDArray[np.float64]
    """(P, K, N_PAIRS, N_CHANNELS) without noise; NaN where there is no data or the action may not be tried."""
    sigma: npt.NDArray[np.float64]
    vendor_us: npt.NDArray[np.float64]
    """(K,) the vendor tuner's measured time in phase 0; NaN where there is none."""
    cluster: Cluster
    """That has these times."""
    program: Program
    comm: Comm
    constants: Constants
    times: Times

    @property
    def sms(self) -> int:
        """Streaming multiprocessors of a GPU."""
        return self.cluster.sms

    @property
    def gpus_per_node(self) -> int:
        return self.cluster.gpus_per_node

    counts_calls = True
    """Events come at a call of the only communicator."""

    @property
    def processes(self) -> dict[str, frozenset[int]]:
        """Ranks that have a process, by the communicator's name."""
        return {self.comm.name: frozenset(self.comm.places)}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The same, in order."""
        return self.comm.places

    def job(self, job_id: str, directory: Path) -> NcclJob:
        """Its processes; ``job_id`` is what the plugin is told."""
        constants = {self.comm.number: self.constants}
        gpus = self.gpus_per_node
        return emulated_job(self.program, self.times, constants, gpus_per_node=gpus, job_id=job_id, directory=directory)

    @property
    def valid(self) -> dict[int, npt.NDArray[np.bool_]]:
        """Key -> (N_PAIRS, N_CHANNELS): what has data in every phase."""
        return dict(zip(self.keys.tolist(), np.asarray(np.isfinite(self.time_us).all(0)), strict=True))

    def call_of(self, step: int) -> int:
        """The first call of a step; they count from 1."""
        return step * len(self.keys) + 1

    def step_of(self, collective: int) -> int:
        """The first step that begins with a collective, counted from 0, or after it."""
        return -(-collective // len(self.keys))

    def priced(self, _log: LOG, _actions: object = None, _offered: object = None) -> Self:
        """What is known of every collective's time: all of it, from the start."""
        return self

    def name(self, _: int) -> str:
        return self.comm.name

    def of(self, _: int, key: int, phase: int) -> Prices | None:
        """Of one key."""
        at = np.flatnonzero(self.keys == key)
        if not len(at):
            return None
        time_us = self.time_us[phase, at[0]]
        pair, channels = np.unravel_index(np.nanargmin(time_us), time_us.shape)
        vendor = float(self.vendor_us[at[0]])
        return Prices(
            nbytes=int(self.nbytes[at[0]]),
            default_us=float(time_us[0, 0]),
            oracle_us=float(np.nanmin(time_us)),
            oracle_action=Action(pair=int(pair), channels=int(channels)),
            vendor_us=vendor if phase == 0 and np.isfinite(vendor) else None,
            in_force_us=lambda action: float(time_us[action.pair, action.channels]),
        )

    def oracle_us(self, phase: int) -> npt.NDArray[np.float64]:
        """(K,) time of the best action, NCCL's own choice included."""
        return measured.oracle(self.time_us[phase])[0]

    def sample(self) -> str:
        """Which ranks the processes stand for, in words."""
        nodes = sorted({rank // self.gpus_per_node for rank in self.ranks})
        local = sorted({rank % self.gpus_per_node for rank in self.ranks})
        return (
            f"{len(self.ranks)} processes stand for ranks {local[0]}-{local[-1]} of nodes {nodes[0]}-{nodes[-1]} "
            f"among {self.comm.size} ranks on {len(set(self.comm.nodes))} nodes"
        )


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """What the two kinds of fabric differ in. P phases, K keys."""

    belief: Belief
    collective: npt.NDArray[np.int64]
    """(K,)"""
    nbytes: npt.NDArray[np.int64]
    """(K,)"""
    time_us: npt.NDArray[np.float64]
    """(P, K, N_PAIRS, N_CHANNELS)"""
    sigma: npt.NDArray[np.float64]
    vendor_us: npt.NDArray[np.float64]
    """(K,)"""
    cluster: Cluster


def play(fabric: EmulatedJob, *, seed: int, channels: Sequence[int] = CHANNEL_VALUES) -> PlayedFabric:
    """Lays out a measured or an emulated fabric; only ``channels`` may be asked for.

    Raises ConfigError for missing or unusable measurements, TypeError for a fabric of another kind.
    """
    if isinstance(fabric, MeasuredFabric):
        layout = _measured(fabric)
    elif isinstance(fabric, EmulatedFabric):
        layout = _emulated(fabric)
    else:
        raise TypeError(f"a fabric of type {type(fabric).__name__} cannot be played")
    asked = np.isin(CHANNEL_VALUES, channels)
    time_us = np.where(asked, layout.time_us, np.nan)
    nbytes, local = layout.nbytes, fabric.gpus_per_node
    order = np.random.default_rng(seed).permutation(len(nbytes))
    program = Program(
        nodes=fabric.processes.nodes,
        ranks_per_node=fabric.processes.ranks_per_node,
        rate_hz=fabric.rate_hz / len(nbytes),
    )
    comm = program.comm(
        "world",
        places=[n * local + r for n in range(fabric.processes.nodes) for r in range(fabric.processes.ranks_per_node)],
        size=fabric.nodes * local,
        nodes=[rank // local for rank in range(fabric.nodes * local)],
    )
    for rank in program.ranks:
        rank.setup.init(comm)
        for i in order:
            rank.step.collective(comm, Collective(int(layout.collective[i])), int(nbytes[i]))
        rank.step.sync()
        rank.end.destroy(comm)
    times = Times(n_phases=len(time_us), noise_seed=seed, rank_jitter=_RANK_JITTER)
    for i in range(len(nbytes)):
        times.asked(comm.number, int(layout.collective[i]), int(nbytes[i]), time_us[:, i], layout.sigma[:, i])
    return PlayedFabric(
        nbytes=nbytes,
        keys=np.array([key_of(c, b, False) for c, b in zip(layout.collective.tolist(), nbytes.tolist(), strict=True)]),
        time_us=time_us,
        sigma=layout.sigma,
        vendor_us=layout.vendor_us,
        cluster=layout.cluster,
        program=program,
        comm=comm,
        constants=Constants.of(comm, layout.belief),
        times=times,
    )


def emulated_job(
    program: Program,
    times: Times,
    constants: Mapping[int, Constants],
    *,
    gpus_per_node: int,
    job_id: str,
    directory: Path,
) -> NcclJob:
    """A program on the emulated NCCL; ``constants`` by the communicator's number."""
    directory.mkdir(parents=True, exist_ok=True)
    write_constants(directory / "constants.bin", constants)
    return NcclJob(
        program,
        library=native_dir() / "libnccl-emulated.so",
        directory=directory,
        times=times,
        env={
            "EMULATED_NCCL": str(directory / "constants.bin"),
            "EMULATED_NCCL_VERSION": _VERSION,
            "GPU_DEVICES": str(gpus_per_node),
            **plugin_env(job_id),
        },
    )


def plugin_env(job_id: str) -> dict[str, str]:
    """What makes NCCL load the plugin, for the job of this name."""
    plugin = str(plugin_path())
    return {"NCCL_TUNER_PLUGIN": plugin, "NCCL_PROFILER_PLUGIN": plugin, "DYNAMICCL_JOB_ID": job_id}


def _emulated(fabric: EmulatedFabric) -> _Layout:
    cluster = fabric.cluster
    physics = Physics(cluster, fabric.nodes)
    loads = [IDLE, *(event.load for event in fabric.events)]
    time_us = np.concatenate(
        [np.stack([physics.time_us(c.type, c.sizes_bytes, load) for load in loads]) for c in fabric.collectives], 1
    )
    collective = np.concatenate([np.full(len(c.sizes_bytes), int(c.type)) for c in fabric.collectives])
    nbytes = np.concatenate([np.array(c.sizes_bytes, np.int64) for c in fabric.collectives])
    # The plugin never asks for more channels than it has seen NCCL use.
    seen = physics.belief.choose(collective, nbytes).channels.max()
    time_us[..., np.array(CHANNEL_VALUES) > seen] = np.nan
    return _Layout(
        belief=physics.belief,
        collective=collective,
        nbytes=nbytes,
        time_us=time_us,
        sigma=np.where(np.isfinite(time_us), fabric.noise_sigma, np.nan),
        vendor_us=np.full(len(nbytes), np.nan),
        cluster=cluster,
    )


def _measured(fabric: MeasuredFabric) -> _Layout:
    surfaces = _p5en(fabric) if fabric.path is None else _own(fabric)
    base = surfaces.at(fabric.nodes)
    later = [_phase(surfaces, base, event) for event in fabric.events]
    nbytes = measured.playable_keys(base)
    time_us, sigma = measured.PhasedSurface(base=base, later=tuple(later)).tables(nbytes)
    assert base.belief is not None
    return _Layout(
        belief=base.belief,
        collective=np.full(len(nbytes), int(base.selection.collective)),
        nbytes=nbytes,
        time_us=time_us,
        sigma=sigma,
        vendor_us=base.vendor_us(nbytes),
        cluster=surfaces.cluster,
    )


@dataclass(frozen=True, kw_only=True)
class _Surfaces:
    """One collective of one machine, over numbers of nodes. ``at`` raises ConfigError for one that was not measured."""

    cluster: Cluster
    at: Callable[[int], measured.Surface]


def _p5en(fabric: MeasuredFabric) -> _Surfaces:
    measurements = measured.read_measurements(fabric.files or [MEASURED / name for name in P5EN_FILES])

    def at(nodes: int) -> measured.Surface:
        selection = measured.Selection(
            collective=Collective.ALL_REDUCE, nodes=nodes, ranks=nodes * P5EN_GPUS, gpus_per_node=P5EN_GPUS
        )
        selection.of(measurements)
        return measured.Surface.of(measurements, selection, p5en_belief(nodes))

    return _Surfaces(cluster=find_cluster(P5EN), at=at)


def _own(fabric: MeasuredFabric) -> _Surfaces:
    found = own_tables(fabric)

    def at(nodes: int) -> measured.Surface:
        table = found.get(nodes)
        if table is None:
            raise ConfigError(
                f"fabric.nodes: {fabric.collective} on {nodes} nodes of {fabric.gpus} GPUs was not measured in "
                f"{fabric.path}; it was on {', '.join(map(str, sorted(found)))} nodes"
            )
        if not table.default_known:
            raise ConfigError(
                f"{fabric.path}: NCCL's own choice was not measured at every size of {table.name}; add a log of "
                "nccl-tests without NCCL_ALGO and NCCL_PROTO"
            )
        return table.surface

    return _Surfaces(cluster=next(iter(found.values())).cluster, at=at)


def own_tables(fabric: MeasuredFabric) -> dict[int, Table]:
    """Nodes -> what was measured in a fabric's ``path``. Raises ConfigError where there is nothing to play."""
    assert fabric.path is not None
    machines = joined(read_library(fabric.path).machines)
    names = ", ".join(machine.name for machine in machines)
    if fabric.machine is None and len(machines) > 1:
        raise ConfigError(f"fabric.machine: {fabric.path} has the machines {names}; name one")
    # Tables that were joined are known by the name of each.
    chosen = [m for m in machines if fabric.machine in (None, m.name, *m.name.split(JOINT))]
    if not chosen:
        raise ConfigError(f"fabric.machine is {fabric.machine!r}; {fabric.path} has {names}")
    everything, _ = tables(chosen, horizon=2)
    wanted = int(Collective[fabric.collective.upper()])
    found = {
        table.scenario.nodes: table
        for table in everything
        if int(table.scenario.collective[0]) == wanted and table.cluster.gpus_per_node == fabric.gpus
    }
    if not found:
        known = "; ".join(table.name for table in everything) or "no shape"
        raise ConfigError(
            f"{fabric.path}: no size of {fabric.collective} on nodes of {fabric.gpus} GPUs has {LEAST_OPTIONS} "
            f"measured options, NCCL's own choice among them; there are {known}"
        )
    return found


def _phase(surfaces: _Surfaces, base: measured.Surface, event: Event) -> measured.NetworkPhase:
    if event.swap_nodes is not None:
        return measured.NetworkPhase(name=event.name, surface=surfaces.at(event.swap_nodes))
    assert event.link_bandwidth is not None
    return measured.NetworkPhase(
        name=event.name,
        surface=measured.scaled(base, event.link_bandwidth, event.latency),
    )
