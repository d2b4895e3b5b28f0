"""NCCL's belief against what NCCL's own tuning code computed, and against its loops written out."""

from __future__ import annotations

import csv
import math
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.belief_files import read_cases, write_belief
from dynamiccl_ray.fabric.communicator import CPU_VENDORS, CommunicatorInfo, Graph
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol

EXCERPT = Path(__file__).resolve().parents[2] / "data" / "nccl_cost_model"
DATA = Path(os.environ.get("DYNAMICCL_DATA", Path(__file__).resolve().parents[3].parent / "shared" / "data"))
COLLECTIVES = {c.name.lower().replace("_", ""): c for c in Collective}
TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=["excerpt", "full"])
def reference(request: pytest.FixtureRequest) -> Path:
    """A directory with cases.csv, latbw.csv and choice.csv."""
    if request.param == "excerpt":
        return EXCERPT
    if not (DATA / "nccl_cost_model").is_dir():
        pytest.skip(f"{DATA / 'nccl_cost_model'} does not exist; set DYNAMICCL_DATA")
    return DATA / "nccl_cost_model"


def rows_by_case(path: Path) -> dict[str, list[dict[str, str]]]:
    rows = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            rows[row["case"]].append(row)
    return rows


def pair_of(row: dict[str, str]) -> tuple[Algorithm, Protocol]:
    return Algorithm[row["algo"].upper()], Protocol[row["proto"].upper()]


def test_latency_and_bandwidth_match_every_row(reference: Path) -> None:
    rows = rows_by_case(reference / "latbw.csv")
    cases = read_cases(reference / "cases.csv")
    assert list(rows) == list(cases)
    for case, communicator in cases.items():
        belief = Belief(communicator)
        expected = np.zeros((3, *belief.latency_us.shape))
        for row in rows[case]:
            at = (COLLECTIVES[row["collective"]], *pair_of(row))
            expected[(slice(None), *at)] = [float(row[c]) for c in ("latency_us", "bandwidth_GBps", "max_threads")]
        np.testing.assert_allclose(belief.latency_us, expected[0], TOLERANCE, err_msg=case)
        np.testing.assert_allclose(belief.bandwidth_gbps, expected[1], TOLERANCE, err_msg=case)
        listed = expected[1] > 0
        threads = np.broadcast_to(belief.max_threads, listed.shape)
        np.testing.assert_array_equal(threads[listed], expected[2][listed], case)


def test_choice_matches_every_row(reference: Path) -> None:
    cases = read_cases(reference / "cases.csv")
    for case, rows in rows_by_case(reference / "choice.csv").items():
        collective = [COLLECTIVES[row["collective"]] for row in rows]
        sizes, ops = ([int(row[c]) for row in rows] for c in ("bytes", "pipe_ops"))
        choice = Belief(cases[case]).choose(collective, sizes, ops)
        expected = np.array([pair_of(row) for row in rows])
        np.testing.assert_array_equal(choice.algorithm, expected[:, 0], case)
        np.testing.assert_array_equal(choice.protocol, expected[:, 1], case)
        np.testing.assert_array_equal(choice.channels, [int(row["channels"]) for row in rows], case)
        np.testing.assert_array_equal(choice.warps, [int(row["warps"]) for row in rows], case)
        np.testing.assert_allclose(choice.time_us, [float(row["time_us"]) for row in rows], TOLERANCE)


