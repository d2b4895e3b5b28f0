"""The physical model: laws that must hold whatever the numbers are, and what the shipped clusters must show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.experiment import EmulatedFabric, Online, load
from dynamiccl_ray.fabric.cluster_config import Cluster, load_cluster
from dynamiccl_ray.fabric.measured import oracle
from dynamiccl_ray.fabric.physics import IDLE, Load, Physics
from dynamiccl_ray.knobs import CHANNEL_VALUES, OWN_PAIR, Algorithm, Collective, Protocol, pair_index
from plugin_bridge.played import play

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FILES = sorted((EXPERIMENTS / "clusters").glob("*.yaml"))
CLUSTERS = {path.stem: load_cluster(path) for path in FILES}
SIZES = [1 << k for k in range(10, 31)]

clusters = st.sampled_from(sorted(CLUSTERS)).map(CLUSTERS.__getitem__)
node_counts = st.sampled_from([1, 2, 3, 4, 8, 32])
collectives = st.sampled_from(list(Collective))
sizes = st.integers(1, 2**34)
shares = st.floats(0.01, 1.0)
factors = st.floats(1.0, 100.0)


def _all_reduce(name: str, nodes: int, sizes_bytes: list[int] = SIZES) -> Any:
    return Physics(CLUSTERS[name], nodes).time_us(Collective.ALL_REDUCE, sizes_bytes)


def _never_below(greater: Any, less: Any) -> bool:
    known = np.isfinite(less)
    return bool(np.array_equal(known, np.isfinite(greater)) and np.all(greater[known] >= less[known] * (1 - 1e-12)))


@given(clusters, node_counts, collectives, sizes, sizes)
def test_more_bytes_never_cost_less_on_channels_that_were_asked_for(
    cluster: Cluster, nodes: int, collective: Collective, one: int, other: int
) -> None:
    times = Physics(cluster, nodes).time_us(collective, sorted([one, other]))
    assert _never_below(times[1, :, 1:], times[0, :, 1:])


@given(clusters, node_counts, collectives, sizes, shares, shares, factors, factors)
def test_more_load_never_costs_less(
    cluster: Cluster,
    nodes: int,
    collective: Collective,
    size: int,
    share: float,
    further_share: float,
    factor: float,
    further_factor: float,
) -> None:
    physics = Physics(cluster, nodes)
    busy = Load(link_bandwidth=share, latency=factor)
    busier = Load(link_bandwidth=share * further_share, latency=factor * further_factor)
    idle, loaded, overloaded = (physics.time_us(collective, [size], load) for load in (IDLE, busy, busier))
    assert _never_below(loaded, idle)
    assert _never_below(overloaded, loaded)


@given(clusters, node_counts, collectives, sizes)
def test_times_are_positive_and_finite_where_nccl_offers_the_pair(
    cluster: Cluster, nodes: int, collective: Collective, size: int
) -> None:
    physics = Physics(cluster, nodes)
    times = physics.time_us(collective, [size])[0]
    assert not np.isinf(times).any()
    assert (times[np.isfinite(times)] > 0).all()
    offered = physics.belief.cost_table_us(collective, size).reshape(-1) >= 0
    assert np.array_equal(np.isfinite(times[1:, 0]), offered)
    assert not np.isfinite(times[1:][~offered]).any()
    assert np.isfinite(times[OWN_PAIR, 0])
    assert not np.isfinite(times[OWN_PAIR, 1:]).any()


def test_nccls_own_choice_is_priced_as_the_pair_it_picks_on_the_channels_it_picks() -> None:
    physics = Physics(CLUSTERS["dgx-h100-ndr"], 4)
    times = physics.time_us(Collective.ALL_REDUCE, SIZES)
    choice = physics.belief.choose(Collective.ALL_REDUCE, SIZES)
    for i, (algorithm, protocol, channels) in enumerate(
        zip(choice.algorithm, choice.protocol, choice.channels, strict=True)
    ):
        pair = pair_index(int(algorithm), int(protocol))
        assert times[i, OWN_PAIR, 0] == times[i, pair, 0]
        if channels in CHANNEL_VALUES:
            assert times[i, pair, 0] == times[i, pair, CHANNEL_VALUES.index(int(channels))]


@pytest.mark.parametrize("nodes", [2, 4, 16])
@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_nccls_own_choice_leaves_a_gap_to_the_oracle(name: str, nodes: int) -> None:
    times = _all_reduce(name, nodes)
    ratio = times[:, OWN_PAIR, 0] / oracle(times)[0]
    assert (ratio >= 1).all()
    # Small enough to be credible: measured on p5en it is 1.09 to 1.11, on TCP 1.5.
    assert 1.03 < np.exp(np.log(ratio).mean()) < 1.6


def test_the_best_action_differs_between_clusters() -> None:
    best = {name: list(zip(*oracle(_all_reduce(name, 4))[1:], strict=True)) for name in CLUSTERS}
    for one in best:
        for other in set(best) - {one}:
            assert sum(a != b for a, b in zip(best[one], best[other], strict=True)) >= len(SIZES) // 4


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_the_best_channel_count_depends_on_the_size(name: str) -> None:
    times = _all_reduce(name, 4)
    ring = times[:, pair_index(Algorithm.RING, Protocol.SIMPLE), 1:]
    most = int(np.isfinite(ring[0]).sum())
    small, large = ring[0, :most], ring[-1, :most]
    assert small[0] < 1.01 * small.min()
    assert large[0] > 1.5 * large.min()
    # They fill the link before all are in use: the last ones bring little.
    assert large[-1] > 0.8 * large[-2]


def test_what_the_cluster_cannot_do_is_nan() -> None:
    times = _all_reduce("dgx-h100-ndr", 4)
    nvls_tree = times[:, pair_index(Algorithm.NVLS_TREE, Protocol.SIMPLE)]
    assert np.isfinite(nvls_tree[:, [0, 1, 2, 3, 4, 5, 6]]).all()
    assert np.isnan(nvls_tree[:, 7:]).all()  # 24 and 32 of its 16 channels
    assert np.isnan(_all_reduce("cloud-tcp", 4)[:, pair_index(Algorithm.RING, Protocol.LL128)]).all()
    assert np.isnan(_all_reduce("rtx4090-pcie", 1)[:, :, CHANNEL_VALUES.index(12) :]).all()
    gathered = Physics(CLUSTERS["dgx-h100-ndr"], 4).time_us(Collective.ALL_GATHER, SIZES)
    assert np.isnan(gathered[:, pair_index(Algorithm.TREE, Protocol.SIMPLE)]).all()


def test_textbook_limits() -> None:
    """Large messages: a ring moves 2(n-1)/n N over the slowest link, trees 2 N, and NVLS beats a ring on one node."""
    cluster, size = CLUSTERS["dgx-h100-ndr"], 1 << 34
    times = _all_reduce("dgx-h100-ndr", 4, [size])[0]
    inter = cluster.inter
    assert inter is not None
    wire_us = size / (min(inter.nics * inter.nic_gb_per_s, cluster.intra.gpu_gb_per_s) * 1e3)
    most = CHANNEL_VALUES.index(32)
    assert times[pair_index(Algorithm.RING, Protocol.SIMPLE), most] == pytest.approx(2 * 31 / 32 * wire_us, rel=0.01)
    busy = Physics(cluster, 4).time_us(Collective.ALL_REDUCE, [size], Load(link_bandwidth=0.5))[0]
    tree = pair_index(Algorithm.TREE, Protocol.SIMPLE)
    assert times[tree, most] == pytest.approx(2 * wire_us, rel=0.01)
    assert busy[tree, most] == pytest.approx(2 * size / (inter.nics * inter.nic_gb_per_s * 0.5e3), rel=0.01)
    one = _all_reduce("dgx-h100-ndr", 1, [size])[0]
    assert one[pair_index(Algorithm.NVLS, Protocol.SIMPLE), 0] < np.nanmin(
        one[pair_index(Algorithm.RING, Protocol.SIMPLE)]
    )


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="each at least 1"):
        _all_reduce("cloud-tcp", 2, [0])
    with pytest.raises(ValueError, match="link_bandwidth is 0"):
        Load(link_bandwidth=0)


def _experiment(cluster: Any, **fabric: Any) -> dict[str, Any]:
    calls = [{"collective": "all_reduce", "sizes_bytes": [4096, 1 << 20]}]
    return {
        "name": "test",
        "fabric": {"kind": "emulated", "cluster": cluster, "nodes": 2, "collectives": calls, **fabric},
        "stop": {"rounds": 1},
    }


def _refused(tmp_path: Path, experiment: dict[str, Any]) -> str:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_cluster_is_found_beside_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(FILES[0].read_text())
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(_experiment("mine.yaml")))
    experiment = load(tmp_path / "experiment.yaml")
    assert isinstance(experiment.fabric, EmulatedFabric)
    assert experiment.fabric.cluster == load_cluster(FILES[0])
    # A finished run carries its cluster with it.
    assert Online.model_validate_json(experiment.model_dump_json()) == experiment


def test_a_wrong_cluster_is_one_clear_error(tmp_path: Path) -> None:
    message = _refused(tmp_path, _experiment("nowhere.yaml"))
    assert f"{tmp_path / 'nowhere.yaml'}: cannot read the cluster: No such file or directory" in message
    raw = yaml.safe_load(FILES[0].read_text())
    raw["inter"]["nic_gbps"] = 3
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw))
    message = _refused(tmp_path, _experiment("mine.yaml"))
    assert f"{tmp_path / 'mine.yaml'}: unknown key 'inter.nic_gbps' (value 3)" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collectives": [{"collective": "all_reduce", "sizes_bytes": [4096, 4100]}]}, "all_reduce/4KiB"),
        ({"collectives": []}, "at least 1 item"),
        ({"events": [{"at_collective": 5, "swap_nodes": 4}]}, "unknown key 'fabric.emulated.events.0.swap_nodes'"),
        ({"events": [{"link_bandwidth": 0.5}]}, "exactly one of at_collective and exploit_rounds"),
        ({"processes": {"nodes": 2, "ranks_per_node": 9}}, "2 nodes x 8 GPUs"),
    ],
)
def test_a_wrong_fabric_is_one_clear_error(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in _refused(tmp_path, _experiment(str(FILES[0]), **changes))


def test_nodes_need_a_network(tmp_path: Path) -> None:
    raw = yaml.safe_load(FILES[-1].read_text())
    del raw["inter"]
    assert "has no network (inter), so nodes must be 1, not 2" in _refused(tmp_path, _experiment(raw))


def test_a_played_model_has_a_phase_per_load_and_only_channels_that_may_be_asked_for() -> None:
    fabric = load(EXPERIMENTS / "online" / "emulated-dgx-h100.yaml").fabric
    assert isinstance(fabric, EmulatedFabric)
    played = play(fabric, seed=0, channels=(0, 8, 16))
    assert played.time_us.shape[:2] == (2, 9)
    asked = np.isfinite(played.time_us).any((0, 1, 2))
    assert [c for c, a in zip(CHANNEL_VALUES, asked, strict=True) if a] == [0, 8, 16]
    assert played.topology == {"intra": "nvlink", "inter": "ib", "nvls": True}
    assert np.isnan(played.vendor_us).all()
    assert _never_below(played.time_us[1], played.time_us[0])
