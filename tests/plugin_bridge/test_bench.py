"""The program behind `dynamiccl bench plugin`, on our plugin without a table in force."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from rig import Rig

from dynamiccl_ray.plugin_bridge import native_dir, plugin_path
from dynamiccl_ray.plugin_bridge.bench import BENCH_NAME
from dynamiccl_ray.plugin_bridge.segments import segments

PROGRAM = native_dir() / BENCH_NAME


def test_it_calls_the_tuner_and_the_profiler(rig: Rig) -> None:
    command = [PROGRAM, "--plugin", plugin_path(), "--bytes", "4096", "--calls", "1500"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        (path,) = segments()
        with rig.channel(path) as channel:
            report = json.loads(program.communicate(b"go\n", timeout=60)[0])
            # Whole blocks of a thousand: those that are timed one by one, and 101 that are not.
            assert channel.status.dseq == 2000 + 101 * 1000
            records = channel.drain()
            assert len(records) == 200
            assert set(records["exec_ns"]) == {50_007}
            assert set(records["bytes"]) == {4096}
    assert program.returncode == 0
    assert not list(segments())
    assert report["calls"] == 2000
    assert report["profiler_calls"] == 26
    for name in ("tuner_ns", "baseline_ns", "profiler_ns_per_collective"):
        assert 0 < report[name]["p50"] <= report[name]["p99"]
    assert report["tuner_block_ns"] > report["baseline_block_ns"] > 0


@pytest.mark.parametrize(
    "arguments",
    [[], ["--plugin", "x"], ["--plugin", "x", "--bytes", "1", "--calls", "-5"], ["--what"], ["stray"]],
)
def test_usage_errors(arguments: list[str]) -> None:
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "usage: dynamiccl-plugin-bench" in done.stderr


def test_what_is_no_plugin_is_named(tmp_path: Path) -> None:
    channel_library = native_dir() / "libdynamiccl-channel.so"
    for library, message in [(tmp_path / "none.so", "cannot load"), (channel_library, "lacks ncclTunerPlugin_v6")]:
        command = [PROGRAM, "--plugin", library, "--bytes", "1", "--calls", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert message in done.stderr
