"""An emulated job that plays a measured fabric: which processes, which collectives, what they cost, what shifts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.experiment import Event, MeasuredFabric
from dynamiccl_ray.fabric import measured
from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.clusters import MEASURED, P5EN_FILES, P5EN_GPUS, p5en_belief
from dynamiccl_ray.knobs import N_ALGORITHMS, N_PROTOCOLS, Collective
from dynamiccl_ray.table import key_of
from plugin_bridge.emulation import HostKey, HostProgram

# NCCL's default chunk per protocol on such a machine: an eighth of the buffer, less the flags of LL and LL128.
_OWN_CHUNK = np.array([16384, 460800, 524288], np.uint32)


@dataclass(frozen=True, kw_only=True)
class PlayedFabric:
    """A measured fabric laid out for the emulated host. P phases, K keys."""

    nbytes: npt.NDArray[np.int64]
    """(K,) sizes at which NCCL's own choice and at least two pairs were measured."""
    keys: npt.NDArray[np.int64]
    """(K,) their keys."""
    time_us: npt.NDArray[np.float64]
    """(P, K, N_PAIRS, N_CHANNELS) without noise; NaN where there is no data."""
    sigma: npt.NDArray[np.float64]
    vendor_us: npt.NDArray[np.float64]
    """(K,) the vendor tuner's measured time in phase 0; NaN where there is none."""
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
        nodes = sorted({rank // P5EN_GPUS for rank in self.ranks})
        local = sorted({rank % P5EN_GPUS for rank in self.ranks})
        return (
            f"{len(self.ranks)} processes stand for ranks {local[0]}-{local[-1]} of nodes {nodes[0]}-{nodes[-1]} "
            f"among {self.program.n_ranks} ranks on {self.program.n_nodes} nodes"
        )


def play(fabric: MeasuredFabric, *, seed: int) -> PlayedFabric:
    """Lays out a measured fabric. Raises ConfigError for missing or unusable measurements."""
    belief = p5en_belief(fabric.nodes)
    measurements = measured.read_measurements(fabric.files or [MEASURED / name for name in P5EN_FILES])
    base = _surface(measurements, fabric.nodes)
    later = [_phase(measurements, base, event) for event in fabric.events]
    nbytes = measured.playable_keys(base)
    surfaces = measured.MeasuredFabric(base=base, later=tuple(later))
    time_us, sigma = surfaces.tables(nbytes)
    order = np.random.default_rng(seed).permutation(len(nbytes))
    ranks = tuple(
        node * P5EN_GPUS + local
        for node in range(fabric.processes.nodes)
        for local in range(fabric.processes.ranks_per_node)
    )
    program = HostProgram(
        comm_id=0xD1CC1 + fabric.nodes,
        comm_name="world",
        n_ranks=fabric.nodes * P5EN_GPUS,
        n_nodes=fabric.nodes,
        max_channels=belief.communicator.channels or 16,
        keys=_host_keys(belief, nbytes, np.asarray(np.isfinite(time_us).all(0))),
        order=order.astype(np.uint32),
        time_us=time_us,
        sigma=np.nan_to_num(sigma),
        rate_hz=fabric.rate_hz,
        window=64,
        noise_seed=seed,
        rank_jitter=0.002,
    )
    return PlayedFabric(
        nbytes=nbytes,
        keys=np.array([key_of(Collective.ALL_REDUCE, int(b), False) for b in nbytes], np.int64),
        time_us=time_us,
        sigma=sigma,
        vendor_us=base.vendor_us(nbytes),
        program=program,
        ranks=ranks,
    )


def _surface(measurements: Any, nodes: int) -> measured.Surface:
    selection = measured.Selection(
        collective=Collective.ALL_REDUCE, nodes=nodes, ranks=nodes * P5EN_GPUS, gpus_per_node=P5EN_GPUS
    )
    selection.of(measurements)
    return measured.Surface.of(measurements, selection, p5en_belief(nodes))


def _phase(measurements: Any, base: measured.Surface, event: Event) -> measured.Phase:
    if event.swap_nodes is not None:
        return measured.Phase(name=f"{event.swap_nodes} nodes", surface=_surface(measurements, event.swap_nodes))
    assert event.link_bandwidth is not None
    return measured.Phase(
        name=f"links at {event.link_bandwidth:.0%}",
        surface=measured.scaled(base, event.link_bandwidth, event.latency),
    )


def _host_keys(belief: Belief, nbytes: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_]) -> Sequence[HostKey]:
    """What NCCL would do with each size; pairs without measurements look unavailable, so nothing can ask for them."""
    pairs = np.arange(N_ALGORITHMS * N_PROTOCOLS)
    cost = belief.cost_table_us(Collective.ALL_REDUCE, nbytes, 1)
    channels, warps = belief.channels_and_warps(nbytes[:, None], pairs // N_PROTOCOLS, pairs % N_PROTOCOLS)
    shape = (len(nbytes), N_ALGORITHMS, N_PROTOCOLS)
    cost = np.where(valid[:, 1:].any(-1).reshape(shape), cost, np.float32(-1))
    return [
        HostKey(
            collective=Collective.ALL_REDUCE,
            n_bytes=int(nbytes[i]),
            cost_us=cost[i],
            own_channels=np.maximum(1, channels.reshape(shape)[i]).astype(np.uint8),
            own_warps=np.maximum(1, warps.reshape(shape)[i]).astype(np.uint8),
            own_chunk_bytes=np.broadcast_to(_OWN_CHUNK, shape[1:]).copy(),
        )
        for i in range(len(nbytes))
    ]
