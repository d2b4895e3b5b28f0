"""The scenarios of a curriculum: what its stages learn from, and what a policy is judged on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from dynamiccl_ray.config.curriculum import Curriculum, Stage
from dynamiccl_ray.fabric.anywhere import anywhere
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.clusters import P5EN, p5en_all_reduce
from dynamiccl_ray.fabric.describe import topology_of
from dynamiccl_ray.fabric.dynamics import Bursts, Dynamics, Tail, Wander
from dynamiccl_ray.fabric.measured import PhasedSurface, playable_keys
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.fabric.pricing import expected
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.simulation.sampling import Sampling, sample_scenarios
from dynamiccl_ray.simulation.scenario import Scenario, measured

MEASURED_NODES: Final = (4, 8, 16, 32)
"""Numbers of p5en nodes whose measured tables a policy is judged on; nothing learns from a table."""
HELD_OUT: Final = "held out"
SHIFTS: Final = 3
"""Of the load, in every run on a held-out or a random cluster."""
RANDOM: Final = "random clusters"
RANDOM_SHARE: Final = 4
"""Random clusters, with one job each, for every job of a stage."""
RANDOM_NODES: Final = (2, 4, 8, 16, 32, 64)
NOISY: Final = "noise"
NOISE: Final[Mapping[str, tuple[float, Wander]]] = {
    "correlated 0.5": (0.05, Wander(correlation=0.5)),
    "correlated 0.7": (0.05, Wander(correlation=0.7)),
    "two modes": (0.02, Wander(slow=0.3)),
    "bursts of 20": (0.03, Wander(bursts=Bursts(mean_gap=500, mean_length=20))),
    "bursts of 100": (0.03, Wander(bursts=Bursts(mean_gap=500, mean_length=100))),
    "drift": (0.02, Wander(drift=0.1)),
}
"""By name, standard deviation and what else: noise as it is, where the network never changes."""
# With a stream of its own, no evaluation draws what training drew.
_EVALUATION: Final = 0xE7A1
_RANDOM: Final = 0xA57


def sampling_of(stage: Stage, curriculum: Curriculum, horizon: int = Sampling.horizon) -> Sampling:
    """What the scenarios of a stage have in common; their shifts come within ``horizon`` steps."""
    return Sampling(
        keys=curriculum.streams.keys,
        rooted=curriculum.streams.rooted,
        least_phases=stage.least_phases,
        most_phases=stage.most_phases,
        dynamics=stage.dynamics,
        horizon=horizon,
        spread=stage.spread,
        sync=stage.sync,
        compression=stage.compression,
        parallelism=stage.parallelism,
    )


def stage_scenarios(
    stage: Stage, curriculum: Curriculum, seed: int | Sequence[int], count: int, horizon: int = Sampling.horizon
) -> list[Scenario]:
    """``count`` fresh scenarios of a stage's kind; the same for the same seed."""
    places = [(place.cluster, nodes) for place in stage.places for nodes in place.nodes]
    return sample_scenarios(np.random.default_rng(seed), places, count, sampling_of(stage, curriculum, horizon))


def held_out_stages(curriculum: Curriculum) -> dict[str, Stage]:
    """By the split's name: the last stage's kind of jobs on each cluster that no stage has, where the load shifts
    ``SHIFTS`` times to one drawn at random.
    """
    clusters = list(dict.fromkeys(place.cluster.name for place in curriculum.held_out))
    return {
        f"{HELD_OUT}: {name}": _shifting(curriculum).model_copy(
            update={"places": tuple(p for p in curriculum.held_out if p.cluster.name == name)}
        )
        for name in clusters
    }


def _shifting(curriculum: Curriculum) -> Stage:
    """The last stage with ``SHIFTS`` shifts in every job."""
    shifting = {"least_phases": SHIFTS + 1, "most_phases": SHIFTS + 1, "dynamics": Dynamics()}
    return curriculum.stages[-1].model_copy(update=shifting)


def random_places(curriculum: Curriculum, count: int) -> list[tuple[Cluster, int]]:
    """Clusters drawn from wide ranges, and numbers of nodes; the same for the same curriculum's seed."""
    rng = np.random.default_rng((curriculum.seed, _EVALUATION, _RANDOM))
    return [(anywhere(rng, f"random-{i}"), int(rng.choice(RANDOM_NODES))) for i in range(count)]


def random_cluster_scenarios(curriculum: Curriculum, horizon: int, count: int) -> list[Scenario]:
    """The last stage's kind of jobs, one on each of ``random_places``, where the load shifts ``SHIFTS`` times."""
    rng = np.random.default_rng((curriculum.seed, _EVALUATION, _RANDOM, 1))
    sampling = sampling_of(_shifting(curriculum), curriculum, horizon)
    return [sample_scenarios(rng, [place], 1, sampling)[0] for place in random_places(curriculum, count)]


def measured_scenario(nodes: int) -> Scenario:
    """All-reduce as measured on p5en nodes, at every size with NCCL's own choice and two pairs.

    Raises ConfigError for a number of nodes that was not measured.
    """
    surface, cluster = p5en_all_reduce(nodes), find_cluster(P5EN)
    sizes = playable_keys(surface)
    return measured(
        PhasedSurface(base=surface),
        sizes,
        topology=topology_of(cluster, nodes),
        prior=expected(cluster, nodes, Collective.ALL_REDUCE, sizes),
    )


def evaluation_splits(
    curriculum: Curriculum, count: int, horizon: int, measured_nodes: Sequence[int] = MEASURED_NODES
) -> dict[str, list[Scenario]]:
    """What a policy is judged on, by the split's name: ``count`` scenarios of every stage and half as many of each
    held-out cluster, none of which it learned from; ``RANDOM_SHARE`` times as many on random clusters, one on each; one
    of each held-out cluster that does not change, under each kind of noise; and a measured table for each of
    ``measured_nodes``.
    """
    held = held_out_stages(curriculum)
    kinds = {f"training: {stage.name}": stage for stage in curriculum.stages} | held
    modelled = {
        name: stage_scenarios(
            stage, curriculum, (curriculum.seed, _EVALUATION, i), -(-count // 2) if name in held else count, horizon
        )
        for i, (name, stage) in enumerate(kinds.items())
    }
    still = [scenario for name in held for scenario in modelled[name][:1]]
    noisy = {
        f"{NOISY}: {name}": [_unchanging(scenario, sigma, wander) for scenario in still]
        for name, (sigma, wander) in NOISE.items()
    }
    unknown = {RANDOM: random_cluster_scenarios(curriculum, horizon, RANDOM_SHARE * count)}
    return (
        modelled
        | unknown
        | noisy
        | {f"measured p5en, {nodes} nodes": [measured_scenario(nodes)] for nodes in measured_nodes}
    )


def _unchanging(scenario: Scenario, sigma: float, wander: Wander) -> Scenario:
    """Its first phase for ever, under other noise."""
    starts, times_us = scenario.starts[:1], scenario.times_us[:1]
    return replace(scenario, starts=starts, times_us=times_us, sigma=np.asarray(sigma), tail=Tail(), wander=wander)
