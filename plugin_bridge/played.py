"""An emulated job that plays a measured or a modelled fabric: its processes, its collectives, what they cost, what
shifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.experiment import EmulatedFabric, Event, MeasuredFabric, PlayedJob
from dynamiccl_ray.fabric import measured
from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.clusters import MEASURED, P5EN_FILES, P5EN_GPUS, P5EN_SMS, p5en_belief
from dynamiccl_ray.fabric.describe import topology_of
from dynamiccl_ray.fabric.load import IDLE
from dynamiccl_ray.fabric.physics import OWN_CHUNK_BYTES, Physics
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import CHANNEL_VALUES, N_ALGORITHMS, N_PROTOCOLS, OWN_PAIR, Collective
from plugin_bridge.emulation import HostKey, HostProgram


@dataclass(frozen=True, kw_only=True)
class PlayedFabric:
    """A fabric laid out for the emulated host. P phases, K keys."""

    nbytes: npt.NDArray[np.int64]
    """(K,) sizes, as NCCL counts them."""
    keys: npt.NDArray[np.int64]
    """(K,) their keys."""
    time_us: npt.NDArray[np.float64]
    """(P, K, N_PAIRS, N_CHANNELS) without noise; NaN where there is no data or the action may not be tried."""
    sigma: npt.NDArray[np.float64]
    vendor_us: npt.NDArray[np.float64]
    """(K,) the vendor tuner's measured time in phase 0; NaN where there is none."""
    topology: dict[str, Any]
    """The fields of ``observation.Topology`` that a communicator does not know."""
    gpus_per_node: int
    sms: int
    """Streaming multiprocessors of a GPU."""
    program: HostProgram
    ranks: tuple[int, ...]
    """Communicator ranks that have a process."""

    @property
    def valid(self) -> dict[int, npt.NDArray[np.bool_]]:
        """Key -> (N_PAIRS, N_CHANNELS): what has data in every phase."""
        return dict(zip(self.keys.tolist(), np.asarray(np.isfinite(self.time_us).all(0)), strict=True))

    def oracle_us(self, phase: int) -> npt.NDArray[np.float64]:
        """(K,) time of the best action, NCCL's own choice included."""
        return measured.oracle(self.time_us[phase])[0]

    def sample(self) -> str:
        """Which ranks the processes stand for, in words."""
        nodes = sorted({rank // self.gpus_per_node for rank in self.ranks})
        local = sorted({rank % self.gpus_per_node for rank in self.ranks})
        return (
            f"{len(self.ranks)} processes stand for ranks {local[0]}-{local[-1]} of nodes {nodes[0]}-{nodes[-1]} "
            f"among {self.program.n_ranks} ranks on {self.program.n_nodes} nodes"
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
    topology: dict[str, Any]
    sms: int


def play(fabric: PlayedJob, *, seed: int, channels: Sequence[int] = CHANNEL_VALUES) -> PlayedFabric:
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
    program = HostProgram(
        comm_id=0xD1CC1 + fabric.nodes,
        comm_name="world",
        n_ranks=fabric.nodes * local,
        n_nodes=fabric.nodes,
        max_channels=layout.belief.communicator.channels or 16,
        keys=_host_keys(layout, np.asarray(np.isfinite(time_us).all(0))),
        order=order.astype(np.uint32),
        time_us=time_us,
        sigma=np.nan_to_num(layout.sigma),
        rate_hz=fabric.rate_hz,
        window=64,
        noise_seed=seed,
        rank_jitter=0.002,
    )
    return PlayedFabric(
        nbytes=nbytes,
        keys=np.array([key_of(c, b, False) for c, b in zip(layout.collective.tolist(), nbytes.tolist(), strict=True)]),
        time_us=time_us,
        sigma=layout.sigma,
        vendor_us=layout.vendor_us,
        topology=layout.topology,
        gpus_per_node=local,
        sms=layout.sms,
        program=program,
        ranks=tuple(
            node * local + rank
            for node in range(fabric.processes.nodes)
            for rank in range(fabric.processes.ranks_per_node)
        ),
    )


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
        topology=topology_of(cluster, fabric.nodes).model_dump(exclude={"ranks", "nodes"}),
        sms=cluster.sms,
    )


def _measured(fabric: MeasuredFabric) -> _Layout:
    measurements = measured.read_measurements(fabric.files or [MEASURED / name for name in P5EN_FILES])
    base = _surface(measurements, fabric.nodes)
    later = [_phase(measurements, base, event) for event in fabric.events]
    nbytes = measured.playable_keys(base)
    time_us, sigma = measured.MeasuredFabric(base=base, later=tuple(later)).tables(nbytes)
    return _Layout(
        belief=p5en_belief(fabric.nodes),
        collective=np.full(len(nbytes), int(Collective.ALL_REDUCE)),
        nbytes=nbytes,
        time_us=time_us,
        sigma=sigma,
        vendor_us=base.vendor_us(nbytes),
        topology={"intra": "nvlink", "inter": "efa", "nvls": True, "tier_max": 3},
        sms=P5EN_SMS,
    )


def _surface(measurements: Any, nodes: int) -> measured.Surface:
    selection = measured.Selection(
        collective=Collective.ALL_REDUCE, nodes=nodes, ranks=nodes * P5EN_GPUS, gpus_per_node=P5EN_GPUS
    )
    selection.of(measurements)
    return measured.Surface.of(measurements, selection, p5en_belief(nodes))


def _phase(measurements: Any, base: measured.Surface, event: Event) -> measured.Phase:
    if event.swap_nodes is not None:
        return measured.Phase(name=event.name, surface=_surface(measurements, event.swap_nodes))
    assert event.link_bandwidth is not None
    return measured.Phase(
        name=event.name,
        surface=measured.scaled(base, event.link_bandwidth, event.latency),
    )


def _host_keys(layout: _Layout, valid: npt.NDArray[np.bool_]) -> Sequence[HostKey]:
    """What NCCL would do with each key; pairs without a time look unavailable, so nothing can ask for them."""
    pairs = np.arange(N_ALGORITHMS * N_PROTOCOLS)
    cost = layout.belief.cost_table_us(layout.collective, layout.nbytes, 1)
    sizes = layout.nbytes[:, None]
    channels, warps = layout.belief.channels_and_warps(sizes, pairs // N_PROTOCOLS, pairs % N_PROTOCOLS)
    shape = (len(layout.nbytes), N_ALGORITHMS, N_PROTOCOLS)
    cost = np.where(valid[:, OWN_PAIR + 1 :].any(-1).reshape(shape), cost, np.float32(-1))
    return [
        HostKey(
            collective=Collective(int(layout.collective[i])),
            n_bytes=int(layout.nbytes[i]),
            cost_us=cost[i],
            own_channels=np.maximum(1, channels.reshape(shape)[i]).astype(np.uint8),
            own_warps=np.maximum(1, warps.reshape(shape)[i]).astype(np.uint8),
            own_chunk_bytes=np.broadcast_to(OWN_CHUNK_BYTES.astype(np.uint32), shape[1:]).copy(),
        )
        for i in range(len(layout.nbytes))
    ]
