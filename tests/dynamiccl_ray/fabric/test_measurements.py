"""Reading measurements: every malformed file gets one error that says where and what is valid."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric.clusters import p5en_all_reduce
from dynamiccl_ray.fabric.measured import Selection, read_measurements
from dynamiccl_ray.fabric.measurements import COLUMNS
from dynamiccl_ray.knobs import Collective

MACHINE = {
    "source_id": "lab",
    "collective": "all_reduce",
    "nodes": "2",
    "ranks": "16",
    "gpus_per_node": "8",
    "gpu": "H200",
    "intra": "NVSwitch",
    "inter": "IB",
    "nchannels": "",
}
SELECTION = Selection(collective=Collective.ALL_REDUCE, nodes=2, ranks=16, gpus_per_node=8)


def table(path: Path, rows: list[dict[str, object]]) -> Path:
    """A CSV of rows on one machine; each gives algo, proto, bytes, time_us and what differs."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({**MACHINE, **row} for row in rows)
    return path


def row(algo: str, proto: str, nbytes: int, time_us: float, **other: object) -> dict[str, object]:
    return {"algo": algo, "proto": proto, "bytes": nbytes, "time_us": time_us, **other}


BAD_VALUES = [
    ("collective", "alltoall", "all_reduce"),
    ("nodes", "two", "a whole number from 1"),
    ("ranks", "0", "a whole number from 1"),
    ("gpus_per_node", "", "a whole number from 1"),
    ("algo", "CollNet", "collnetdirect"),
    ("algo", "default(x)", "the same tuner in algo and proto"),
    ("proto", "LL256", "ll128"),
    ("proto", "default(x)", "the same tuner in algo and proto"),
    ("nchannels", "3", "empty, 1, 2, 4"),
    ("nchannels", "0", "empty, 1, 2, 4"),
    ("bytes", "1e6", "a whole number from 1"),
    ("bytes", str(1 << 63), "a whole number from 1"),
    ("time_us", "-3", "a number of microseconds above 0"),
    ("time_us", "nan", "a number of microseconds above 0"),
    ("time_us", "", "a number of microseconds above 0"),
]


@pytest.mark.parametrize(("column", "value", "is_valid"), BAD_VALUES)
def test_a_bad_value_is_named(tmp_path: Path, column: str, value: str, is_valid: str) -> None:
    good = row("Ring", "LL", 1024, 1.0)
    path = table(tmp_path / "bad.csv", [good, {**good, column: value}])
    with pytest.raises(ConfigError) as error:
        read_measurements([path])
    message = str(error.value)
    assert message.startswith(f"{path}, line 3: column {column} is {value!r}; it must be ")
    assert is_valid in message


def test_a_default_of_two_tuners_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "bad.csv", [row("default", "default(x)", 1024, 1.0)])
    with pytest.raises(ConfigError, match=r"column proto is 'default.x.'; it must be 'default' as in column algo"):
        read_measurements([path])


HEADER = ",".join(COLUMNS).encode()
BAD_FILES = [
    (b"", "no column source_id, "),
    (HEADER.replace(b"bytes,", b""), "no column bytes; needed are source_id,"),
    (HEADER + b"\n", "no rows"),
    (HEADER + b"\n" + b"x," * 20, "line 2: more values than columns"),
    (HEADER + b"\nlab", "line 2: column algo is ''"),
    (HEADER + b'\n"lab"x', "it must be a CSV in UTF-8"),
    (HEADER + b"\n\xff", "it must be a CSV in UTF-8"),
]


@pytest.mark.parametrize(("content", "problem"), BAD_FILES)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_measurements([path])
    assert str(error.value).startswith(str(path))
    assert problem in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.csv: No such file"):
        read_measurements([tmp_path / "none.csv"])
    with pytest.raises(ConfigError, match="no file was named"):
        read_measurements([])


def test_a_selection_says_what_there_is(tmp_path: Path) -> None:
    rows = [row("Ring", "LL", 1024, 1.0), row("Ring", "LL", 1024, 1.0, inter="TCP", source_id="home")]
    measurements = read_measurements([table(tmp_path / "t.csv", rows)])
    with pytest.raises(ConfigError, match="H200, NVSwitch, IB; H200, NVSwitch, TCP"):
        SELECTION.of(measurements)
    home = Selection(collective=Collective.ALL_REDUCE, nodes=2, ranks=16, gpus_per_node=8, sources=("ho",))
    assert len(home.of(measurements)) == 1
    with pytest.raises(ConfigError, match="all_reduce on 2 nodes of 8 GPUs; from sources home, lab"):
        Selection(collective=Collective.REDUCE, nodes=2, ranks=16, gpus_per_node=8).of(measurements)
    with pytest.raises(ConfigError, match=r"^all_reduce on 3 nodes of 8 GPUs.*: nothing was measured"):
        p5en_all_reduce(3)
