"""The measured fabric against its CSV files, read here a second time without its code."""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric.clusters import MEASURED, p5en_all_reduce, p5en_belief
from dynamiccl_ray.fabric.measured import (
    NetworkPhase,
    PhasedSurface,
    Selection,
    Surface,
    oracle,
    playable_keys,
    read_measurements,
    scaled,
    valid,
)
from dynamiccl_ray.fabric.measurements import COLUMNS
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol, pair_index, pair_name

SWEEP = MEASURED / "aws_p5en_allreduce_2to128nodes.csv"
TUNERS = MEASURED / "aws_p5en_tuner_comparison_8_16nodes.csv"
CHANNELS = MEASURED / "aws_p5en_allreduce_nchannels.csv"
NAMES = {"Ring": "ring", "Tree": "tree", "NVLSTree": "nvls_tree"}
TREE_LL = pair_index(Algorithm.TREE, Protocol.LL)
RING_SIMPLE = pair_index(Algorithm.RING, Protocol.SIMPLE)
RING_LL = pair_index(Algorithm.RING, Protocol.LL)

MACHINE = {
    "source_id": "lab",
    "collective": "all_reduce",
    "nodes": "2",
    "ranks": "16",
    "gpus_per_node": "8",
    "gpu": "H200",
    "intra": "NVSwitch",
    "inter": "IB",
    "nchannels": "",
}
SELECTION = Selection(collective=Collective.ALL_REDUCE, nodes=2, ranks=16, gpus_per_node=8)


@pytest.fixture(scope="module")
def eight() -> Surface:
    return p5en_all_reduce(8)


@pytest.fixture(scope="module")
def sixteen() -> Surface:
    return p5en_all_reduce(16)


def rows_of(path: Path, nodes: int) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [r for r in csv.DictReader(file) if r["nodes"] == str(nodes) and r["gpus_per_node"] == "8"]


def medians(nodes: int) -> dict[int, dict[str, float]]:
    """Bytes -> choice -> median time; cold starts left out."""
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in rows_of(SWEEP, nodes):
        if row["bytes"] != "8192":
            name = f"{NAMES[row['algo']]}/{row['proto'].lower()}"
            times[int(row["bytes"]), name].append(float(row["time_us"]))
    for row in rows_of(TUNERS, nodes):
        times[int(row["bytes"]), row["algo"]].append(float(row["time_us"]))
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for (nbytes, name), values in times.items():
        found[nbytes][name] = statistics.median(values)
    return found


def geomean(ratios: np.ndarray) -> float:
    return float(np.exp(np.log(ratios).mean()))


