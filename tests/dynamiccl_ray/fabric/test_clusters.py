"""The presets: valid, true to the published figures they name, and ordered by tier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.fabric.presets import DIRECTORY, find_cluster, preset_names
from dynamiccl_ray.fabric.randomise import randomised
from dynamiccl_ray.knobs import OWN_PAIR, Algorithm, Collective, Protocol

NAMES = preset_names()
# Steps of the speeds that NCCL tries, src/graph/search.cc.
SPEEDS = {0.12, 3, 6, 9, 12, 24, 40, 45, 48, 50, 60}
MULTIPLIERS = {1: 1, 2: 7, 3: 15, 4: 30}


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_plays_at_any_scale_and_names_its_sources(name: str) -> None:
    cluster = find_cluster(name)
    assert cluster.name == name
    assert "# Sources: " in (DIRECTORY / f"{name}.yaml").read_text()
    for nodes in (1, 2, 3, 16, 64):
        if nodes * cluster.gpus_per_node < 2:
            continue
        physics = Physics(cluster, nodes)
        for collective in Collective:
            times = physics.time_us(collective, [1, 1 << 20, 1 << 34])
            assert np.isfinite(times[:, OWN_PAIR, 0]).all()


@pytest.mark.parametrize("name", NAMES)
def test_beliefs_are_what_nccls_search_can_find(name: str) -> None:
    belief = find_cluster(name).belief
    for graph in (belief.ring, belief.tree, belief.nvls, belief.collnet):
        if graph is not None:
            found = {graph.intra_gb_per_s, graph.inter_gb_per_s, graph.inter_gb_per_s_beyond_2_nodes} - {None}
            assert found <= SPEEDS


def _farthest_hop_us(cluster: Cluster) -> dict[int, float]:
    """By tier, what an LL hop takes: LL has no handshake and no flush, so it is the nearest to the wire's latency."""
    hops = {} if cluster.intra.kind == "pcie" else {1: cluster.intra.step_us.ll}
    if cluster.inter is not None:
        hops[cluster.inter.tier] = cluster.inter.step_us.ll
        for group in cluster.groups:
            hops[group.tier] = cluster.inter.step_us.ll + group.step_us
    return hops


@pytest.mark.parametrize("name", NAMES)
def test_latencies_follow_the_tiers(name: str) -> None:
    hop = find_cluster("dgx-h100-ndr").intra.step_us.ll
    for tier, step in _farthest_hop_us(find_cluster(name)).items():
        assert 0.5 <= step / hop / MULTIPLIERS[tier] <= 2


def test_the_tiers_are_all_there() -> None:
    assert {find_cluster(name).tier(1 << k) for name in NAMES for k in (0, 4, 8)} == {1, 2, 3, 4}
    zones = find_cluster("fat-tree-two-zones")
    assert [zones.tier(n) for n in (1, 4, 16, 17)] == [1, 2, 2, 3]
    assert [find_cluster("gb200-nvl72").tier(n) for n in (18, 19)] == [1, 2]


def _own_us(name: str, nodes: int, nbytes: int) -> float:
    return float(Physics(find_cluster(name), nodes).time_us(Collective.ALL_REDUCE, [nbytes])[0, OWN_PAIR, 0])


@pytest.mark.parametrize(
    ("name", "nodes", "nbytes", "published_us", "within"),
    [
        # Shi et al. 2020: BERT-Large's 335 M fp32 gradients over 4 RTX 2080 Ti.
        ("rtx2080ti-ib100", 1, 335_000_000 * 4, 441_000, 0.15),
        # github.com/boeschf/nccl-benchmark-on-alps-2025.
        ("gh200-slingshot", 1, 1 << 30, 4765, 0.15),
        ("gh200-slingshot", 8, 1 << 30, 22_670, 0.15),
        ("gh200-slingshot", 8, 512, 51, 0.3),
        # github.com/coreweave/nccl-tests.
        ("gb200-nvl72", 18, 1 << 33, 20_299, 0.15),
        # github.com/yumibyte/CS244C-Research.
        ("l40s-pcie", 1, 8, 17.5, 0.15),
        ("l40s-pcie", 1, 1 << 27, 13_221, 0.15),
        # github.com/xxrjun/nccl-tests-cluster, github.com/JingchaoZhang/JingchaoZhang.github.io.
        ("dgx-h100-ndr", 10, 1 << 33, 53_632, 0.3),
        ("dgx-h100-ndr", 2, 8_000_000_000, 33_400, 0.2),
        # github.com/dailiuyao/ncclgauge-works: tree/LL128 on 16 channels is the choice at 4 nodes.
        ("p5en-h200-efa", 4, 1 << 20, 130, 0.2),
        # nccl-tests on 8 V100, public.
        ("dgx-v100", 1, 1 << 27, 1819, 0.15),
    ],
)
def test_presets_land_on_published_times(
    name: str, nodes: int, nbytes: int, published_us: float, within: float
) -> None:
    assert _own_us(name, nodes, nbytes) == pytest.approx(published_us, rel=within)


