"""What `dynamiccl bench plugin --nccl` measures, in little."""

from __future__ import annotations

from rich.console import Console

from dynamiccl_ray.plugin_bridge.bench_nccl import CSV, SETUPS, bench_plugin_on_nccl, render
from dynamiccl_ray.plugin_bridge.real_nccl import RealNccl


def test_all_set_ups_give_numbers(nccl: RealNccl) -> None:
    document = bench_plugin_on_nccl(nccl.source, rounds=1, batches=5, calls=20)
    assert tuple(setup for setup in SETUPS if setup not in document["left_out"]) == tuple(document["setups"])
    # The CSV tuner of 2.28 takes the cost table for an array of pointers, and ends the process.
    assert set(document["left_out"]) == ({CSV} if nccl.version.startswith("2.28") else set())
    assert document["nccl"] == nccl.version
    for clocks in document["setups"].values():
        for of in clocks.values():
            assert 0 < of["p10"] <= of["p50"] <= of["p90"]
    # All launch what NCCL itself would; ours tells of it.
    assert len(set(document["played"].values())) == 1
    assert document["records_per_call"] > 0.5
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render(document))
    assert all(setup in capture.get() for setup in SETUPS)
