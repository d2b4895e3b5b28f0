"""The physical model: laws that hold whatever the numbers are, on every preset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.load import IDLE, Load
from dynamiccl_ray.fabric.measured import oracle
from dynamiccl_ray.fabric.physics import BUFFER_BYTES, Physics
from dynamiccl_ray.fabric.presets import find_cluster, preset_names
from dynamiccl_ray.fabric.randomise import randomised
from dynamiccl_ray.knobs import CHANNEL_VALUES, OWN_PAIR, Algorithm, Collective, Protocol, pair_index

CLUSTERS = {name: find_cluster(name) for name in preset_names()}
SIZES = [1 << k for k in range(10, 31)]
PAIRS = [(a, p) for a in Algorithm for p in Protocol]
ALGORITHM, PROTOCOL = np.array(PAIRS).T

sizes = st.integers(1, 2**34)
collectives = st.sampled_from(list(Collective))
channel_counts = st.integers(1, 32)
threads = st.sampled_from([0, 64, 128, 256, 512])
chunks = st.sampled_from([0, *(1 << k for k in range(14, 23))])


@st.composite
def machines(draw: Any) -> Physics:
    """Presets and clusters near them, at node counts that include odd ones and several groups."""
    cluster: Cluster = CLUSTERS[draw(st.sampled_from(sorted(CLUSTERS)))]
    if draw(st.booleans()):
        cluster = randomised(cluster, np.random.default_rng(draw(st.integers(0, 9))), 0.3)
    return Physics(cluster, draw(st.sampled_from([1, 2, 3, 4, 8, 17, 33] if cluster.gpus_per_node > 1 else [2, 5, 16])))


@st.composite
def loads(draw: Any) -> dict[str, float]:
    return {
        "intra_bandwidth": draw(st.floats(0.01, 1)),
        "inter_bandwidth": draw(st.floats(0.01, 1)),
        "intra_latency": draw(st.floats(1, 50)),
        "inter_latency": draw(st.floats(1, 50)),
        "straggler": draw(st.floats(1, 10)),
        "loss": draw(st.floats(0, 0.5)),
    }


def _all_pairs(physics: Physics, collective: int, nbytes: int, channels: int, **how: Any) -> Any:
    """(21,)"""
    return physics.price_us(collective, nbytes, ALGORITHM, PROTOCOL, channels, **how)


def _never_below(greater: Any, less: Any) -> bool:
    known = np.isfinite(less)
    return bool(np.array_equal(known, np.isfinite(greater)) and np.all(greater[known] >= less[known] * (1 - 1e-12)))


@given(machines(), collectives, sizes, sizes, channel_counts, threads, chunks)
def test_more_bytes_never_cost_less(
    physics: Physics, collective: Collective, one: int, other: int, channels: int, threads: int, chunk: int
) -> None:
    less, more = sorted([one, other])
    how = {"threads": threads, "chunk_bytes": chunk}
    cheap, dear = (_all_pairs(physics, collective, size, channels, **how) for size in (less, more))
    assert _never_below(dear, cheap)


@given(machines(), collectives, sizes, channel_counts, loads(), st.sampled_from(sorted(vars(IDLE))), st.floats(0, 1))
def test_more_load_of_any_kind_never_costs_less(
    physics: Physics, collective: Collective, size: int, channels: int, load: dict[str, float], field: str, by: float
) -> None:
    idle = float(getattr(IDLE, field))
    eased = load | {field: load[field] + by * (idle - load[field])}
    busy, easier = (_all_pairs(physics, collective, size, channels, load=Load(**x)) for x in (load, eased))
    assert _never_below(busy, easier)


@given(machines(), collectives, sizes, channel_counts, threads, chunks, loads())
def test_times_are_positive_and_finite_exactly_where_nccl_offers_the_pair(
    physics: Physics, collective: Collective, size: int, channels: int, threads: int, chunk: int, load: dict[str, float]
) -> None:
    how = {"threads": threads, "chunk_bytes": chunk, "load": Load(**load)}
    times = _all_pairs(physics, collective, size, channels, **how)
    offered = physics.belief.cost_table_us(collective, size).reshape(-1) >= 0
    # What NCCL will not offer, such as LL128 over PCIe, the machine may well do; the action is refused below.
    assert np.isfinite(times[offered]).all()
    assert (times[offered] > 0).all()
    assert not np.isinf(times).any()
    assert np.array_equal(times, _all_pairs(physics, collective, size, channels, **how), equal_nan=True)


@given(machines(), collectives, sizes)
def test_an_action_that_nccl_does_not_offer_or_grant_is_never_priced(
    physics: Physics, collective: Collective, size: int
) -> None:
    times = physics.time_us(collective, [size])[0]
    offered = physics.belief.cost_table_us(collective, size).reshape(-1) >= 0
    expected = offered[:, None] & physics.grantable()[ALGORITHM]
    assert np.array_equal(np.isfinite(times[OWN_PAIR + 1 :]), expected)
    assert np.isfinite(times[OWN_PAIR, 0])
    assert not np.isfinite(times[OWN_PAIR, 1:]).any()


@settings(max_examples=40)
@given(machines(), collectives, st.lists(sizes, min_size=1, max_size=4), loads())
def test_the_table_of_actions_agrees_with_the_batch(
    physics: Physics, collective: Collective, some: list[int], load: dict[str, float]
) -> None:
    table = physics.time_us(collective, some, Load(**load))
    choice = physics.belief.choose(collective, some)
    for i, size in enumerate(some):
        for j, channels in enumerate(CHANNEL_VALUES[1:], 1):
            times = _all_pairs(physics, collective, size, channels, load=Load(**load))
            asked = table[i, OWN_PAIR + 1 :, j]
            assert np.array_equal(asked[np.isfinite(asked)], times[np.isfinite(asked)])
        own = pair_index(int(choice.algorithm[i]), int(choice.protocol[i]))
        assert table[i, OWN_PAIR, 0] == table[i, own, 0]
        if choice.channels[i] in CHANNEL_VALUES[1:] and physics.grantable()[choice.algorithm[i]].sum() > 1:
            column = CHANNEL_VALUES.index(int(choice.channels[i]))
            assert table[i, own, 0] == table[i, own, column] or np.isnan(table[i, own, column])


@given(machines(), st.integers(0, 2**32))
def test_a_batch_is_priced_as_its_items_are(physics: Physics, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 20
    what = [rng.integers(0, most, n) for most in (5, 2**30, 7, 3, 32)]
    what[1] += 1
    what[4] += 1
    load = Load(straggler=1 + rng.random(n), inter_bandwidth=rng.uniform(0.1, 1, n))
    together = physics.price_us(*what, load=load)
    alone = [
        physics.price_us(*row, load=Load(straggler=s, inter_bandwidth=b))
        for *row, s, b in zip(*what, np.asarray(load.straggler), np.asarray(load.inter_bandwidth), strict=True)
    ]
    assert np.array_equal(together, np.array(alone), equal_nan=True)


def test_blocks_leave_no_seams() -> None:
    physics = Physics(CLUSTERS["dgx-h100-ndr"], 4)
    nbytes = np.linspace(1, 2**31, 30_003).astype(np.int64).reshape(3, -1)
    times = physics.price_us(Collective.ALL_REDUCE, nbytes, Algorithm.RING, Protocol.SIMPLE, 8)
    assert times.shape == nbytes.shape
    assert (np.diff(times.ravel()) >= 0).all()


def test_textbook_limits() -> None:
    """Large messages: a ring moves 2(n-1)/n N over the slowest link, trees 2 N, and NVLS beats a ring on one node.

    The rest are the handshakes of chunks.
    """
    cluster, size = CLUSTERS["dgx-h100-ndr"], 1 << 36
    inter = cluster.inter
    assert inter is not None
    wire_us = size / (min(inter.nics * inter.nic_gb_per_s, cluster.intra.gpu_gb_per_s) * 1e3)

    def time(nodes: int, algorithm: Algorithm, load: Load = IDLE) -> float:
        return float(
            Physics(cluster, nodes).price_us(Collective.ALL_REDUCE, size, algorithm, Protocol.SIMPLE, 32, load=load)
        )

    assert time(4, Algorithm.RING) == pytest.approx(2 * 31 / 32 * wire_us, rel=0.04)
    half = Load(inter_bandwidth=0.5)
    network_us = size / (inter.nics * inter.nic_gb_per_s * 1e3)
    assert time(4, Algorithm.TREE, half) == pytest.approx(2 * 2 * network_us, rel=0.04)
    assert time(1, Algorithm.NVLS) < time(1, Algorithm.RING)


def test_channels_threads_and_chunks_do_what_they_do_on_a_gpu() -> None:
    physics = Physics(CLUSTERS["dgx-h100-ndr"], 4)
    ring, large = (Collective.ALL_REDUCE, 1 << 30, Algorithm.RING, Protocol.SIMPLE), [1, 2, 4, 8, 16]
    assert (np.diff(physics.price_us(*ring, large)) < 0).all()
    few = physics.price_us(*ring, 1, threads=[64, 128, 256, 512])
    assert (np.diff(few) < 0).all()
    tree = (Collective.ALL_REDUCE, 1 << 24, Algorithm.TREE, Protocol.SIMPLE, 4)
    over_chunks = physics.price_us(*tree, chunk_bytes=[1 << k for k in range(14, 23)])
    best = int(over_chunks.argmin())
    assert 0 < best < len(over_chunks) - 1, "too small a chunk costs handshakes, too large a one fills slowly"
    most = int(BUFFER_BYTES[Protocol.SIMPLE])
    assert physics.price_us(*tree, chunk_bytes=most) == physics.price_us(*tree, chunk_bytes=most // 2)


@pytest.mark.parametrize("name", ["dgx-h100-ndr", "rtx4090-pcie", "dgx-a100-hdr"])
def test_the_best_channel_count_depends_on_the_size(name: str) -> None:
    times = Physics(CLUSTERS[name], 4).time_us(Collective.ALL_REDUCE, SIZES)
    ring = times[:, pair_index(Algorithm.RING, Protocol.SIMPLE), 1:]
    most = int(np.isfinite(ring[0]).sum())
    small, large = ring[0, :most], ring[-1, :most]
    assert small[0] < 1.01 * small.min()
    assert large[0] > 1.3 * large.min()
    # They fill the link before all are in use: the last ones bring little.
    assert large[-1] > 0.8 * large[-2]


def test_the_best_action_differs_between_clusters() -> None:
    names = ("dgx-h100-ndr", "rtx4090-pcie", "cloud-tcp", "gb200-nvl72")
    best = {}
    for name in names:
        times = Physics(CLUSTERS[name], 4).time_us(Collective.ALL_REDUCE, SIZES)
        best[name] = list(zip(*oracle(times)[1:], strict=True))
    for one in best:
        for other in set(best) - {one}:
            assert sum(a != b for a, b in zip(best[one], best[other], strict=True)) >= len(SIZES) // 4


def test_what_the_cluster_cannot_do_is_nan() -> None:
    times = Physics(CLUSTERS["dgx-h100-ndr"], 4).time_us(Collective.ALL_REDUCE, SIZES)
    nvls_tree = times[:, pair_index(Algorithm.NVLS_TREE, Protocol.SIMPLE)]
    assert np.isfinite(nvls_tree[:, [0, 1, 2, 3, 4, 5, 6]]).all()
    assert np.isnan(nvls_tree[:, 7:]).all()  # 24 and 32 of its 16 channels
    tcp = Physics(CLUSTERS["cloud-tcp"], 4).time_us(Collective.ALL_REDUCE, SIZES)
    assert np.isnan(tcp[:, pair_index(Algorithm.RING, Protocol.LL128)]).all()
    pcie = Physics(CLUSTERS["rtx4090-pcie"], 1).time_us(Collective.ALL_REDUCE, SIZES)
    assert np.isnan(pcie[:, :, CHANNEL_VALUES.index(12) :]).all()
    gathered = Physics(CLUSTERS["dgx-h100-ndr"], 4).time_us(Collective.ALL_GATHER, SIZES)
    assert np.isnan(gathered[:, pair_index(Algorithm.TREE, Protocol.SIMPLE)]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nbytes": 0}, "nbytes holds 0"),
        ({"channels": 0}, "channels holds 0; it must be from 1"),
        ({"algorithm": 7}, "algorithm holds 7; it must be from 0 to 6"),
        ({"chunk_bytes": -1}, "chunk_bytes holds -1"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, int], message: str) -> None:
    what = {"collective": 4, "nbytes": 1, "algorithm": 1, "protocol": 0, "channels": 1}
    with pytest.raises(ValueError, match=message):
        Physics(CLUSTERS["cloud-tcp"], 2).price_us(**(what | changes))
    with pytest.raises(ValueError, match="each at least 1"):
        Physics(CLUSTERS["cloud-tcp"], 2).time_us(Collective.ALL_REDUCE, [0])


@pytest.mark.parametrize(
    ("field", "value"), [("inter_bandwidth", 0), ("intra_latency", -1), ("straggler", 0.9), ("loss", 1), ("loss", -0.1)]
)
def test_a_load_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value:g}; it must be"):
        Load(**{field: [0.5 if field == "loss" else 1.0, value]})


@settings(max_examples=60)
@given(physics=machines(), collective=collectives, nbytes=sizes, channels=channel_counts, load=loads())
def test_a_link_is_busy_for_at_most_all_of_the_time(
    physics: Physics, collective: Collective, nbytes: int, channels: int, load: dict[str, float]
) -> None:
    times = _all_pairs(physics, collective, nbytes, channels, load=Load(**load))
    shares = physics.link_shares(collective, nbytes, ALGORITHM, PROTOCOL, channels, load=Load(**load))
    assert set(shares) == {"gpu", "device", "uplink"}
    for share in shares.values():
        assert share.shape == times.shape
        assert np.array_equal(np.isfinite(share), np.isfinite(times))
        known = share[np.isfinite(share)]
        assert np.all((known >= 0) & (known <= 1 + 1e-12))


def test_the_link_that_a_large_message_waits_for_is_the_busy_one() -> None:
    shares = Physics(CLUSTERS["wan-two-datacentres"], 16).link_shares(
        Collective.ALL_REDUCE, 1 << 32, Algorithm.RING, Protocol.SIMPLE, 8
    )
    assert shares["uplink"] > 0.95
    assert shares["device"] < 0.3
    alone = Physics(CLUSTERS["l40s-pcie"], 1).link_shares(
        Collective.ALL_REDUCE, 1 << 32, Algorithm.RING, Protocol.SIMPLE, 8
    )
    assert alone["gpu"] > 0.9
    assert alone["device"] == alone["uplink"] == 0
