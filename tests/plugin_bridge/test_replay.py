"""Recorded communicators are laid over the ranks of another machine; what does not fit is said."""

from __future__ import annotations

from typing import Any

import pytest

from dynamiccl_ray.plugin_bridge.program import Program
from dynamiccl_ray.plugin_bridge.replay import Replay
from dynamiccl_ray.workloads.recorded import Trace


def _trace(*comms: dict[str, Any]) -> Trace:
    step = [{"collective": "all_reduce", "bytes": 4096}]
    return Trace.model_validate(
        {"kind": "trace", "name": "x", "communicators": [{"name": "c", "step": step} | comm for comm in comms]}
    )


@pytest.mark.parametrize(
    ("shape", "ranks", "note"),
    [
        ({"ranks": 4, "nodes": 2}, [(0, 1, 2, 3)], None),
        ({"ranks": 2, "nodes": 1, "count": 2}, [(0, 1), (2, 3)], None),
        ({"ranks": 2, "nodes": 2, "count": 2}, [(0, 2), (1, 3)], None),
        ({"ranks": 2, "nodes": 2}, [(0, 2)], None),
        ({"ranks": 64, "nodes": 8}, [(0, 1, 2, 3)], "c: 64 ranks on 8 nodes are played by 4 on 2"),
        ({"ranks": 8, "nodes": 8, "count": 8}, [(0, 2), (1, 3)], "c: 2 of 8 communicators fit"),
        ({"ranks": 3, "nodes": 2}, [(0, 1, 2, 3)], "c: 3 ranks on 2 nodes are played by 4 on 2"),
    ],
)
def test_communicators_are_blocks_of_the_machine(
    shape: dict[str, int], ranks: list[tuple[int, ...]], note: str | None
) -> None:
    replay = Replay.on(_trace(shape), 2, 2)
    ((_, tiles),) = replay.parts
    assert [tile.ranks for tile in tiles] == ranks
    assert (note in replay.notes) if note else not replay.notes


def test_one_rank_is_no_communicator() -> None:
    replay = Replay.on(_trace({"ranks": 4, "nodes": 4, "name": "rail"}, {"ranks": 4, "nodes": 1}), 1, 4)
    assert [comm.name for comm, _ in replay.parts] == ["c"]
    assert replay.notes == ("rail is left out: its 4 ranks on 4 nodes are one rank here",)


def test_sizes_are_exact_or_said() -> None:
    step = [
        {"collective": "all_reduce", "bytes": 4097},
        {"collective": "all_gather", "bytes": 4097},
        {"collective": "all_reduce", "bytes": 12, "grouped": True},
    ]
    replay = Replay.on(_trace({"ranks": 4, "nodes": 2, "step": step, "repeat": 2}), 2, 2)
    assert replay.notes == (
        "c: all_gather of 4097 bytes is played with 4096",
        "c: a group of 12B is played by two all_reduce",
    )
    program = Program(nodes=2, ranks_per_node=2)
    replay.lay_out(program, compute_us=5, whole=True)
    assert [nbytes for _, _, nbytes in program.ranks[3].step.calls] == [4097, 4096, 4, 8] * 2
    assert {comm.name for comm in program.comms} == {"c"}, "a communicator of all ranks is the first"
