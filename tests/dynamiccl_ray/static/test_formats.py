"""CSV and JSON of static tables: what they say, and that nothing is lost in silence."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from test_blocks import block_of

from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol
from dynamiccl_ray.static.blocks import Block
from dynamiccl_ray.static.formats import nccl_csv, ncclx_json

AR, AG = Collective.ALL_REDUCE, Collective.ALL_GATHER
RING_LL128 = (Algorithm.RING, Protocol.LL128)


def both(key: int, entry: tuple[int, int, int, int]) -> dict[int, tuple[int, int, int, int]]:
    """Single operations and groups."""
    return {key: entry, key + 312: entry}


def lines(*blocks: Block) -> list[str]:
    return [line for line in nccl_csv(blocks).text.splitlines() if not line.startswith("#")]


def rules(*blocks: Block) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ncclx_json(blocks).text)["rules"]
    return found


def test_csv_says_sizes_pair_channels_nodes_ranks_and_groups() -> None:
    first = key_of(AR, 1024, False)
    block = block_of({first: (*RING_LL128, 4, 0)} | both(first + 1, (*RING_LL128, 0, 0)) | {first + 312: (0, 2, 2, 0)})
    assert lines(block) == [
        "allreduce,1024,1151,ring,ll128,4,2,8,1,-1",
        "allreduce,1152,1279,ring,ll128,0,2,8,-1,-1",
        "allreduce,1024,1151,tree,simple,2,2,8,-1,-1",  # whatever is no single operation, for that was matched before
    ]


def test_csv_asks_for_the_channels_that_the_plugin_would_pass_on() -> None:
    entries = {key_of(AR, 1 << n, False): (n % 7, 2, 8, 0) for n in range(14, 21)}
    channels = {line.split(",")[3]: line.split(",")[5] for line in lines(block_of(entries))}
    assert channels == {
        "tree": "8", "ring": "8", "collnet_direct": "0", "collnet_chain": "0", "nvls": "0", "nvls_tree": "8",
        "pat": "8",
    }  # fmt: skip
    one_node = {line.split(",")[3]: line.split(",")[5] for line in lines(block_of(entries, nodes=1))}
    assert one_node == channels | {"nvls": "8"}


def test_the_last_size_of_csv_is_the_largest_number() -> None:
    (line,) = lines(block_of(both(key_of(AG, 2**50, False), (*RING_LL128, 1, 0))))
    assert line.split(",")[:3] == ["allgather", str(15 << 37), str(2**64 - 1)]


def test_json_counts_bytes_per_rank_and_rounds_chunks() -> None:
    entries = both(key_of(AG, 1 << 20, False), (*RING_LL128, 4, 16)) | both(key_of(AR, 1 << 40, False), (1, 2, 0, 0))
    assert rules(block_of(entries, ranks=16)) == [
        {
            "filter": {"collective": "allgather", "bytesPerRank": "[65536,73727]", "nNodes": 2, "nLocalRanks": 8},
            "config": {"algorithm": "ring", "protocol": "ll128", "channels": 4, "chunkSize": 65280},
        },
        {
            "filter": {
                "collective": "allreduce", "bytesPerRank": f"[{1 << 36},{(9 << 33) - 1}]", "nNodes": 2,
                "nLocalRanks": 8,
            },
            "config": {"algorithm": "ring", "protocol": "simple"},
        },
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [6, 8, 24])
def test_json_matches_what_the_table_does(ranks: int) -> None:
    """Every size that is a multiple of the ranks, as those of all-gathers are."""
    rng = np.random.default_rng(ranks)
    entries: dict[int, tuple[int, int, int, int]] = {}
    for start in rng.integers(40, 300, 20):
        for at in range(start, start + 5):
            entries |= both(int(key_of(AG, 0, False) + at), (int(rng.integers(2)), int(rng.integers(3)), 0, 0))
    block = block_of(entries, ranks=ranks)

    def matched(nbytes: int) -> tuple[str, str] | None:
        for rule in rules_made:
            low, high = rule["filter"]["bytesPerRank"][1:-1].split(",")
            if int(low) <= nbytes // ranks <= (int(high) if high else 2**63):
                return rule["config"]["algorithm"], rule["config"]["protocol"]
        return None

    rules_made = rules(block)
    for nbytes in (rng.integers(1, 2 ** rng.integers(8, 38, 2000)) * ranks).tolist():
        entry = block.entries[key_of(AG, nbytes, False)]
        expected = (
            (Algorithm(entry["algo"]).name.lower(), Protocol(entry["proto"]).name.lower()) if entry["set"] else None
        )
        assert matched(nbytes) == expected


def test_what_cannot_be_said_is_a_warning() -> None:
    first = key_of(AR, 1 << 20, False)
    block = block_of(
        {first: (255, 255, 4, 0), first + 2: (*RING_LL128, 4, 16), first + 312 + 4: (*RING_LL128, 4, 0)}, name="dp"
    )
    csv, of_json = nccl_csv([block]), ncclx_json([block])
    assert csv.warnings == [
        "dp: names cannot be said; this is for every communicator of 8 ranks on 2 nodes",
        "NVIDIA's example tuner runs what no line matches on 1 channel: list every size that the job uses, or take our "
        "table",
        "1 range that only set the channels of NCCL's own pair",
        "1 range with a chunk size, which CSV has no field for",
        "1 range for groups of operations where single ones have none, which cannot be told apart",
    ]
    assert len(lines(block)) == 1
    assert "1 range for single operations alone, which NCCLX also takes for groups" in of_json.warnings
    assert not any("chunk" in warning for warning in of_json.warnings)
    assert len(rules(block)) == 1


def test_of_names_of_one_size_only_what_they_share_is_said() -> None:
    first = key_of(AR, 1 << 20, False)
    alike, other = both(first, (*RING_LL128, 4, 0)), both(first + 1, (*RING_LL128, 2, 0))
    blocks = [block_of(alike | other, "dp"), block_of(alike, "tp"), block_of(alike | other, ranks=16)]
    assert [line.split(",")[1:8] for line in lines(*blocks)] == [
        ["1048576", "1179647", "ring", "ll128", "4", "2", "8"],
        ["1048576", "1179647", "ring", "ll128", "4", "2", "16"],
        ["1179648", "1310719", "ring", "ll128", "2", "2", "16"],
    ]
    assert "dp, tp: names cannot be said" in nccl_csv(blocks).warnings[0]
    assert "2 keys on which they differ are left out" in nccl_csv(blocks).warnings[0]


def test_ranks_that_nodes_do_not_share_evenly_are_said() -> None:
    block = block_of(both(key_of(AG, 1 << 20, False), (*RING_LL128, 4, 0)), ranks=9)
    assert "9 ranks on 2 nodes: NCCLX takes it for 8 ranks, as 4 on each node" in ncclx_json([block]).warnings


def test_nothing_is_said_of_an_empty_block() -> None:
    empty = Block(ranks=8, nodes=2, max_channels=4, entries=DecisionTable.of(1, {}, max_channels=4).entries)
    assert (lines(empty), rules(empty)) == ([], [])
