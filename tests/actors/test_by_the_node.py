"""What a collective takes, from what its ranks say: against CUDA's own events, on a real GPU."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dynamiccl_ray.actors.messages import COLLECTIVE_DTYPE, NOT_KNOWN, Collectives
from dynamiccl_ray.actors.rank_runner import RankRunner
from dynamiccl_ray.actors.reduction import Matching, Part, by_the_node, measured
from dynamiccl_ray.knobs import Algorithm, Protocol, pair_index

RECORDED = Path(__file__).parents[1] / "data" / "one_gpu" / "all_reduce_h100_4ranks.csv"
MIB = 1 << 20
RING, TREE = (pair_index(algorithm, Protocol.SIMPLE) for algorithm in (Algorithm.RING, Algorithm.TREE))


def of_rank(start: Any, took: Any, pair: int = RING) -> Collectives:
    """What a runner has of one rank."""
    start, took = np.atleast_1d(start), np.atleast_1d(took)
    out = np.zeros(len(start), COLLECTIVE_DTYPE)
    out["dseq"], out["ranks"], out["pair"] = np.arange(len(start)), 1, pair
    out["least_ns"] = out["most_ns"] = took
    out["start"] = start.astype(np.int64) % 2**32
    out["end"] = out["first_end"] = (start + took).astype(np.int64) % 2**32
    return out


def on_a_node(starts: list[int], took: list[int], pair: int = RING) -> int:
    of_ranks = [of_rank(start, us, pair) for start, us in zip(starts, took, strict=True)]
    done = Matching().take(of_ranks, len(starts))
    return int(by_the_node(done, range(len(starts)), len(starts), 1)["least_ns"][0])


@pytest.mark.parametrize("at", [0, 2**32 - 30, 2**31 - 30])
def test_a_collective_takes_from_the_last_start_to_the_last_end(at: int) -> None:
    # The one that comes last is done before the others are.
    assert on_a_node([at, at + 50, at + 40], [160, 70, 120]) == 110
    assert on_a_node([at, at, at], [100, 90, 100]) == 100


def test_it_takes_no_less_than_any_rank_and_no_more_than_the_slowest_however_wrong_clocks_are() -> None:
    for wrong in (1_000_000, -1_000_000, 2**31, 85):
        assert 90 <= on_a_node([0, wrong], [100, 90]) <= 100


def test_of_a_tree_the_way_down_is_added() -> None:
    assert on_a_node([0, 0, 0], [100, 60, 40], TREE) == 100 + 30


@pytest.mark.parametrize("late", [0, 5, 100, 10**6, 10**9, 2 * 10**9])
def test_a_tree_takes_as_long_however_late_one_of_its_ranks_is(late: int) -> None:
    """Two leaves have sent what they have before it comes."""
    assert 25 <= on_a_node([0, 0, 0, late], [5, 6, late + 20, 20], TREE) <= 30


@pytest.mark.parametrize("wrong", [493, 10**6, -(10**6), 2**31 - 1, 2**31, 3 * 10**9])
def test_wrong_clocks_do_no_more_to_a_tree_than_half_of_what_the_slowest_took(wrong: int) -> None:
    assert 90 <= on_a_node([0, wrong], [100, 90], TREE) <= 150
    assert 90 <= on_a_node([0, wrong, 2 * wrong], [100, 90, 95], TREE) <= 150


@pytest.mark.parametrize(
    ("here", "ranks", "nodes", "knows"),
    [
        ([0, 1], 8, 4, True),
        ([2, 3], 8, 4, False),
        ([6, 7], 8, 4, False),
        ([0, 4], 8, 4, True),
        ([3, 7], 8, 4, False),
        ([0], 8, 8, True),
        ([5], 8, 8, False),
        # Another runner has the rest of the node.
        ([0], 8, 4, False),
        ([0, 3], 8, 2, False),
    ],
)
def test_only_the_node_of_rank_0_knows_what_a_tree_takes(here: list[int], ranks: int, nodes: int, knows: bool) -> None:
    for pair, known in ((TREE, knows), (RING, True)):
        found = by_the_node(of_rank(0, 100, pair), here, ranks, nodes)
        assert (found["least_ns"][0] != NOT_KNOWN) == known
    # All that the others know is how long their slowest took.
    unknown = by_the_node(of_rank(0, 100, TREE), [2, 3], 8, 4)
    known = by_the_node(of_rank(0, 140, TREE), [0, 1], 8, 4)
    assert Matching().take([unknown, known], 2)["least_ns"].tolist() == [140]
    assert Matching().take([unknown, unknown], 2)["least_ns"].tolist() == [100]


@pytest.mark.parametrize(
    ("kind", "profiler_abi", "least"),
    [("nccl", 6, 110), ("nccl", 4, 110), ("nccl", 3, 70), ("emulated", 6, 70), ("measured", 6, 70)],
)
def test_a_runner_times_the_node_where_gpus_say_when_and_the_job_is_real(
    kind: str, profiler_abi: int, least: int
) -> None:
    identity = SimpleNamespace(profiler_abi=profiler_abi, ranks=2, nodes=1)
    channel = SimpleNamespace(identity=identity, fold=lambda: True)
    ranks = [
        SimpleNamespace(rank=rank, comm=1, channel=channel, drain=lambda applied_since, part=part: part)
        for rank, part in enumerate([of_rank(0, 160), of_rank(50, 70)])
    ]
    runner = object.__new__(RankRunner)
    runner._serving = SimpleNamespace(ranks=ranks, of=lambda _: ranks)  # type: ignore[assignment]
    runner._experiment = SimpleNamespace(fabric=SimpleNamespace(kind=kind))  # type: ignore[assignment]
    runner._applied_since, runner._matching, runner._collected = 0, {}, {}
    assert runner._drain()
    (seen,) = runner._collected[1]
    assert (seen["least_ns"].tolist(), seen["most_ns"].tolist()) == ([least], [160])


def test_a_tree_that_is_taken_for_longer_than_any_rank_says_has_no_skew() -> None:
    done = Matching().take([of_rank(0, us, TREE) for us in (100, 60, 40)], 3)
    part = by_the_node(done, range(3), 3, 1)
    seen = measured([Part(comm=1, collectives=part, rows=np.zeros(1, np.int64), actions=np.zeros(1, np.int64))])
    assert (np.exp(seen.log_us) * 1e3).tolist() == pytest.approx([130])
    assert seen.skew.tolist() == [0.0]


def recorded(mode: str) -> dict[int, dict[tuple[str, str, int], tuple[float, float, float]]]:
    """Bytes -> configuration -> medians: by the node, the least of the ranks, and by CUDA's events; us."""
    rows = defaultdict(list)
    with RECORDED.open() as file:
        for row in csv.DictReader(file):
            if row["mode"] == mode:
                rows[int(row["bytes"]), (row["algo"], row["proto"], int(row["nchannels"]))].append(row)
    out: dict[int, dict[tuple[str, str, int], tuple[float, float, float]]] = defaultdict(dict)
    for (nbytes, of), mine in rows.items():
        pair = 0 if of[0] == "default" else pair_index(Algorithm[of[0].upper()], Protocol[of[1].upper()])
        parts = [
            of_rank(*(np.array([int(row[f"{name}{rank}"]) for row in mine]) for name in ("start", "exec")), pair)
            for rank in range(4)
        ]
        done = Matching().take(parts, 4)
        events = float(np.median([float(row["event_us"]) for row in mine]))
        node = float(np.median(by_the_node(done, range(4), 4, 1)["least_ns"])) / 1e3
        out[nbytes][of] = node, float(np.median(done["least_ns"])) / 1e3, events
    return out


