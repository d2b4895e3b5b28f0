"""Traces come back as they were written, and say where they are wrong."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.workloads.calls import Operation
from dynamiccl_ray.workloads.stream import iteration
from dynamiccl_ray.workloads.trace import OPERATIONS, Call, read_trace, record, replay, write_trace
from dynamiccl_ray.workloads.workload import Workload

_GOOD = {"time_us": 5.0, "communicator": "dp0", "collective": "all_reduce", "bytes": 8}

calls = st.lists(
    st.builds(
        Call,
        time_us=st.floats(0, 1e15),
        communicator=st.text(min_size=1, max_size=8),
        collective=st.sampled_from(sorted(OPERATIONS)),
        bytes=st.integers(0, (1 << 63) - 1),
    ),
    max_size=20,
).map(lambda found: sorted(found, key=lambda c: c.time_us))


@given(calls)
def test_round_trip(written: list[Call]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.jsonl"
        assert write_trace(path, written) == len(written)
        assert list(read_trace(path)) == written


@given(calls)
def test_replay_keeps_times_sizes_and_communicators(written: list[Call]) -> None:
    stream = replay(written)
    assert stream.calls["gap_us"].sum() == pytest.approx(written[-1].time_us if written else 0)
    assert stream.calls["nominal_bytes"].tolist() == [float(c.bytes) for c in written]
    names = [stream.communicators[i].role for i in stream.calls["communicator"]]
    assert names == [c.communicator for c in written]


def test_a_generated_stream_can_be_recorded_and_replayed(tmp_path: Path) -> None:
    raw = {"name": "x", "model": "GPT-2", "batch": 1, "sequence_length": 128, "gpu_tflops": 10}
    stream = iteration(Workload.model_validate(raw | {"degrees": {"dp": 2, "tp": 2}}))
    path = tmp_path / "trace.jsonl"
    write_trace(path, record(stream))
    again = replay(read_trace(path))
    for name in ("operation", "gap_us", "effective_bytes"):
        assert again.calls[name] == pytest.approx(stream.calls[name])
    assert [c.role for c in again.communicators] == [f"{c.role}{i}" for i, c in enumerate(stream.communicators)]
    assert set(again.calls["operation"]) == {Operation.ALL_REDUCE}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object, found list"),
        (json.dumps({**_GOOD, "time_us": 1}), "time_us = 1 is before 5.0"),
        (json.dumps({**_GOOD, "time_us": "now"}), "time_us = 'now'"),
        (json.dumps({**_GOOD, "time_us": True}), "time_us = True"),
        ('{"time_us": NaN, "communicator": "a", "collective": "send", "bytes": 1}', "time_us = nan"),
        (json.dumps({**_GOOD, "communicator": ""}), "communicator = ''"),
        (json.dumps({**_GOOD, "collective": "allreduce"}), "collective = 'allreduce'; there are broadcast"),
        (json.dumps({**_GOOD, "bytes": 1.5}), "bytes = 1.5"),
        (json.dumps({**_GOOD, "bytes": -1}), "bytes = -1"),
        (json.dumps({**_GOOD, "rank": 0}), "unknown: .'rank'"),
        ("{}", "missing: .'bytes'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(_GOOD) + "\n\n" + line + "\n")
    reader = read_trace(path)
    assert next(reader).bytes == 8
    with pytest.raises(ConfigError, match=f"line 3: .*{says}"):
        next(reader)


def test_files_that_are_not_traces(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        list(read_trace(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        list(read_trace(tmp_path / "binary"))
    with pytest.raises(ConfigError, match="call 1: bytes = -1"):
        write_trace(tmp_path / "t", [Call(time_us=0.0, communicator="a", collective="send", bytes=-1)])
