"""Random scenarios to learn from: clusters near the presets, sizes as jobs have them, loads that shift.

Sizes are log-uniform within the ranges of some kinds of traffic: a decoding step's all-reduces, tensor parallelism
(Shoeybi et al. 2019, arXiv:1909.08053), ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054), data parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS
from dynamiccl_ray.agent.observation import (
    Caller,
    Compression,
    Context,
    GpuSharing,
    Llm,
    Parallelism,
    Scheduler,
    SyncMode,
    Topology,
    WorkloadContext,
)
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.describe import topology_of
from dynamiccl_ray.fabric.dynamics import Dynamics, Failures, Tail
from dynamiccl_ray.fabric.load import IDLE, Load
from dynamiccl_ray.fabric.load_streams import LoadStreams
from dynamiccl_ray.fabric.pricing import expected
from dynamiccl_ray.fabric.randomise import randomised
from dynamiccl_ray.fabric.recognise import taken_for
from dynamiccl_ray.knobs import N_PAIRS, OWN_PAIR, Collective
from dynamiccl_ray.simulation.scenario import Scenario, modelled


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of traffic."""

    collectives: tuple[Collective, ...]
    log2_bytes: tuple[float, float]
    calls: float
    """Of each key in one iteration of the job."""


TRAFFIC: Final = {
    "decoding": Traffic(collectives=(Collective.ALL_REDUCE,), log2_bytes=(13, 18), calls=64),
    "tensor parallel": Traffic(
        collectives=(Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
        log2_bytes=(20, 26.5),
        calls=32,
    ),
    "sharded": Traffic(collectives=(Collective.ALL_GATHER, Collective.REDUCE_SCATTER), log2_bytes=(23, 30), calls=16),
    "data parallel": Traffic(collectives=(Collective.ALL_REDUCE,), log2_bytes=(24, 30), calls=4),
    "rooted": Traffic(collectives=(Collective.BROADCAST, Collective.REDUCE), log2_bytes=(12, 27), calls=1),
    "anything": Traffic(collectives=tuple(Collective), log2_bytes=(8, 30), calls=4),
}
"""Kinds of traffic by name."""


PURPOSES: Final[Mapping[Parallelism, tuple[str, ...]]] = {
    "dp": ("data parallel", "anything"),
    "tp": ("tensor parallel", "decoding"),
    "pp": ("decoding", "anything"),
    "fsdp": ("sharded",),
    "3d": ("tensor parallel", "data parallel", "sharded"),
    "moe": ("sharded", "tensor parallel", "anything"),
}
"""Traffic of a communicator by what it is for."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What the scenarios have in common."""

    keys: int = 16
    least_phases: int = 1
    most_phases: int = 4
    horizon: int = 3000
    """Steps over which the shifts are spread."""
    spread: float = 0.2
    """Standard deviation of the logs of the factors on a cluster's rates and latencies."""
    sigma: tuple[float, float] = (0.005, 0.05)
    """Least and most noise of a job; log-uniform between them, ..."""
    uneven: float = 0.5
    """... times a log-normal factor of each key's own: standard deviation of its log."""
    rooted: float = 0.05
    """Share of the keys that are broadcasts and reductions to a root."""
    sync: tuple[SyncMode, ...] = ("bsp",)
    compression: tuple[tuple[Compression, float], ...] = (("none", 1.0),)
    """Methods and rates, bytes after over bytes before: messages shrink by it."""
    parallelism: tuple[Parallelism, ...] = ("dp",)
    """What communicators may be for."""
    dynamics: Dynamics = field(default_factory=Dynamics)
    """What the phases after the first are taken from; still: load at random."""
    rare: float = 0.01
    """Share of collectives in the noise's heavy tail, which half of the scenarios have."""


def sample_scenarios(
    rng: np.random.Generator, places: Sequence[tuple[Cluster, int]], count: int, sampling: Sampling | None = None
) -> list[Scenario]:
    """``count`` scenarios, each near a place drawn from ``places``: (cluster, nodes). Phase 0 is idle, and the model of
    the place itself says what to expect.

    Raises ValueError without a place, and what ``modelled`` does.
    """
    if not places:
        raise ValueError("places is empty; give (cluster, nodes) pairs, such as (find_cluster('cloud-tcp'), 8)")
    drawn = [places[int(i)] for i in rng.integers(len(places), size=count)]
    return [_sample(rng, cluster, nodes, sampling or Sampling()) for cluster, nodes in drawn]


def _sample(rng: np.random.Generator, cluster: Cluster, nodes: int, s: Sampling) -> Scenario:
    purpose = s.parallelism[int(rng.integers(len(s.parallelism)))]
    compression, rate = s.compression[int(rng.integers(len(s.compression)))]
    kinds = rng.choice(PURPOSES[purpose], rng.integers(1, len(PURPOSES[purpose]) + 1), replace=False)
    drawn = [TRAFFIC["rooted" if rng.random() < s.rooted else kind] for kind in rng.choice(kinds, s.keys)]
    collective = np.array([rng.choice(t.collectives) for t in drawn])
    nbytes = np.maximum(256, rate * 2 ** rng.uniform(*np.array([t.log2_bytes for t in drawn]).T)).astype(np.int64)
    order = np.lexsort((nbytes, collective))
    shifts = rng.integers(s.least_phases - 1, s.most_phases)
    # At least one step of each phase.
    starts = np.sort(rng.choice(np.arange(1, s.horizon), shifts, replace=False))
    factor = np.exp(s.uneven * rng.spawn(1)[0].standard_normal(s.keys))
    return modelled(
        randomised(cluster, rng, s.spread),
        nodes,
        collective=collective[order],
        nbytes=nbytes[order],
        weight=np.array([t.calls for t in drawn])[order],
        loads=[IDLE, *_loads(rng, cluster, nodes, starts, s)],
        starts=[0, *starts.tolist()],
        sigma=np.exp(rng.uniform(*np.log(s.sigma))) * factor,
        tail=Tail(probability=s.rare * int(rng.integers(2))),
        about=_about(rng, s, purpose, compression, rate),
        prior=expected(cluster, nodes, collective[order], nbytes[order]),
        said=cluster,
    )


def surprised(scenario: Scenario, rng: np.random.Generator, surprise: float) -> Scenario:
    """The same with what the model does not know of a machine: a log-normal factor on the times of each pair, part of
    it growing or falling with size, and one of each channel count and chunk.

    ``surprise`` is the standard deviation of the factors' logs; a quarter of it for channels and chunks.
    """
    octaves = (np.log2(scenario.nbytes) - 18) / 12
    level, tilt = rng.standard_normal((2, N_PAIRS))
    pair = level + octaves[:, None] * tilt
    channels, chunk = rng.standard_normal((N_PAIRS, N_CHANNELS)) / 4, rng.standard_normal((N_PAIRS, N_CHUNKS)) / 4
    factor = np.exp(surprise * (pair[:, :, None, None] + channels[:, :, None] + chunk[:, None]))
    # NCCL's own choice is one of the others, under another name.
    factor[:, OWN_PAIR, 0, 0] = factor[np.arange(len(octaves)), scenario.own_pair, 0, 0]
    return replace(scenario, times_us=(scenario.times_us * factor).astype(np.float32))


def told_of(scenario: Scenario, cluster: Cluster | None) -> Scenario:
    """The same of a job that says it runs on this cluster, right or wrong; None: that says nothing of itself, so that
    no more is known than NCCL tells of every communicator.

    A cluster that cannot have the job's nodes says nothing: it has no network, or one GPU in all.
    """
    known = scenario.context.topology
    if cluster is None or not cluster.has(scenario.nodes):
        silent = Context(topology=Topology(ranks=known.ranks, nodes=known.nodes))
        return replace(scenario, prior=None, said=None, context=silent)
    prior = expected(cluster, scenario.nodes, scenario.collective, scenario.nbytes)
    context = scenario.context.model_copy(update={"topology": topology_of(cluster, known.nodes, known.ranks)})
    return replace(scenario, prior=prior, said=cluster, context=context)


def recognised_of(scenario: Scenario, among: Sequence[Cluster] | None = None) -> Scenario:
    """The same of a job that does not say where it runs, or says what NCCL's predictions contradict, as the loop beside
    a job takes it: on that of the clusters ``among``, by default the presets, whose NCCL believes what NCCL believes
    here. Any other, and one of which NCCL's costs are not known, is left as it is."""
    topology = scenario.context.topology
    if scenario.prior is not None and scenario.said is None:
        return scenario
    of = (topology.ranks, topology.nodes, scenario.collective, scenario.nbytes, scenario.cost)
    like = taken_for(scenario.said, *of, among)
    if like is None:
        return scenario
    told = replace(told_of(scenario, like.cluster), said=None)
    if scenario.said is not None:
        return told
    # What a person said of the links stands.
    return replace(told, context=scenario.context.model_copy(update={"topology": like.topology(topology)}))


def _loads(
    rng: np.random.Generator, cluster: Cluster, nodes: int, starts: NDArray[np.int64], s: Sampling
) -> list[Load]:
    """The load of each phase: what a realisation of the dynamics has at its start; random where there are none."""
    if s.dynamics.still:
        return [random_load(rng, nodes) for _ in starts]
    devices = cluster.inter.nics if cluster.inter is not None and nodes > 1 else 0
    dynamics = s.dynamics if devices > 1 else s.dynamics.model_copy(update={"failures": Failures()})
    streams = LoadStreams(
        dynamics, streams=1, ranks=nodes * cluster.gpus_per_node, devices=devices, seed=int(rng.integers(1 << 31))
    )
    load = streams.advance(s.horizon).load
    return [Load(**{f.name: np.asarray(getattr(load, f.name))[at, 0] for f in fields(Load)}) for at in starts]


def _about(
    rng: np.random.Generator, s: Sampling, purpose: Parallelism, compression: Compression, rate: float
) -> dict[str, WorkloadContext | Scheduler | Llm]:
    """What the job says of itself; of no effect on times beyond the sizes that compression leaves."""
    sync = s.sync[int(rng.integers(len(s.sync)))]
    intensity, batch = float(np.exp(rng.uniform(np.log(100), np.log(1000)))), float(2 ** rng.integers(0, 8))
    in_stages = purpose in ("pp", "3d")
    return {
        "workload": WorkloadContext(
            sync=sync,
            tau=int(2 ** rng.integers(1, 7)) if sync in ("ssp", "local-sgd", "hybrid", "fedavg") else 1,
            compression=compression,
            rate=rate,
            caller=get_args(Caller)[int(rng.integers(len(get_args(Caller))))],
            priority_critical=bool(rng.random() < 0.1),
            intensity=intensity,
            local_batch=batch,
            communication_ratio=250 * 32 / (intensity * batch),
        ),
        "scheduler": Scheduler(
            stage=int(rng.integers(0, 8)) if in_stages else 0,
            role=("none", "intra-stage", "inter-stage")[int(in_stages) * int(rng.integers(1, 3))],
            priority=int(rng.integers(0, 3)),
            sharing=get_args(GpuSharing)[int(rng.integers(1, 4)) if rng.random() < 0.15 else 0],
            template_active=bool(in_stages and rng.random() < 0.1),
        ),
        "llm": Llm(parallelism=purpose, parameters=float(10 ** rng.uniform(7, 11.5))),
    }


def random_load(rng: np.random.Generator, nodes: int) -> Load:
    """Idle once in six; otherwise each of bandwidth, latency, a straggler and loss is hit with even odds.

    With one node it is the links inside that are hit, and nothing is lost. Factors are log-uniform.
    """
    if rng.random() < 1 / 6:
        return IDLE
    where = "inter" if nodes > 1 else "intra"
    ranges = {f"{where}_bandwidth": (0.15, 1.0), f"{where}_latency": (1.0, 5.0), "straggler": (1.0, 2.0)}
    if nodes > 1:
        ranges["loss"] = (1e-5, 3e-3)
    return Load(
        **{
            name: float(np.exp(rng.uniform(np.log(least), np.log(most))))
            for name, (least, most) in ranges.items()
            if rng.random() < 0.5
        }
    )
