"""What is read as a measurement, and what is said about what is not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigged import HARDWARE, machine, write

from dynamiccl_ray.calibration.samples import COLLNET, FREE, read_library
from dynamiccl_ray.calibration.spikes import spikes
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol


def test_a_row_says_what_was_forced(tmp_path: Path) -> None:
    rows = [
        {},
        {"algo": "NVLSTree", "proto": "Simple"},
        {"algo": "CollNet"},
        {"proto": "LL", "nchannels": 3},
        {"algo": "default(region-tuner)", "proto": "default(region-tuner)"},
    ]
    read = machine(tmp_path, rows)
    assert read.settings.tolist() == ["nccl", "nvls_tree/simple", "collnet/any", "any/ll/3", "region-tuner"]
    assert read.algorithm.tolist() == [FREE, Algorithm.NVLS_TREE, COLLNET, FREE, FREE]
    assert read.protocol.tolist() == [FREE, Protocol.SIMPLE, FREE, Protocol.LL, FREE]
    assert read.forced.tolist() == [False, True, True, True, False]


def test_each_kind_of_hardware_in_a_file_is_a_machine(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", [{"gpu": "X"}, {"gpu": "Y"}, {"gpu": "X", "bytes": 4096}])
    names = {m.name: (m.gpu, len(m)) for m in read_library(tmp_path).machines}
    assert names == {"a#1": ("X", 2), "a#2": ("Y", 1)}


def test_what_the_tuner_never_sees_is_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", [{"collective": "alltoall"}, {"bytes": 0}, {}])
    (tmp_path / "other.csv").write_text("x,y\n1,2\n")
    (tmp_path / "notes.txt").write_text("nothing\n")
    library = read_library(tmp_path)
    assert [len(m) for m in library.machines] == [1]
    assert sum(library.skipped.values()) == 4
    assert any("alltoall" in reason for reason in library.skipped)


def test_what_is_closed_to_the_user_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.csv", [{}])
    (tmp_path / "closed").mkdir()
    for name in ("private.key", "other.csv", "run.log"):
        (tmp_path / name).write_text("x")

    def closing(of: Any) -> Any:
        def opened(path: Any, *given: Any, **named: Any) -> Any:
            if Path(path).name in ("private.key", "other.csv", "run.log", "closed"):
                raise PermissionError(13, "Permission denied", str(path))
            return of(path, *given, **named)

        return opened

    # The owner of all files, as tests may run, is closed out of none.
    for module, name in ((Path, "open"), (os, "scandir")):
        monkeypatch.setattr(module, name, closing(getattr(module, name)))
    library = read_library(tmp_path)
    assert len(library.machines) == 1
    assert library.skipped == {
        f"{name}: cannot be read: Permission denied": 1 for name in ("closed", "private.key", "other.csv", "run.log")
    }


def test_collectives_are_known_however_they_are_spelt(tmp_path: Path) -> None:
    write(
        tmp_path / "a.csv", [{"collective": name} for name in ("ALL_REDUCE", "AllReduce", "all-reduce", "all_reduce")]
    )
    assert read_library(tmp_path).machines[0].collective.tolist() == [Collective.ALL_REDUCE] * 4


@pytest.mark.parametrize("suffix", [".csv", ".CSV"])
def test_a_table_that_a_spreadsheet_wrote_is_read(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "a.csv", [{}])
    text = (tmp_path / "a.csv").read_text()
    (tmp_path / "a.csv").unlink()
    (tmp_path / f"b{suffix}").write_text("\ufeff" + text.replace("\n", "\r\n"), encoding="utf-8")
    assert [len(m) for m in read_library(tmp_path).machines] == [1]


@pytest.mark.parametrize("between", [";", "\t", ", "])
def test_fields_may_be_separated_as_spreadsheets_do(tmp_path: Path, between: str) -> None:
    write(tmp_path / "a.csv", [{}, {"algo": "ring", "proto": "ll"}])
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text().replace(",", between))
    assert read_library(tmp_path).machines[0].settings.tolist() == ["nccl", "ring/ll"]


@pytest.mark.parametrize("text", ["é".encode("latin-1"), "é".encode("utf-16"), b'"' + b"x" * 200_000])
def test_a_table_that_is_no_csv_is_named(tmp_path: Path, text: bytes) -> None:
    write(tmp_path / "a.csv", [{}])
    (tmp_path / "a.csv").write_bytes((tmp_path / "a.csv").read_bytes() + text)
    with pytest.raises(ConfigError, match=r"a\.csv is no CSV file in UTF-8"):
        read_library(tmp_path)


def test_tables_of_one_name_are_machines_of_their_own(tmp_path: Path) -> None:
    for cluster in ("a", "b"):
        (tmp_path / cluster).mkdir()
        write(tmp_path / cluster / "nccl.csv", [{}])
    assert [m.name for m in read_library(tmp_path).machines] == ["a/nccl", "b/nccl"]


def test_what_is_missing_is_said_where_nothing_is_left(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", [{}])
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text().replace("time_us", "time"))
    with pytest.raises(ConfigError, match=r"left out, 1: a\.csv: no column time_us"):
        read_library(tmp_path)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"algo": "Rong"}, "column algo is 'Rong'; it must be one of tree, ring"),
        ({"time_us": -3}, "column time_us is '-3'"),
        ({"bytes": "1k"}, "column bytes is '1k'"),
        ({"ranks": 15}, "15 ranks, but 2 nodes x 8 GPUs"),
        ({"collective": "allreduc"}, "did you mean 'allreduce'?"),
        ({"time_us": 1e300}, "column time_us is '1e+300'; it must be a number of microseconds from 0.001 to 1e+12"),
        ({"gpus_per_node": 5000}, "column gpus_per_node is '5000'; it must be a whole number from 1 to 72"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, object], says: str) -> None:
    write(tmp_path / "a.csv", [{}, row])
    with pytest.raises(ConfigError, match=r"a\.csv, line 3: ") as error:
        read_library(tmp_path)
    assert says in str(error.value)


def test_a_comma_in_a_number_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", [{}])
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text().rstrip() + ",5\n")
    with pytest.raises(ConfigError, match=r"a\.csv, line 2: more fields than the header has columns"):
        read_library(tmp_path)


def test_a_directory_without_measurements_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no measurements; expected CSV files with the columns source_id"):
        read_library(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        read_library(tmp_path / "missing")


def test_only_forced_rows_above_a_larger_size_are_spikes(tmp_path: Path) -> None:
    times = [100.0, 20.0, 26.0, 21.0, 24.0, 40.0]
    ring = [{"algo": "Ring", "proto": "LL", "bytes": 1024 << i, "time_us": t} for i, t in enumerate(times)]
    free = [{"bytes": 1024 << i, "time_us": t} for i, t in enumerate(times)]
    marked = spikes(machine(tmp_path, ring + free))
    assert np.flatnonzero(marked).tolist() == [0, 2]


def test_the_words_of_the_hardware_are_kept(tmp_path: Path) -> None:
    read = machine(tmp_path, [{}])
    assert {"gpu": read.gpu, "intra": read.intra, "inter": read.inter} == HARDWARE
