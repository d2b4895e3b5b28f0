"""A training job on real NCCL is tuned: learned, exploited, and learned anew after its links lost their bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.plugin_bridge.real_nccl import RealNccl
from dynamiccl_ray.trainers.online.run import run_online


def experiment(build: RealNccl, **changes: Any) -> Online:
    """Two nodes of two ranks; what a real job has, in small. Fewer decisions than usual."""
    calls = {"collective": "all_reduce", "sizes_bytes": [1 << 18, 1 << 20]}
    raw: dict[str, Any] = {
        "name": "real",
        "job": f"real-{build.version}",
        "fabric": {
            "kind": "real_nccl",
            "nccl": str(build.source),
            "cluster": "dgx-a100-hdr",
            "nodes": 2,
            "ranks_per_node": 2,
            "groups": [
                {
                    "name": "world",
                    "of": "world",
                    "once": [
                        {"collective": "broadcast", "sizes_bytes": [8192]},
                        {"collective": "all_reduce", "sizes_bytes": [4096]},
                    ],
                },
                {"name": "tensor", "of": "node", "step": [calls]},
                {
                    "name": "data",
                    "of": "rail",
                    "step": [calls],
                    "grouped": [{"collective": "all_reduce", "sizes_bytes": [16384, 24576]}],
                },
            ],
            "events": [{"exploit_rounds": 2, "intra_bandwidth": 0.25, "inter_bandwidth": 0.25}],
        },
        "policy": "default",
        "actions": {"channels": [0, 2, 8]},
        "control": {"learning": {"draws": 32, "compares": 6}},
        "stop": {"exploit_rounds_after_last_event": 2},
    }
    return Online.model_validate({**raw, **changes})


def test_a_job_with_groups_and_collectives_that_run_once_is_learned(nccl: RealNccl, tmp_path: Path) -> None:
    summary = run_online(experiment(nccl), tmp_path, serial=True)
    assert summary["agreement_violations"] == 0
    assert summary["switches"] > 10
    assert summary["history"][-1]["phase"] == "exploit"
    # What ran once held nobody up, and stayed as NCCL chose it.
    assert [
        row["action"] for row in summary["keys"] if row["communicator"] == "world" and row["key"] == "all_reduce/4KiB"
    ] == ["nccl"]
    assert len(summary["after"]) == 1
    # A third of the usual decisions come close.
    for regime, most in ((summary, 1.03), (summary["after"][0], 1.1)):
        ratio = regime["geomean_vs_oracle"]
        assert ratio["default"] > 1.2
        assert ratio["learned_table"] < most, regime["keys"]
    known = [row for row in summary["keys"] if row["oracle_us"] is not None]
    assert {row["communicator"] for row in known} >= {"tensor0", "tensor1", "data0", "data1"}
    # A group of collectives is measured and tuned as one; the model has no time of it.
    assert any(row["oracle_us"] is None for row in summary["keys"] if row["communicator"].startswith("data"))