def test_written_files_are_byte_identical(reference: Path, tmp_path: Path) -> None:
    write_belief(reference / "cases.csv", tmp_path / "out")
    for name in ("latbw.csv", "choice.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (reference / name).read_bytes()


graphs = st.builds(
    Graph,
    bw_intra=st.floats(0.1, 100),
    bw_inter=st.floats(0.1, 100),
    channels=st.integers(1, 64),
    type_intra=st.integers(0, 10),
    type_inter=st.integers(0, 10),
    latency_inter=st.floats(0, 10),
    same_channels=st.booleans(),
)


@st.composite
def communicators(draw: st.DrawFn) -> CommunicatorInfo:
    nodes = draw(st.integers(1, 64))
    return CommunicatorInfo(
        nodes=nodes,
        ranks=draw(st.one_of(st.just(nodes), st.integers(nodes, 16 * nodes))),
        compute_capability=draw(st.sampled_from([52, 60, 70, 75, 80, 86, 89, 90, 100, 103, 120])),
        cpu_vendor=draw(st.sampled_from(CPU_VENDORS)),
        nvswitches=draw(st.integers(0, 4)),
        collnet=draw(st.booleans()),
        nvls=draw(st.booleans()),
        tree_pattern_is_tree=draw(st.booleans()),
        graphs={a: draw(graphs) for a in Algorithm},
        collnet_chain=draw(st.booleans()),
        collnet_all_gather=draw(st.booleans()),
        collnet_reduce_scatter=draw(st.booleans()),
    )


collectives = st.sampled_from(list(Collective))
sizes = st.integers(0, 1 << 40)
pipe_ops = st.integers(1, 64)


@given(communicators(), collectives, sizes, pipe_ops)
def test_choice_is_the_cheapest_of_the_table(
    communicator: CommunicatorInfo, collective: Collective, size: int, ops: int
) -> None:
    belief = Belief(communicator)
    table = belief.cost_table_us(collective, size, ops)
    assert table.shape == (7, 3)
    assert table.dtype == np.float32
    assert np.isfinite(table).all()
    assert ((table >= 0) | (table == -1)).all()
    choice = belief.choose(collective, size, ops)
    assert choice.time_us == table[table >= 0].min() == table[choice.algorithm, choice.protocol]
    channels, warps = belief.channels_and_warps(size, choice.algorithm, choice.protocol)
    assert choice.channels == channels
    assert choice.warps == warps
    assert channels >= 1
    assert 3 <= warps <= 20


@given(communicators(), st.lists(st.tuples(collectives, sizes, pipe_ops), min_size=1, max_size=8))
def test_a_batch_is_its_items(communicator: CommunicatorInfo, batch: list[tuple[Collective, int, int]]) -> None:
    belief = Belief(communicator)
    together = belief.choose(*zip(*batch, strict=True))
    tables = belief.cost_table_us(*zip(*batch, strict=True))
    for i, item in enumerate(batch):
        alone = belief.choose(*item)
        for name, values in vars(together).items():
            assert values[i] == getattr(alone, name)
        np.testing.assert_array_equal(tables[i], belief.cost_table_us(*item))


@given(communicators(), collectives, st.lists(sizes, min_size=2, max_size=16), pipe_ops)
def test_more_bytes_are_never_cheaper_except_for_trees(
    communicator: CommunicatorInfo, collective: Collective, unordered: list[int], ops: int
) -> None:
    """Trees are corrected per power of two, upwards too, so a larger message may cost less there."""
    table = Belief(communicator).cost_table_us(collective, sorted(unordered), ops)
    steady = [a for a in Algorithm if a not in (Algorithm.TREE, Algorithm.NVLS_TREE)]
    assert (np.diff(table[:, steady], axis=0) >= 0).all()


@given(communicators(), st.sampled_from(list(Algorithm)), st.sampled_from(list(Protocol)), sizes)
def test_channels_and_warps_follow_the_loops(
    communicator: CommunicatorInfo, algorithm: Algorithm, protocol: Protocol, size: int
) -> None:
    """One channel or half the threads are dropped at a time, as long as there is too little to do."""
    assume(algorithm != Algorithm.COLLNET_DIRECT or protocol == Protocol.SIMPLE)
    belief = Belief(communicator)
    threads = int(belief.max_threads[algorithm, protocol])
    most = min(communicator.graphs[a].channels for a in (Algorithm.RING, Algorithm.TREE))
    collnet = algorithm in (Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN)
    per_thread = {Protocol.LL: 8, Protocol.LL128: 8, Protocol.SIMPLE: 512 if collnet else 64}[protocol]
    if (algorithm, protocol) == (Algorithm.RING, Protocol.LL):
        per_thread *= communicator.ranks
    channels = most
    if algorithm == Algorithm.COLLNET_DIRECT:
        floor = 16
        while floor and (starved := size < channels * threads * per_thread * communicator.heads):
            if channels > floor:
                per_thread //= 2 if channels == floor + floor // 2 else 1
                channels -= 1
            else:
                floor //= 2
        assert floor == 0 or not starved
    elif algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE):
        channels = communicator.graphs[Algorithm.NVLS].channels
        if algorithm == Algorithm.NVLS and communicator.nodes > 1:
            channels = min(channels, most)
    else:
        while size < channels * threads * per_thread and channels > 1:
            channels -= 1
        while size < channels * threads * per_thread and threads % 128 == 0:
            threads //= 2
    warps = max(3, threads // 32 + ((algorithm, protocol) == (Algorithm.RING, Protocol.SIMPLE)))
    if algorithm in (Algorithm.TREE, Algorithm.PAT):
        warps = 20
    got_channels, got_warps = belief.channels_and_warps(size, algorithm, protocol)
    assert got_channels == channels
    assert got_warps == warps


@given(communicators())
@settings(max_examples=50)
def test_nothing_is_negative_or_nan(communicator: CommunicatorInfo) -> None:
    belief = Belief(communicator)
    for table in (belief.latency_us, belief.bandwidth_gbps):
        assert np.isfinite(table).all()
        assert (table >= 0).all()
        assert (table[belief.bandwidth_gbps == 0] == 0).all()


@pytest.fixture
def h100() -> CommunicatorInfo:
    return read_cases(EXCERPT / "cases.csv")["h100_sharp_4x8"]


def test_one_rank_is_ring_simple_and_free(h100: CommunicatorInfo) -> None:
    belief = Belief(replace(h100, nodes=1, ranks=1))
    table = belief.cost_table_us(Collective.ALL_REDUCE, 1 << 20)
    assert table[Algorithm.RING, Protocol.SIMPLE] == 0
    assert (table == -1).sum() == 20


def test_eight_aggregated_operations_fill_a_batch(h100: CommunicatorInfo) -> None:
    belief = Belief(h100)
    one, eight, nine = belief.cost_table_us(Collective.ALL_REDUCE, 1 << 10, [1, 8, 9])
    tree, ring = (Algorithm.TREE, Protocol.LL), (Algorithm.RING, Protocol.LL)
    latency = belief.latency_us[Collective.ALL_REDUCE]
    assert eight[tree] == one[tree]
    assert math.isclose(nine[tree] - one[tree], latency[tree], rel_tol=1e-4)
    assert math.isclose(eight[ring] - one[ring], 7 * latency[ring], rel_tol=1e-4)


def test_collnet_scatters_only_with_a_head_per_rank(h100: CommunicatorInfo) -> None:
    scatter = replace(h100, collnet_all_gather=True)
    assert Belief(scatter).bandwidth_gbps[Collective.ALL_GATHER, Algorithm.NVLS].any()
    assert not Belief(scatter).bandwidth_gbps[Collective.REDUCE_SCATTER, Algorithm.NVLS].any()
    few = replace(scatter, collnet_heads=4)
    assert not Belief(few).bandwidth_gbps[Collective.ALL_GATHER, Algorithm.NVLS].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 64, 1), "collective holds 5"),
        ((0, -1, 1), "size_bytes holds -1"),
        ((0, 64, 0), "pipe_ops holds 0"),
    ],
)
def test_an_argument_out_of_range_is_refused(
    h100: CommunicatorInfo, arguments: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Belief(h100).cost_table_us(*arguments)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("compcap", "cc", "no column compcap"),
        (",ring,", ",rign,", "rign.*must be each of"),
        (",intel,4,1,1,0,pat,", ",intel,4,1,1,0,ring,", "must be each of"),
        (",4,32,90,", ",4,32,ninety,", "compcap is 'ninety'; it must be a whole number"),
        (",4,32,90,", ",4,3,90,", "3 ranks on 4 nodes"),
        (",90,intel,", ",90,risc,", "cpu_vendor is 'risc'; it must be one of intel"),
        (",1,0,ring,", ",2,0,ring,", "nvls is '2'; it must be 0 or 1"),
        (",1,0,ring,", ",0,0,ring,", "they must agree"),
        (",ring,48,", ",ring,-48,", "bw_intra is -48.0; it must be from 0"),
        (",ring,48,", ",ring,nan,", "bw_intra is nan"),
        (",ring,48,48,8,", ",ring,48,48,0,", "each needs at least 1"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    lines = (EXCERPT / "cases.csv").read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if line.startswith(("case,", "h100_sharp_4x8,")))
    assert old in text
    path = tmp_path / "cases.csv"
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message) as error:
        read_cases(path)
    assert str(path) in str(error.value)


def test_a_row_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cases.csv"
    path.write_text((EXCERPT / "cases.csv").read_text().rstrip()[:-4])
    with pytest.raises(ValueError, match="same_channels is ''"):
        read_cases(path)