def table(path: Path, rows: list[dict[str, object]]) -> Path:
    """A CSV of rows on one machine; each gives algo, proto, bytes, time_us and what differs."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({**MACHINE, **row} for row in rows)
    return path


def row(algo: str, proto: str, nbytes: int, time_us: float, **other: object) -> dict[str, object]:
    return {"algo": algo, "proto": proto, "bytes": nbytes, "time_us": time_us, **other}


def small(tmp_path: Path, rows: list[dict[str, object]]) -> Surface:
    return Surface.of(read_measurements([table(tmp_path / "t.csv", rows)]), SELECTION)


# ---- the response ----


@pytest.mark.parametrize("nodes", [8, 16])
def test_exact_at_every_measured_size(nodes: int) -> None:
    surface, times = p5en_all_reduce(nodes), medians(nodes)
    sizes = sorted(times)
    got = surface.time_us(sizes)
    pairs = {pair_name(pair): pair for pair in range(got.shape[1])} | {"default": 0}
    for k, nbytes in enumerate(sizes):
        for name, expected in times[nbytes].items():
            if "(" not in name:
                assert got[k, pairs[name], 0] == pytest.approx(expected, rel=1e-12)


def test_channel_rows_land_on_their_channel() -> None:
    got = p5en_all_reduce(8, forced_channels=True).time_us([1 << 20])[0]
    [at] = [
        float(r["time_us"])
        for r in rows_of(CHANNELS, 8)
        if (r["algo"], r["proto"], r["nchannels"], r["bytes"]) == ("Ring", "Simple", "16", str(1 << 20))
    ]
    assert got[RING_SIMPLE, 6] == pytest.approx(at, rel=1e-12)
    assert np.isfinite(got[RING_SIMPLE]).tolist() == [True] * 5 + [False, True, False, False]


def test_between_sizes_straight_in_log_log_and_nothing_outside(tmp_path: Path) -> None:
    surface = small(tmp_path, [row("Ring", "Simple", 1 << 10, 10.0), row("ring", "SIMPLE", 1 << 14, 160.0)])
    got = surface.time_us([1023, 1 << 10, 1 << 12, 1 << 14, (1 << 14) + 1])
    assert got[:, RING_SIMPLE, 0] == pytest.approx([np.nan, 10, 40, 160, np.nan], nan_ok=True)
    assert not valid(np.delete(got, RING_SIMPLE, axis=1)).any()


@given(nbytes=st.integers(16384, 1 << 28))
def test_between_its_neighbours(eight: Surface, nbytes: int) -> None:
    curve = eight.curves[TREE_LL, 0]
    after = np.clip(np.searchsorted(curve.nbytes, nbytes), 1, len(curve.nbytes) - 1)
    low, high = sorted(curve.time_us[after - 1 : after + 1])
    assert low * (1 - 1e-12) <= eight.time_us([nbytes])[0, TREE_LL, 0] <= high * (1 + 1e-12)


def test_ll_ends_where_its_sweep_ends_and_cold_starts_are_gone(eight: Surface) -> None:
    got = eight.time_us([8192, 1 << 28, (1 << 28) + 1])
    assert np.isfinite(got[:, RING_LL, 0]).tolist() == [False, True, False]
    assert np.isfinite(got[0, :, 0]).nonzero()[0].tolist() == [0]


@given(nbytes=st.integers(8192, 1 << 35))
def test_noise_is_positive_exactly_where_there_is_a_time(eight: Surface, nbytes: int) -> None:
    time, sigma = eight.time_us([nbytes]), eight.sigma([nbytes])
    assert (valid(time) == valid(sigma)).all()
    assert (sigma[valid(sigma)] > 0).all()


def test_noise_is_pooled_and_borrowed_where_nothing_was_repeated(tmp_path: Path) -> None:
    rows = [row("Ring", "LL", 1024, t) for t in (10.0, 11.0, 12.0)]
    rows += [row("Ring", "LL", 2048, t) for t in (20.0, 20.0)]
    surface = small(tmp_path, [*rows, row("Tree", "LL", 1024, 15.0)])
    scatter = statistics.variance(math.log(t) for t in (10.0, 11.0, 12.0)) * 2
    sigma = surface.sigma([1024])[0]
    assert sigma[RING_LL, 0] == pytest.approx(math.sqrt(scatter / 3))
    assert sigma[TREE_LL, 0] == sigma[RING_LL, 0]


@pytest.mark.parametrize("sizes", [[0], [[1024]], 1024])
def test_sizes_must_be_a_vector_of_bytes(eight: Surface, sizes: object) -> None:
    with pytest.raises(ValueError, match="expected a vector of bytes"):
        eight.time_us(sizes)  # type: ignore[arg-type]


# ---- NCCL's own choice ----


def test_default_is_measured_where_it_was(eight: Surface) -> None:
    assert eight.default_source == "measured"
    assert eight.time_us([65536])[0, 0].tolist() == pytest.approx([399.8] + [math.nan] * 8, nan_ok=True)


def test_default_is_what_nccl_believes_elsewhere() -> None:
    surface = p5en_all_reduce(4)
    assert surface.default_source == "belief"
    sizes = playable_keys(surface)
    choice = p5en_belief(4).choose(Collective.ALL_REDUCE, sizes)
    time = surface.time_us(sizes)
    for k, (a, p) in enumerate(zip(choice.algorithm, choice.protocol, strict=True)):
        assert time[k, 0, 0] == time[k, pair_index(a, p), 0]
    assert surface.sigma(sizes)[0, 0, 0] == surface.sigma(sizes)[0, TREE_LL, 0]


def test_default_is_unknown_otherwise_and_said_so() -> None:
    selection = Selection(collective=Collective.ALL_REDUCE, nodes=4, ranks=32, gpus_per_node=8)
    surface = Surface.of(read_measurements([SWEEP]), selection)
    assert surface.default_source == "none"
    assert np.isnan(surface.time_us([1 << 20])[:, 0]).all()
    with pytest.raises(ConfigError, match=r"no rows with algo=default.*Belief"):
        playable_keys(surface)
    with pytest.raises(ConfigError, match="NCCL's own choice is not known"):
        PhasedSurface(base=surface).tables([1 << 20])


def test_other_tuners_are_never_the_default(tmp_path: Path) -> None:
    rows = [row("default(region-tuner)", "default(region-tuner)", 1024, 1.0)]
    rows += [row("default(model-tuner)", "default(model-tuner)", 1024, 2.0)]
    rows += [row("Ring", "default", 1024, 3.0), row("default", "LL", 1024, 4.0), row("Tree", "LL", 1024, 5.0)]
    surface = small(tmp_path, rows)
    time = surface.time_us([1024])
    assert surface.default_source == "none"
    assert np.argwhere(valid(time)).tolist() == [[0, TREE_LL, 0]]
    assert surface.vendor_us([1024, 2048]) == pytest.approx([1.0, np.nan], nan_ok=True)


def test_a_belief_of_another_size_is_refused() -> None:
    measurements = read_measurements([SWEEP])
    selection = Selection(collective=Collective.ALL_REDUCE, nodes=4, ranks=32, gpus_per_node=8)
    with pytest.raises(ConfigError, match="8 nodes and 64 ranks; it must be of 4 and 32"):
        Surface.of(measurements, selection, p5en_belief(8))


def test_belief_agrees_with_nccl_where_its_choice_was_logged() -> None:
    sizes = 1 << np.arange(10, 31)
    logged = ["tree/ll"] * 8 + ["tree/ll128"] * 7 + ["ring/ll128"] * 4 + ["ring/simple"] * 2
    choice = p5en_belief(4).choose(Collective.ALL_REDUCE, sizes)
    names = [pair_name(pair_index(a, p)) for a, p in zip(choice.algorithm, choice.protocol, strict=True)]
    differ = [k for k in range(21) if names[k] != logged[k]]
    assert [sizes[k] >> 20 for k in differ] == [64, 128, 256, 512]
    assert {names[k] for k in differ} == {"nvls_tree/simple"}


# ---- the best action, and what is published about it ----


@pytest.mark.parametrize("nodes", [8, 16])
def test_oracle_is_the_best_row(nodes: int) -> None:
    surface, times = p5en_all_reduce(nodes), medians(nodes)
    keys = playable_keys(surface)
    best_us, pair, channels = oracle(surface.time_us(keys))
    for k, nbytes in enumerate(keys.tolist()):
        ours = {"nccl" if n == "default" else n: t for n, t in times[nbytes].items() if "(" not in n}
        name = min(ours, key=ours.__getitem__)
        assert best_us[k] == pytest.approx(ours[name], rel=1e-12)
        assert (pair_name(pair[k]), channels[k]) == (name, 0)


def test_oracle_needs_an_action() -> None:
    time = np.full((2, 22, 9), np.nan)
    time[0, 3, 2] = 1.0
    with pytest.raises(ValueError, match="key 1 has no valid action"):
        oracle(time)


@pytest.mark.parametrize(("nodes", "default", "vendor"), [(8, 1.11, 1.06), (16, 1.09, 1.05)])
def test_published_ratios(nodes: int, default: float, vendor: float) -> None:
    surface = p5en_all_reduce(nodes)
    keys = playable_keys(surface)
    assert (len(keys), keys[0], keys[-1]) == (35, 16 << 10, 16 << 30)
    time = surface.time_us(keys)
    own = time[:, 0, 0].copy()
    time[:, 0] = np.nan
    best = oracle(time)[0]
    assert geomean(own / best) == pytest.approx(default, abs=0.01)
    assert geomean(surface.vendor_us(keys) / best) == pytest.approx(vendor, abs=0.01)


# ---- other networks ----

FACTOR = st.floats(0.05, 2.0)


@settings(max_examples=30)
@given(one=FACTOR, other=FACTOR, latency=st.floats(1, 5))
def test_less_bandwidth_is_never_faster(eight: Surface, one: float, other: float, latency: float) -> None:
    less, more = sorted((one, other))
    sizes = np.geomspace(16384, 1 << 34, 40).astype(np.int64)
    slow, fast = (scaled(eight, bandwidth, latency).time_us(sizes) for bandwidth in (less, more))
    assert (valid(slow) == valid(fast)).all()
    assert (slow[valid(slow)] >= fast[valid(fast)] * (1 - 1e-12)).all()
    assert (scaled(eight, less).vendor_us(sizes) >= scaled(eight, more).vendor_us(sizes) * (1 - 1e-12)).all()


def test_scaled_splits_latency_from_bandwidth(tmp_path: Path, eight: Surface) -> None:
    rows = [row("Ring", "Simple", 1 << k, 2.0**k) for k in range(10, 20)]
    rows += [row("Tree", "LL", 1 << k, 50.0) for k in range(10, 20)] + [row("Ring", "LL", 1024, 9.0)]
    surface = small(tmp_path, rows)
    time = scaled(surface, 0.25, 3.0).time_us([1 << 10, 1 << 15])
    assert time[:, RING_SIMPLE, 0] == pytest.approx([4096, 4 << 15])
    assert time[:, TREE_LL, 0] == pytest.approx([150, 150])
    assert np.isnan(time[:, RING_LL]).all()
    sizes = playable_keys(eight)
    same = scaled(eight, 1.0).time_us(sizes)
    assert same == pytest.approx(eight.time_us(sizes), rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("factors", [(0.0, 1.0), (-1.0, 1.0), (math.inf, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_scaled_refuses_what_is_no_factor(eight: Surface, factors: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="must be a factor above 0"):
        scaled(eight, *factors)


def test_fabric_offers_only_what_every_phase_has(sixteen: Surface) -> None:
    base = p5en_all_reduce(8, forced_channels=True)
    slow = NetworkPhase(name="congested", surface=scaled(base, 0.25))
    fabric = PhasedSurface(base=base, later=(slow, NetworkPhase(name="grown", surface=sixteen)))
    keys = playable_keys(sixteen)
    time, sigma = fabric.tables(keys)
    assert time.shape == sigma.shape == (3, 35, 22, 9)
    assert [phase.name for phase in fabric.phases] == ["base", "congested", "grown"]
    assert (valid(time) == valid(time[0])).all()
    assert (valid(time) == valid(sigma)).all()
    assert (valid(time[0]) == (valid(base.time_us(keys)) & valid(sixteen.time_us(keys)))).all()
    assert not valid(time[..., 1:]).any()  # The sixteen-node table here has no forced channels.
    assert time[0, :, 0, 0].tolist() == base.time_us(keys)[:, 0, 0].tolist()


def test_the_best_action_changes_with_the_network(eight: Surface, sixteen: Surface) -> None:
    phases = (NetworkPhase(name="0.25", surface=scaled(eight, 0.25)), NetworkPhase(name="16", surface=sixteen))
    time, _ = PhasedSurface(base=eight, later=phases).tables(playable_keys(eight))
    before, *after = (oracle(phase) for phase in time)
    for phase, (best_us, pair, _) in zip(time[1:], after, strict=True):
        kept = phase[np.arange(35), before[1], before[2]]
        assert (pair != before[1]).sum() >= 10
        assert geomean(kept / best_us) > 1.05


def test_fabric_refuses_sizes_and_phases_that_do_not_fit(eight: Surface, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="8KiB: a forced pair is not known"):
        PhasedSurface(base=eight).tables([8192])
    path = table(tmp_path / "t.csv", [row("Ring", "LL", 1024, 1.0, collective="broadcast")])
    selection = Selection(collective=Collective.BROADCAST, nodes=2, ranks=16, gpus_per_node=8)
    other = NetworkPhase(name="other", surface=Surface.of(read_measurements([path]), selection))
    with pytest.raises(ConfigError, match="'other' is of broadcast; it must be of all_reduce"):
        PhasedSurface(base=eight, later=(other,))
