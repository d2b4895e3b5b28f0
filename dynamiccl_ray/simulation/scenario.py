"""What one job meets on a fabric: the time of every action for every key, and how that changes while the job runs.

Time is counted in steps: one step is one collective of every key. Sizes are in bytes as NCCL counts them, times in us.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamiccl_ray.actions import N_ACTIONS, N_CHANNELS, N_CHUNKS, OWN_ACTION
from dynamiccl_ray.agent.gates import hands_off
from dynamiccl_ray.agent.observation import Context, Topology, relative_cost
from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.describe import topology_of
from dynamiccl_ray.fabric.dynamics import Tail, Wander
from dynamiccl_ray.fabric.load import IDLE, Load
from dynamiccl_ray.fabric.measured import PhasedSurface
from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.fabric.pricing import action_times_us
from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS, N_PROTOCOLS, OWN_PAIR

Floats = NDArray[np.float32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """P phases of the network, K keys of one communicator. Phase 0 is the fabric that a sweep before the job sees."""

    cluster: str
    context: Context
    """What the job, and so a policy, knows of itself and its communicator."""
    collective: Int64
    """(K,)"""
    nbytes: Int64
    """(K,)"""
    weight: NDArray[np.float64]
    """(K,) calls in one iteration of the job: how much a key's time counts."""
    starts: Int64
    """(P,) step at which each phase begins: 0, then ascending."""
    times_us: Floats
    """(P, K, N_PAIRS, N_CHANNELS, N_CHUNKS) without noise; NaN for what is never asked for."""
    cost: Floats
    """(K, N_PAIRS) log of NCCL's predicted cost over its cheapest; 0 where there is none."""
    own_pair: Int64
    """(K,) the pair that NCCL chooses on its own; ``OWN_PAIR`` where that is not known."""
    sigma: NDArray[np.float64]
    """(K, N_ACTIONS) standard deviation of the log time; (K, 1) or one number where actions do not differ."""
    tail: Tail = field(default_factory=Tail)
    wander: Wander | None = None
    """What noise has in common with the noise before it; None for nothing."""
    sm_share: Floats | None = None
    """(K, N_PAIRS, N_CHANNELS) SMs that a collective takes over all of a GPU; None where the GPU is not known."""
    prior: Floats | None = None
    """(K, N_PAIRS, N_CHANNELS + N_CHUNKS) what the model of a described cluster expects, see ``pricing.expected``; None
    where nobody described one."""
    said: Cluster | None = None
    """The cluster that ``prior`` is of, where NCCL's costs may tell that it is another one."""
    earlier: Floats | None = None
    """Of the same shape: what earlier runs measured, see ``agent/earlier.py``; None where there was none."""

    def __post_init__(self) -> None:
        """Raise ValueError for phases that do not start at 0 and ascend, or without a time of NCCL's own choice."""
        shape = (len(self.nbytes), N_ACTIONS)
        object.__setattr__(self, "sigma", np.broadcast_to(np.asarray(self.sigma, np.float64), shape))
        starts = self.starts.tolist()
        if starts[:1] != [0] or sorted(set(starts)) != starts or len(starts) != len(self.times_us):
            raise ValueError(f"starts are {starts}; give one step for each of {len(self.times_us)} phases, 0 first")
        if not np.isfinite(self.default_us).all():
            raise ValueError("NCCL's own choice has no time for some key; every key needs one in every phase")

    @property
    def nodes(self) -> int:
        return self.context.topology.nodes

    @property
    def tier(self) -> int:
        """The farthest that the communicator crosses."""
        return self.context.topology.tier_max

    @cached_property
    def stamp(self) -> int:
        """Tells scenarios apart: 32 bits of their times."""
        return zlib.crc32(self.times_us.tobytes())

    @cached_property
    def flat_us(self) -> Floats:
        """(P, K, N_ACTIONS) view of ``times_us``."""
        return self.times_us.reshape(*self.times_us.shape[:2], N_ACTIONS)

    @cached_property
    def valid(self) -> Bool:
        """(K, N_ACTIONS): what may be asked for, in whatever phase."""
        return np.asarray(np.isfinite(self.flat_us).all(0))

    @cached_property
    def default_us(self) -> Floats:
        """(P, K) time of NCCL's own choice."""
        return self.flat_us[..., OWN_ACTION]

    @cached_property
    def oracle(self) -> Int64:
        """(P, K) flat action of the shortest time; the first of equals."""
        return np.asarray(np.where(self.valid, self.flat_us, np.inf).argmin(-1), np.int64)

    @cached_property
    def oracle_us(self) -> Floats:
        """(P, K)"""
        return np.asarray(np.take_along_axis(self.flat_us, self.oracle[..., None], -1)[..., 0])

    def phase_at(self, steps: ArrayLike) -> Int64:
        """The phase in force at each step, of the same shape."""
        return np.asarray(np.searchsorted(self.starts, steps, "right") - 1, np.int64)