def test_infiniband_of_100_gigabits_is_as_published() -> None:
    """Shi et al. 2020: 16 KiB take 7.85 us, 32 KiB 10.1 us, 1 MB comes at 83.2 Gb/s; a hop and the wire here."""
    inter = find_cluster("rtx2080ti-ib100").inter
    assert inter is not None
    for nbytes, published_us in ((1 << 14, 7.85), (1 << 15, 10.1), (1_000_000, 1e6 * 8 / 83.2e3)):
        assert inter.step_us.ll + nbytes / inter.nic_gb_per_s / 1e3 == pytest.approx(published_us, rel=0.15)


def test_a_gigabit_a_second_takes_1600_s_for_200_gb() -> None:
    inter = find_cluster("ethernet-1g").inter
    assert inter is not None
    assert 200 / inter.nic_gb_per_s == pytest.approx(1600, rel=0.1)


def test_sharp_takes_one_crossing_where_a_ring_takes_two() -> None:
    """A public scaling report of B200 nodes with 400 Gb/s devices: CollNet is 1.5x to 1.8x a ring at 16 GiB."""
    physics = Physics(find_cluster("dgx-h100-ndr-sharp"), 16)
    what = (Collective.ALL_REDUCE, 1 << 34)
    ring = physics.price_us(*what, Algorithm.RING, Protocol.SIMPLE, 32)
    assert 1.3 < ring / physics.price_us(*what, Algorithm.NVLS, Protocol.SIMPLE, 16) < 2


def test_groups_cost_what_their_uplink_costs() -> None:
    """Between data centres 10 Gb/s set the pace: every byte leaves a data centre nearly twice in a ring."""
    physics = Physics(find_cluster("wan-two-datacentres"), 16)
    nbytes = 1 << 30
    ring = physics.price_us(Collective.ALL_REDUCE, nbytes, Algorithm.RING, Protocol.SIMPLE, 8)
    assert ring == pytest.approx(2 * nbytes / 1.2e3, rel=0.05)


def test_a_cluster_is_found_by_name_or_by_path(tmp_path: Any) -> None:
    copied = tmp_path / "mine.yaml"
    copied.write_text((DIRECTORY / "dgx-v100.yaml").read_text())
    assert find_cluster(str(copied)) == find_cluster("dgx-v100")
    with pytest.raises(ConfigError, match=r"no cluster 'dgx'; give the path of a YAML, or one of .*dgx-v100"):
        find_cluster("dgx")


def test_randomised_clusters_are_near_and_believe_the_same() -> None:
    preset = find_cluster("fat-tree-two-zones")
    near = [randomised(preset, np.random.default_rng(seed), 0.2) for seed in range(200)]
    assert near[0] == randomised(preset, np.random.default_rng(0), 0.2) != near[1]
    assert all(c.belief == preset.belief for c in near)
    assert all((c.gpus_per_node, c.topology.dims, c.overlap) == (8, (), preset.overlap) for c in near)
    for read in (
        lambda c: c.inter.nic_gb_per_s,
        lambda c: c.intra.step_us.ll,
        lambda c: c.groups[1].gb_per_s,
        lambda c: c.chunk_us.simple,
    ):
        logs = np.log([read(c) / read(preset) for c in near])
        assert abs(logs.mean()) < 0.05
        assert logs.std() == pytest.approx(0.2, rel=0.2)
    assert randomised(preset, np.random.default_rng(0), 0.0) == preset


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": [{"nodes": 8, "tier": 3, "gb_per_s": 1, "step_us": 1}] * 2}, "each group must be larger"),
        ({"in_network": {"nic_gb_per_s": 1, "step_us": 1}}, "in_network and belief.collnet: give both or neither"),
        ({"topology": {"kind": "torus", "dims": [4]}}, "dims"),
        ({"inter": None, "groups": [{"nodes": 8, "tier": 3, "gb_per_s": 1, "step_us": 1}]}, "need a network"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    raw = find_cluster("dgx-a100-hdr").model_dump()
    with pytest.raises(ValidationError, match=message):
        Cluster.model_validate(raw | changes)