# CUDA's events have the time between two kernels in them.
BETWEEN_US = 15.0


@pytest.mark.parametrize("mode", ["row", "single"])
def test_times_on_an_h100_are_those_of_cudas_events_whether_ranks_come_late_or_not(mode: str) -> None:
    """Events of calls in a row are the yardstick of both: with single calls they wait for late ranks."""
    truth, found = recorded("row"), recorded(mode)
    off = {"ring": [], "tree": [], "least of a tree": []}  # type: ignore[var-annotated]
    for nbytes, by in found.items():
        for of, (node, least, _) in by.items():
            events = truth[nbytes][of][2] - BETWEEN_US
            if of[0] != "default":
                off[of[0]].append(np.log(node / events))
            if of[0] == "tree":
                off["least of a tree"].append(np.log(least / events))
    for algorithm in ("ring", "tree"):
        assert abs(np.mean(off[algorithm])) < 0.08, algorithm
        assert np.std(off[algorithm]) < 0.15, algorithm
    assert np.mean(off["least of a tree"]) < -0.5


@pytest.mark.parametrize("mode", ["row", "single"])
def test_what_is_chosen_by_them_on_an_h100_is_the_best_or_nearly(mode: str) -> None:
    truth, found = recorded("row"), recorded(mode)
    # Smaller ones wait for their launch more than for anything else.
    for nbytes in (16 * MIB, 64 * MIB):
        by = found[nbytes]
        best = min(events for _, _, events in truth[nbytes].values())
        by_node, by_least = (min(by, key=lambda of, i=i, by=by: by[of][i]) for i in (0, 1))  # type: ignore[misc]
        assert truth[nbytes][by_node][2] < 1.1 * best, (nbytes, by_node)
        assert truth[nbytes][by_least][2] > 1.1 * best, (nbytes, by_least)