def modelled(
    cluster: Cluster,
    nodes: int,
    *,
    collective: ArrayLike,
    nbytes: ArrayLike,
    weight: ArrayLike = 1.0,
    loads: Sequence[Load] = (IDLE,),
    starts: Sequence[int] = (0,),
    sigma: ArrayLike = 0.02,
    tail: Tail | None = None,
    about: Mapping[str, Any] | None = None,
    prior: Floats | None = None,
    said: Cluster | None = None,
) -> Scenario:
    """K keys (``collective``, ``nbytes``, ``weight`` and ``sigma`` broadcast to (K,)) on a modelled cluster.

    What has a time is as in ``action_times_us``. ``about`` has the other blocks of the context (``workload``,
    ``scheduler``, ``llm``), ``prior`` and ``said`` are as in ``Scenario``. Raises what ``Physics`` does.
    """
    collectives, sizes = np.broadcast_arrays(np.atleast_1d(collective), np.atleast_1d(nbytes))
    physics = Physics(cluster, nodes)
    belief = physics.belief
    choice = belief.choose(collectives, sizes)
    times = action_times_us(physics, collectives, sizes, loads)
    context = Context(topology=topology_of(cluster, nodes), **(about or {}))
    if hands_off(context):
        times[:, :, OWN_PAIR + 1 :] = np.nan
    return Scenario(
        cluster=cluster.name,
        context=context,
        collective=np.asarray(collectives, np.int64),
        nbytes=np.asarray(sizes, np.int64),
        weight=np.broadcast_to(np.asarray(weight, np.float64), sizes.shape).copy(),
        starts=np.asarray(starts, np.int64),
        times_us=times,
        cost=_cost(belief, collectives, sizes, times),
        own_pair=1 + N_PROTOCOLS * choice.algorithm + choice.protocol,
        sigma=np.broadcast_to(np.asarray(sigma, np.float64), sizes.shape)[:, None],
        tail=tail or Tail(),
        sm_share=_sm_share(cluster, belief, collectives, sizes),
        prior=prior,
        said=said,
    )


def measured(
    fabric: PhasedSurface,
    nbytes: ArrayLike,
    *,
    topology: Topology,
    weight: ArrayLike = 1.0,
    starts: Sequence[int] = (0,),
    prior: Floats | None = None,
) -> Scenario:
    """Sizes (K,) of one collective on measured surfaces; NCCL's own chunk only, one phase for each of the fabric's.

    Every action has its own noise, that of the first phase. Raises what ``PhasedSurface.tables`` does.
    """
    sizes = np.asarray(nbytes, np.int64)
    time_us, sigma = fabric.tables(sizes)
    times = np.full((*time_us.shape, N_CHUNKS), np.nan, np.float32)
    times[..., 0] = time_us
    belief, of = fabric.base.belief, fabric.base.selection
    collective = np.full(sizes.shape, int(of.collective), np.int64)
    own_pair = np.full(sizes.shape, OWN_PAIR, np.int64)
    cost = np.zeros((len(sizes), N_PAIRS), np.float32)
    if belief is not None:
        choice = belief.choose(collective, sizes)
        own_pair = 1 + N_PROTOCOLS * choice.algorithm + choice.protocol
        cost = _cost(belief, collective, sizes, times)
    return Scenario(
        cluster="measured",
        context=Context(topology=topology),
        collective=collective,
        nbytes=sizes,
        weight=np.broadcast_to(np.asarray(weight, np.float64), sizes.shape).copy(),
        starts=np.asarray(starts, np.int64),
        times_us=times,
        cost=cost,
        own_pair=own_pair,
        sigma=np.repeat(np.nan_to_num(sigma[0]).reshape(len(sizes), -1), N_CHUNKS, -1),
        prior=prior,
    )


def _sm_share(cluster: Cluster, belief: Belief, collective: NDArray[Any], nbytes: NDArray[Any]) -> Floats:
    """One thread block, and so one SM, for each channel: what is asked for, or what NCCL's heuristics take."""
    pair = np.arange(N_PAIRS - 1)
    own, _ = belief.channels_and_warps(nbytes[:, None], pair // N_PROTOCOLS, pair % N_PROTOCOLS)
    channels = np.broadcast_to(CHANNEL_VALUES, (len(nbytes), N_PAIRS, N_CHANNELS)).astype(np.float32)
    channels[:, 1:, 0] = own
    channels[:, OWN_PAIR, 0] = belief.choose(collective, nbytes).channels
    return np.asarray(np.maximum(channels, 1) / cluster.sms, np.float32)


def _cost(belief: Belief, collective: NDArray[Any], nbytes: NDArray[Any], times_us: Floats) -> Floats:
    """Of the pairs that have a time: beside a job, NCCL offers no other."""
    table = belief.cost_table_us(collective, nbytes).reshape(len(nbytes), -1)
    played = np.isfinite(times_us[:, :, 1:]).any((0, 3, 4))
    return relative_cost(np.where(played, table, np.float32(-1)))
