"""A job on real NCCL is recorded, played again from its trace, and recorded again: the traces are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from test_online import experiment

from dynamiccl_ray.plugin_bridge.real_nccl import RealNccl
from dynamiccl_ray.trainers.online.recording import record_run
from dynamiccl_ray.trainers.online.run import run_online


def test_a_trace_is_the_same_after_it_was_played(nccl: RealNccl, tmp_path: Path) -> None:
    observed: dict[str, Any] = {"mode": "observe", "stop": {"rounds": 3}}
    first = experiment(nccl, **observed)
    fabric = first.fabric.model_dump() | {"events": []}
    run_online(experiment(nccl, **observed, fabric=fabric), tmp_path / "first", serial=True)
    trace = record_run(tmp_path / "first").trace
    assert [(c.name, c.count, c.ranks, c.nodes) for c in trace.communicators if c.step] == [
        ("data", 2, 2, 2),
        ("tensor", 2, 2, 1),
    ]
    assert [(call.bytes, call.grouped) for call in trace.communicators[0].step] == [
        (1 << 18, False),
        (1 << 20, False),
        (16384 + 24576, True),
    ]
    replayed = fabric | {"groups": [], "trace": trace.model_dump()}
    run_online(experiment(nccl, **observed, fabric=replayed), tmp_path / "again", serial=True)
    assert record_run(tmp_path / "again").trace == trace
