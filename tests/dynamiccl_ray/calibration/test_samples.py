"""What is read as a measurement, and what is said about what is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rigged import HARDWARE, machine, write

from dynamiccl_ray.calibration.samples import COLLNET, FREE, read_library
from dynamiccl_ray.calibration.spikes import spikes
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import Algorithm, Protocol

LOG = """\
# nccl-tests version 2.17.1
# Collective test starting: all_gather_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
#
# Using devices
#  Rank  0 Group  0 Pid   4242 on  node-a device  0 [0000:18:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   4243 on  node-a device  1 [0000:2a:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid   5242 on  node-b device  0 [0000:18:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid   5243 on  node-b device  1 [0000:2a:00] NVIDIA H100 80GB HBM3
node-a:4242:4242 [0] NCCL INFO NCCL_ALGO set by environment to Ring
node-a:4242:4242 [0] NCCL INFO NCCL_PROTO set by environment to LL128
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024            64     float    none      -1    21.50    0.05    0.04      0    20.11    0.05    0.04      0
     1048576         65536     float    none      -1    88.13   11.90    8.92      0    87.02   12.05    9.04      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 4.5
"""


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
    assert sum(library.skipped.values()) == 3
    assert any("alltoall" in reason for reason in library.skipped)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"algo": "Rong"}, "column algo is 'Rong'; it must be one of tree, ring"),
        ({"time_us": -3}, "column time_us is '-3'"),
        ({"bytes": "1k"}, "column bytes is '1k'"),
        ({"ranks": 15}, "15 ranks, but 2 nodes x 8 GPUs"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, object], says: str) -> None:
    write(tmp_path / "a.csv", [{}, row])
    with pytest.raises(ConfigError, match=r"a\.csv, line 3: ") as error:
        read_library(tmp_path)
    assert says in str(error.value)


def test_a_directory_without_measurements_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no measurements; expected CSV files with the columns source_id"):
        read_library(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        read_library(tmp_path / "missing")


def test_logs_of_nccl_tests_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine.log").write_text(LOG)
    (read,) = read_library(tmp_path).machines
    assert (read.gpu, read.name) == ("NVIDIA H100 80GB HBM3", tmp_path.name)
    assert read.nodes.tolist() == [2, 2]
    assert read.gpus_per_node.tolist() == [2, 2]
    assert read.nbytes.tolist() == [1024, 1048576]
    assert read.time_us.tolist() == [21.5, 88.13]
    assert read.settings.tolist() == ["ring/ll128"] * 2


def test_logs_of_one_directory_are_one_machine_one_for_each_setting(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    alone = "\n".join(line for line in LOG.splitlines() if "node-b" not in line and "INFO" not in line) + "\n"
    (tmp_path / "mine" / "default-1-node.log").write_text(alone)
    (tmp_path / "mine" / "ring.log").write_text(LOG)
    (tmp_path / "mine" / "tree.out").write_text(LOG.replace("to Ring", "to Tree"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ring.log").write_text(LOG)
    mine, other = read_library(tmp_path).machines
    assert (mine.name, other.name) == ("mine", "other")
    assert set(mine.settings) == {"nccl", "ring/ll128", "tree/ll128"}
    assert sorted(set(mine.nodes.tolist())) == [1, 2]
    assert sorted(set(mine.source.tolist())) == ["default-1-node", "ring", "tree"]
    (named,) = read_library(tmp_path / "mine", "h100-lab").machines
    assert named.name == "h100-lab"


def test_an_older_log_is_known_by_its_name(tmp_path: Path) -> None:
    older = LOG.replace("# Collective test starting: all_gather_perf\n", "")
    older = older.replace("  redop    root  ", "   ").replace("    none      -1", "")
    (tmp_path / "broadcast-2n.txt").write_text(older)
    (read,) = read_library(tmp_path).machines
    assert read.time_us.tolist() == [21.5, 88.13]
    (tmp_path / "broadcast-2n.txt").rename(tmp_path / "mine.txt")
    with pytest.raises(ConfigError, match="which collective"):
        read_library(tmp_path)


def test_a_log_without_ranks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.log").write_text("\n".join(line for line in LOG.splitlines() if " Rank " not in line))
    with pytest.raises(ConfigError, match="which GPUs took part"):
        read_library(tmp_path)


def test_only_forced_rows_above_a_larger_size_are_spikes(tmp_path: Path) -> None:
    times = [100.0, 20.0, 26.0, 21.0, 24.0, 40.0]
    ring = [{"algo": "Ring", "proto": "LL", "bytes": 1024 << i, "time_us": t} for i, t in enumerate(times)]
    free = [{"bytes": 1024 << i, "time_us": t} for i, t in enumerate(times)]
    marked = spikes(machine(tmp_path, ring + free))
    assert np.flatnonzero(marked).tolist() == [0, 2]


def test_the_words_of_the_hardware_are_kept(tmp_path: Path) -> None:
    read = machine(tmp_path, [{}])
    assert {"gpu": read.gpu, "intra": read.intra, "inter": read.inter} == HARDWARE
