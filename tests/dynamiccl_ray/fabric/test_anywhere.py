"""Clusters drawn at random: any of them can be played, they differ widely, and a seed gives the same again."""

from __future__ import annotations

import numpy as np

from dynamiccl_ray.fabric.anywhere import anywhere
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.simulation.scenario import modelled

SIZES = [1 << k for k in range(10, 31, 4)]


def clusters(count: int, seed: int = 0) -> list[Cluster]:
    rng = np.random.default_rng(seed)
    return [anywhere(rng, f"random-{i}") for i in range(count)]


def test_all_of_them_can_be_played_and_many_leave_room_for_tuning() -> None:
    gains = []
    for cluster in clusters(60):
        for nodes in (2, 64):
            scenario = modelled(cluster, nodes, collective=int(Collective.ALL_REDUCE), nbytes=SIZES)
            assert np.isfinite(scenario.oracle_us).all()
            assert (scenario.oracle_us > 1).all()
            gains.append(scenario.default_us / scenario.oracle_us)
    assert np.mean(np.array(gains) > 1.05) > 0.2


def test_they_are_of_all_kinds() -> None:
    of = clusters(200)
    assert {c.intra.kind for c in of} == {"nvlink", "pcie", "c2c"}
    assert {c.inter.kind for c in of if c.inter} == {"ib", "roce", "efa", "slingshot", "tcp"}
    assert {c.gpus_per_node for c in of} == {1, 2, 4, 8, 16}
    assert 0 < sum(c.nvls is not None for c in of) < 100
    assert 0 < sum(c.in_network is not None for c in of) < 100
    rates = [c.inter.nic_gb_per_s for c in of if c.inter]
    assert max(rates) / min(rates) > 100


def test_a_seed_gives_the_same_clusters_again() -> None:
    assert clusters(5) == clusters(5)
    assert clusters(5) != clusters(5, seed=1)
