"""What nccl-tests writes as JSON is read as its logs are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamiccl_ray.calibration.nccl_tests_json import as_log
from dynamiccl_ray.calibration.samples import read_library
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import Collective


def _placed(time: float, wrong: float | None = 0.0) -> dict[str, Any]:
    return {"time": time, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": wrong}


def _row(size: int, placed: dict[str, Any] | None) -> dict[str, Any]:
    words = {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1"}
    return {**words, "out_of_place": placed, "in_place": _placed(1.0), "actual_iterations": 20}


def _run(*results: dict[str, Any], env: tuple[str, ...] = ()) -> dict[str, Any]:
    device = {"group": 0, "pid": 1, "device": 0, "device_hex": "0000:18:00", "device_info": "NVIDIA H100 80GB HBM3"}
    devices = [{**device, "rank": 2 * i, "hostname": host} for i, host in enumerate(("node-a", "node-b"))]
    return {
        "version": 1,
        "args": ["/opt/build/all_reduce_perf", "-J", "x.json"],
        "env": ["HOME=/root", *env],
        "config": {"nthreads": 1, "ngpus": 2, "devices": devices},
        "results": list(results),
    }


def test_a_run_is_read(tmp_path: Path) -> None:
    env = ("NCCL_ALGO=Ring", "NCCL_PROTO=LL128", "NCCL_DEBUG=INFO", "NCCL_NVLS_ENABLE=0")
    run = _run(_row(1024, _placed(21.5)), _row(2048, _placed(9.0, 3.0)), _row(4096, _placed(22.5, None)), env=env)
    (tmp_path / "x.json").write_text(json.dumps(run))
    (read,) = read_library(tmp_path).machines
    assert read.settings.tolist() == ["ring/ll128"] * 2
    assert (read.nbytes.tolist(), read.time_us.tolist()) == ([1024, 4096], [21.5, 22.5])
    assert (read.nodes.tolist(), read.gpus_per_node.tolist()) == ([2, 2], [2, 2])
    assert set(read.collective.tolist()) == {Collective.ALL_REDUCE}
    assert (read.gpu, read.environment) == ("NVIDIA H100 80GB HBM3", "NCCL_NVLS_ENABLE=0")
    assert read_library(tmp_path).skipped == {"x.json: results that were wrong": 1}


def test_without_a_setting_it_is_nccls_own_choice_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "ring.json").write_text(json.dumps(_run(_row(1024, _placed(21.5)))))
    assert read_library(tmp_path).machines[0].settings.tolist() == ["nccl"]


def test_times_of_the_cpu_and_in_place_alone_are_no_times(tmp_path: Path) -> None:
    of_cpu = {**_placed(0.0), "cpu_time": 3.0}
    del of_cpu["time"]
    (tmp_path / "x.json").write_text(json.dumps(_run(_row(1024, of_cpu), _row(2048, None))))
    with pytest.raises(ConfigError, match="no line of a table"):
        read_library(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"results": [], "config": {}}', "[" * 100_000])
def test_other_json_is_no_log(text: str) -> None:
    assert as_log(text) == ""
