"""Logs of nccl-tests: what is read of them, and what is not believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamiccl_ray.calibration.cells import joined
from dynamiccl_ray.calibration.samples import Machine, read_library
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import Collective

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

SILENT = "\n".join(line for line in LOG.splitlines() if "INFO" not in line) + "\n"


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


def test_folders_of_one_forced_setting_each_are_one_machine(tmp_path: Path) -> None:
    for algorithm in ("ring", "tree", "nvls"):
        (tmp_path / algorithm).mkdir()
        (tmp_path / algorithm / "1.log").write_text(LOG.replace("to Ring", f"to {algorithm}"))
    (one,) = joined(read_library(tmp_path).machines)
    assert (one.name, len(one)) == ("nvls + ring + tree", 6)
    # Where two have the same setting, they are two machines, or two sessions.
    (tmp_path / "tree" / "1.log").write_text(LOG)
    assert len(joined(read_library(tmp_path).machines)) == 3


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


def test_a_log_that_does_not_say_enough_does_not_keep_others_from_being_read(tmp_path: Path) -> None:
    unnamed = LOG.replace("# Collective test starting: all_gather_perf\n", "")
    uneven = "\n".join(line for line in LOG.splitlines() if "Rank  3" not in line)
    cut = "\n".join(line for line in LOG.splitlines() if " Rank " not in line)
    assert set(_read(tmp_path, a=LOG, unnamed=unnamed, uneven=uneven, cut=cut)[""].source) == {"a"}
    cut_log, uneven_log, unnamed_log = sorted(read_library(tmp_path).skipped)
    assert "which GPUs took part" in cut_log
    assert "3 ranks on 2 hosts" in uneven_log
    assert "which collective" in unnamed_log


def test_a_log_without_a_line_of_a_table_is_counted(tmp_path: Path) -> None:
    killed = LOG[: LOG.index("        1024 ")]
    tagged = LOG.replace("        1024 ", "[STAT]: 1024 ").replace("     1048576 ", "[STAT]:1048576 ")
    assert set(_read(tmp_path, a=LOG, killed=killed, tagged=tagged)[""].source) == {"a"}
    assert list(read_library(tmp_path).skipped.values()) == [1, 1]


def _read(tmp_path: Path, **logs: str) -> dict[str, Machine]:
    for name, text in logs.items():
        (tmp_path / f"{name}.log").write_text(text)
    return {m.environment: m for m in read_library(tmp_path).machines}


def test_ranks_of_other_groups_are_other_communicators(tmp_path: Path) -> None:
    split = LOG.replace("Rank  1 Group  0", "Rank  1 Group  1").replace("Rank  3 Group  0", "Rank  3 Group  1")
    read = _read(tmp_path, mine=split)[""]
    assert (set(read.nodes.tolist()), set(read.gpus_per_node.tolist())) == ({2}, {1})


def test_results_that_were_wrong_are_left_out(tmp_path: Path) -> None:
    wrong = LOG.replace("88.13   11.90    8.92      0", "8.13   11.90    8.92     37")
    assert _read(tmp_path, mine=wrong)[""].time_us.tolist() == [21.5]
    assert read_library(tmp_path).skipped == {"mine.log: results that were wrong": 1}


def test_times_of_the_cpu_are_left_out(tmp_path: Path) -> None:
    assert set(_read(tmp_path, a=LOG, cpu=LOG.replace(" time ", " cputime "))[""].source) == {"a"}
    assert list(read_library(tmp_path).skipped) == [
        "cpu.log: times of the CPU, not of the collective; run it without -C"
    ]


def test_times_in_place_alone_are_of_another_machine(tmp_path: Path) -> None:
    in_place = "\n".join(line[:89] if line[:7].strip(" #") in ("", "size") else line for line in LOG.splitlines())
    assert in_place.count(" time ") == 1
    read = _read(tmp_path, a=LOG, b=in_place)
    assert {m: of.time_us.tolist() for m, of in read.items()} == {"": [21.5, 88.13], "in-place": [21.5, 88.13]}


def test_results_that_nobody_checked_are_read(tmp_path: Path) -> None:
    assert len(_read(tmp_path, mine=LOG.replace("      0    ", "    N/A    "))[""]) == 2


@pytest.mark.parametrize("host", ["node-a", "38dcf168f605"])
def test_a_row_that_nccl_talks_into_is_read(tmp_path: Path, host: str) -> None:
    said = f"{host}:4242:4242 [0] NCCL INFO AllGather: 1048576 Bytes -> Algo RING proto LL128\n"
    cut = LOG.replace("node-a", host).replace("      -1    88.13", f"      -1{said}{said}    88.13")
    cut = cut.replace("8.92      0    87.02", f"8.92      0[2026-01-02 03:04:05] {said}    87.02")
    assert _read(tmp_path, mine=cut)[""].time_us.tolist() == [21.5, 88.13]
    assert read_library(tmp_path).skipped == {}
    old = cut.replace(" #wrong", "  error")
    assert _read(tmp_path, mine=old)[""].time_us.tolist() == [21.5, 88.13]


def test_runs_that_follow_each_other_in_a_file_are_read_apart(tmp_path: Path) -> None:
    other = LOG.replace("all_gather", "all_reduce").replace("to Ring", "to Tree").replace("node-b", "node-a")
    read = _read(tmp_path, mine=SILENT + LOG + other)[""]
    assert read.settings.tolist() == ["nccl"] * 2 + ["ring/ll128"] * 2 + ["tree/ll128"] * 2
    assert read.collective.tolist() == [Collective.ALL_GATHER] * 4 + [Collective.ALL_REDUCE] * 2
    assert read.nodes.tolist() == [2] * 4 + [1] * 2


@pytest.mark.parametrize("command", ["+ mpirun -x NCCL_ALGO={}", "== NCCL_ALGO={}", "+ NCCL_ALGO={}", "# NCCL_ALGO={}"])
def test_a_command_before_a_run_is_of_that_run(tmp_path: Path, command: str) -> None:
    runs = [f"{command.format(algo)}\n{SILENT}" for algo in ("Ring", "Tree")]
    read = _read(tmp_path, mine=SILENT + "".join(runs) + "== NCCL_ALGO=\n" + SILENT)[""]
    assert read.settings.tolist() == ["nccl"] * 2 + ["ring/any"] * 2 + ["tree/any"] * 2 + ["nccl"] * 2


def test_what_a_shell_exports_holds_for_the_runs_that_follow(tmp_path: Path) -> None:
    texts = ["+ export NCCL_ALGO=Ring\n+ NCCL_ALGO=Ring\n", "+ export NCCL_PROTO=LL\n", "+ unset NCCL_ALGO\n"]
    read = _read(tmp_path, mine=SILENT + "".join(text + SILENT for text in texts))[""]
    assert read.settings.tolist() == ["nccl"] * 2 + ["ring/any"] * 2 + ["ring/ll"] * 2 + ["any/ll"] * 2


def test_one_line_may_export_several(tmp_path: Path) -> None:
    read = _read(tmp_path, mine="+ export A=/NCCL_2.20/lib NCCL_ALGO=Ring NCCL_PROTO=LL\n" + SILENT + SILENT)[""]
    assert (read.settings.tolist(), read.environment) == (["ring/ll"] * 4, "")


def test_a_run_that_shows_nothing_after_one_that_does_is_not_nccls_own_choice(tmp_path: Path) -> None:
    # The environment, printed once: it may hold for both.
    assert set(_read(tmp_path, env="NCCL_ALGO=Ring\n" + SILENT + SILENT)[""].settings) == {"ring/any"}
    assert [why for why in read_library(tmp_path).skipped if "a run before it in the file does" in why]
    shown = "NCCL_ALGO=Ring\n" + SILENT + "$ mpirun all_gather_perf -b 8\n" + SILENT
    assert _read(tmp_path, env=shown)[""].settings.tolist() == ["ring/any"] * 2 + ["nccl"] * 2


def test_where_nccl_was_told_something_else_it_is_another_machine(tmp_path: Path) -> None:
    told = LOG.replace("NCCL_ALGO set by environment to Ring", "NCCL_NVLS_ENABLE set by environment to 0")
    told = told.replace("NCCL_PROTO set by environment to LL128", "NCCL_MAX_NCHANNELS set by environment to 4")
    of_no_effect = LOG.replace("NCCL_ALGO set by environment to Ring", "NCCL_SOCKET_IFNAME set by environment to eth0")
    read = _read(tmp_path, a=LOG, b=told, c=of_no_effect)
    assert set(read) == {"", "NCCL_MAX_NCHANNELS=4 NCCL_NVLS_ENABLE=0"}
    assert set(read[""].settings) == {"ring/ll128", "any/ll128"}
    assert set(read["NCCL_MAX_NCHANNELS=4 NCCL_NVLS_ENABLE=0"].settings) == {"nccl"}
    assert len(joined(read.values())) == 2, "its own choice is not that of the others"


def test_what_else_a_command_tells_nccl_makes_another_machine(tmp_path: Path) -> None:
    command = "mpirun -x NCCL_DEBUG=WARN -x NCCL_NVLS_ENABLE=0 -x NCCL_ALGO=Ring all_gather_perf -b 8\n"
    read = _read(tmp_path, a=SILENT, b=command + SILENT, c=command.replace("NVLS_ENABLE", "HOME") + SILENT)
    assert {m: set(of.settings) for m, of in read.items()} == {
        "": {"nccl", "ring/any"},
        "NCCL_NVLS_ENABLE=0": {"ring/any"},
    }
    spoken = "runs with `NCCL_ALGO=Tree`, NCCL_PROTO=LL.\n" + SILENT
    assert "tree/ll" in _read(tmp_path, spoken=spoken)[""].settings
    (tmp_path / "spoken.log").unlink()
    # Nor is it NCCL's own choice where a command names other things and the file's name says what was forced.
    assert set(_read(tmp_path, tree="mpirun -x NCCL_NVLS_ENABLE=0 x\n" + SILENT)[""].settings) == {"nccl", "ring/any"}


@pytest.mark.parametrize(
    "line",
    [
        "TUNER/Plugin: Using nccl_ofi_tuner (v3)",
        "Using tuner plugin: 'nccl_ofi_tuner'",
        "TUNER/Plugin: Using tuner plugin nccl_ofi_tuner",
    ],
)
def test_where_a_tuner_of_another_chose_it_is_another_machine(tmp_path: Path, line: str) -> None:
    own = LOG.replace("NCCL_ALGO set by environment to Ring", "TUNER/Plugin: Using internal tuner plugin.")
    own = own.replace("NCCL_PROTO set by environment to LL128", "Using network AWS Libfabric")
    tuned = own.replace("TUNER/Plugin: Using internal tuner plugin.", line)
    read = _read(tmp_path, own=own, tuned=tuned)
    assert {m: set(of.source) for m, of in read.items()} == {"": {"own"}, "NCCL_TUNER_PLUGIN=nccl_ofi_tuner": {"tuned"}}


def test_a_log_whose_name_alone_says_what_was_forced_is_not_nccls_own_choice(tmp_path: Path) -> None:
    read = _read(tmp_path, default=SILENT, ring_ll=SILENT)[""]
    assert set(read.source) == {"default"}
    assert list(read_library(tmp_path).skipped.values()) == [2]
    command = "mpirun -x NCCL_ALGO=Ring -x NCCL_PROTO=LL all_gather_perf\n"
    assert set(_read(tmp_path, ring_ll=command + SILENT)[""].settings) == {"nccl", "ring/ll"}
    # What NCCL itself says goes before both.
    assert set(_read(tmp_path, ring_ll=command + LOG.replace("to Ring", "to Tree"))[""].settings) == {
        "nccl",
        "tree/ll128",
    }
    free = LOG.replace("NCCL_ALGO set by environment to Ring", "Bootstrap: Using eth0").replace("NCCL_PROTO set", "Set")
    assert set(_read(tmp_path, ring_ll=free)[""].source) == {"default", "ring_ll"}


def test_nccl_that_was_not_asked_what_it_was_told_says_nothing_of_it(tmp_path: Path) -> None:
    lines = (
        "node-a:4242:4242 [0] NCCL INFO Init COMPLETE\nnode-a:4242:4242 [0] NCCL INFO AllGather: 8 Bytes -> Algo 1\n"
    )
    tuned = SILENT.replace("# Out of", lines + "# Out of")
    assert set(_read(tmp_path, default=tuned, g2_ring=tuned)[""].source) == {"default"}
    assert list(read_library(tmp_path).skipped.values()) == [2]
    told = tuned.replace(lines, lines + "node-a:4242:4242 [0] NCCL INFO NCCL_ALGO set by environment to Ring\n")
    assert set(_read(tmp_path, g2_ring=told)[""].settings) == {"nccl", "ring/any"}


@pytest.mark.parametrize("folder", ["ring", "auto_ll", "h100/tree/ll128", "RingLL128", "channels-8", "16ch"])
def test_a_log_whose_folder_alone_says_what_was_forced_is_not_nccls_own_choice(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "2026-02-22_14-58-53.txt").write_text(SILENT)
    assert set(_read(tmp_path, default=SILENT)[""].source) == {"default"}
    assert [why for why in read_library(tmp_path).skipped if "a folder's says what was forced" in why]


@pytest.mark.parametrize("folder", ["cscs.ch", "ringing-llama", "2026_h100x8", "chapter18"])
def test_other_words_of_a_folder_say_nothing(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "1.txt").write_text(SILENT)
    assert set(read_library(tmp_path).machines[0].settings) == {"nccl"}


@pytest.mark.parametrize("folder", ["ring-cluster", "graphs", "2026", "h100_8"])
def test_what_the_directory_itself_is_called_says_nothing(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    assert set(_read(tmp_path / folder, default=SILENT)[""].settings) == {"nccl"}


def test_what_is_not_one_algorithm_is_left_out(tmp_path: Path) -> None:
    for asked in ("^Tree", "Ring,Tree", "allgather:ring"):
        assert set(_read(tmp_path, a=LOG, b=LOG.replace("to Ring", f"to {asked}"))[""].source) == {"a"}
        assert list(read_library(tmp_path).skipped.values()) == [2]


@pytest.mark.parametrize(
    "tag",
    [
        "[1,0]<stdout>:",
        "[1,0]<stdout>: ",
        "[prterun-node-a-4242@1,0]<stdout>: ",
        "0: ",
        " 0: ",
        "[0] ",
        "2026-01-02T03:04:05.123456789Z ",
        "2026-01-02 03:04:05,123 ",
        "2026-01-02T03:04:05.1Z [1,0]<stdout>:",
        "[pod/nccl-launcher-x2x/main] ",
        "(head, rank=0, pid=3808) [1,0]<stdout>:",
        "    ",
    ],
)
def test_what_a_launcher_puts_before_each_line_is_passed_over(tmp_path: Path, tag: str) -> None:
    tagged = "".join(f"{tag}{line}\n" for line in (LOG + SILENT).splitlines())
    assert _read(tmp_path, mine=tagged)[""].settings.tolist() == ["ring/ll128"] * 2 + ["nccl"] * 2


def test_a_launcher_may_put_it_before_each_piece_of_a_line(tmp_path: Path) -> None:
    tag = "[1,0]<stdout>:"
    tagged = "".join(f"{tag}{line}\n" for line in LOG.splitlines())
    tagged = tagged.replace("  -1    88.13", f"  -1{tag}    88.13").replace(
        "      0    87.02", f"      0{tag}    87.02"
    )
    assert _read(tmp_path, mine=tagged)[""].time_us.tolist() == [21.5, 88.13]


def test_colours_and_ends_of_lines_of_windows_are_passed_over(tmp_path: Path) -> None:
    coloured = LOG.replace("# ", "\x1b[32m# ").replace("\n", "\x1b[0m\r\n")
    assert _read(tmp_path, mine=coloured)[""].settings.tolist() == ["ring/ll128"] * 2


@pytest.mark.parametrize("name", ["output.dat.5", "result", "README.md", "job.e1234", "nccl.LOG", "x.stdout"])
def test_a_log_may_be_called_anything(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(f"## All-gather\n\n```\n$ mpirun all_gather_perf\n{LOG}```\n")
    assert read_library(tmp_path).machines[0].settings.tolist() == ["ring/ll128"] * 2


def test_a_page_that_speaks_of_settings_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"### With `NCCL_PROTO=Simple`\n{SILENT}\n### Default\n{SILENT}")
    assert set(_read(tmp_path, mine=LOG)[""].source) == {"mine"}
    assert [why for why in read_library(tmp_path).skipped if "a page that speaks of NCCL_PROTO" in why]
    # A page takes the sign for a heading.
    (tmp_path / "README.md").write_text(SILENT.replace("#  Rank  0", "  Rank  0"))
    assert set(_read(tmp_path)[""].source) == {"mine", "README"}


def test_what_only_looks_like_a_log_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "parse.py").write_text(f'LOG = """{LOG}"""\n')
    (tmp_path / "core.1234").write_bytes(b"\x7fELF\0" + LOG.encode())
    (tmp_path / "README.md").write_text("\n".join(line for line in LOG.splitlines() if " Rank " not in line))
    assert set(_read(tmp_path, mine=LOG)[""].source) == {"mine"}
    assert list(read_library(tmp_path).skipped.values()) == [3]


def test_a_log_in_utf_16_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.o1234").write_text(LOG, encoding="utf-16")
    assert len(read_library(tmp_path).machines[0]) == 2


def test_a_process_alone_and_other_collectives_are_left_out(tmp_path: Path) -> None:
    alone = "\n".join(line for line in LOG.splitlines() if "  Rank  " not in line or "Rank  0" in line)
    read = _read(tmp_path, a=LOG, alone=alone, gather=LOG.replace("all_gather_perf", "gather_perf"))
    assert set(read[""].source) == {"a"}
    assert sorted(read_library(tmp_path).skipped.values()) == [2, 2]


@pytest.mark.parametrize(
    ("name", "is_of"),
    [
        ("allreduce-a", Collective.ALL_REDUCE),
        ("AllReduce", Collective.ALL_REDUCE),
        ("reduce-scatter", Collective.REDUCE_SCATTER),
        ("reducescatter", Collective.REDUCE_SCATTER),
        ("reduce", Collective.REDUCE),
    ],
)
def test_the_name_of_an_older_log_says_which_collective(tmp_path: Path, name: str, is_of: Collective) -> None:
    older = LOG.replace("# Collective test starting: all_gather_perf\n", "")
    assert set(_read(tmp_path, **{name: older})[""].collective.tolist()) == {is_of}


def test_an_older_log_with_its_command_says_which_collective(tmp_path: Path) -> None:
    older = LOG.replace("# Collective test starting: all_gather_perf\n", "")
    runs = "".join(f"mpirun -np 4 /opt/build/{name}_perf -b 8\n{older}" for name in ("broadcast", "reduce_scatter"))
    read = _read(tmp_path, mine=runs)[""]
    assert read.collective.tolist() == [Collective.BROADCAST] * 2 + [Collective.REDUCE_SCATTER] * 2


@pytest.mark.parametrize(
    ("columns", "values", "bus", "is_of"),
    [
        ("   redop    root", "     sum      -1", "17.85", Collective.ALL_REDUCE),
        ("   redop    root", "     max      -1", " 8.92", Collective.REDUCE_SCATTER),
        ("   redop    root", "     sum       0", "11.90", Collective.REDUCE),
        ("   redop    root", "    none       0", "11.90", Collective.BROADCAST),
        ("   redop", "     sum", "17.85", Collective.ALL_REDUCE),
        ("   redop", "     sum", " 8.92", Collective.REDUCE_SCATTER),
        ("    root", "       0", "11.90", Collective.BROADCAST),
    ],
)
def test_an_older_log_says_by_its_columns_and_numbers_which_collective(
    tmp_path: Path, columns: str, values: str, bus: str, is_of: Collective
) -> None:
    older = LOG.replace("# Collective test starting: all_gather_perf\n", "").replace("   redop    root", columns)
    older = older.replace("    none      -1", values).replace("11.90    8.92", f"11.90   {bus}")
    for log in (older, older.replace("#wrong", " error").replace("Group  0 ", "")):
        read = _read(tmp_path, mine=log)[""]
        assert (set(read.collective.tolist()), read.time_us.tolist()) == ({is_of}, [21.5, 88.13])


def test_a_line_that_other_output_cuts_is_left_out(tmp_path: Path) -> None:
    cut = LOG.replace("-1    88.13", "-1[enqueue.cu:1097] <kernel> quit, 3 times").replace("#wrong", " error")
    assert _read(tmp_path, mine=cut)[""].time_us.tolist() == [21.5]
    assert read_library(tmp_path).skipped == {"mine.log: lines that other output cuts": 1}


def test_the_folder_of_an_older_log_may_say_which_collective(tmp_path: Path) -> None:
    (tmp_path / "All_Gather").mkdir()
    older = LOG.replace("# Collective test starting: all_gather_perf\n", "")
    (tmp_path / "All_Gather" / "2n.txt").write_text(older)
    assert set(read_library(tmp_path).machines[0].collective.tolist()) == {Collective.ALL_GATHER}
    # What the numbers say goes before that.
    (tmp_path / "All_Gather" / "2n.txt").write_text(older.replace("    none      -1", "     sum       0"))
    assert set(read_library(tmp_path).machines[0].collective.tolist()) == {Collective.REDUCE}


@pytest.mark.parametrize(
    "command",
    [
        'NCCL_ALGO="Ring" NCCL_PROTO="LL" mpirun all_gather_perf',
        "mpirun -x NCCL_ALGO='Ring' -x \"NCCL_PROTO=LL\" all_gather_perf",
        'declare -x NCCL_ALGO="Ring"\ndeclare -x NCCL_PROTO="LL"',
        'export NCCL_ALGO="Ring" NCCL_PROTO="LL"',
        "srun --export=ALL,NCCL_ALGO=Ring,NCCL_PROTO=LL all_gather_perf",
    ],
)
def test_quotes_and_commas_around_what_was_forced_are_not_of_it(tmp_path: Path, command: str) -> None:
    assert set(_read(tmp_path, mine=f"{command}\n{SILENT}")[""].settings) == {"ring/ll"}


@pytest.mark.parametrize(
    "command",
    [
        "setenv NCCL_ALGO Ring",
        "mpirun -genv NCCL_ALGO Ring all_gather_perf",
        "mpirun -x NCCL_ALGO x",
        "NCCL_ALGO: Ring",
    ],
)
def test_a_setting_that_is_named_and_not_understood_is_not_nccls_own_choice(tmp_path: Path, command: str) -> None:
    assert set(_read(tmp_path, default=SILENT, mine=f"{command}\n{SILENT}")[""].source) == {"default"}
    (why,) = read_library(tmp_path).skipped
    assert "it names NCCL_ALGO, and not what it was" in why
    # Where NCCL itself says what is set, it says so of this, too.
    free = LOG.replace("NCCL_ALGO set by environment to Ring", "Bootstrap: Using eth0").replace("NCCL_PROTO set", "Set")
    assert set(_read(tmp_path, mine=f"{command}\n{free}")[""].source) == {"default", "mine"}


def test_a_run_that_failed_before_it_had_a_table_says_nothing_of_the_next(tmp_path: Path) -> None:
    start = LOG[: LOG.index("#\n#      ")]
    failed = start.replace("all_gather", "all_reduce").replace("node-b", "node-a")
    failed = f"NCCL_PROTO=Simple mpirun all_reduce_perf\n{failed}node-a: Test NCCL failure common.cu:958 'no'\n"
    read = _read(tmp_path, mine=failed + "NCCL_ALGO=Tree mpirun all_gather_perf\n" + SILENT)[""]
    assert set(read.settings) == {"tree/any"}
    assert set(read.collective) == {Collective.ALL_GATHER}
    assert set(read.nodes) == {2}
    (why,) = read_library(tmp_path).skipped
    assert "no line of a table" in why


def test_a_cut_line_is_not_a_wrong_result_and_no_time_is_none(tmp_path: Path) -> None:
    cut = LOG[: LOG.index("      0    87.02")]
    assert _read(tmp_path, mine=cut)[""].time_us.tolist() == [21.5]
    assert list(read_library(tmp_path).skipped) == ["mine.log: lines that other output cuts"]
    assert _read(tmp_path, mine=LOG.replace("88.13", " 0.00"))[""].time_us.tolist() == [21.5]
    assert list(read_library(tmp_path).skipped) == ["mine.log: a time of 0"]


def test_of_several_types_and_operations_the_first_counts(tmp_path: Path) -> None:
    row = next(line for line in LOG.splitlines() if line.startswith("        1024"))
    other = row.replace(" float", "  half").replace("21.50", "35.00")
    assert _read(tmp_path, mine=LOG.replace(row, f"{row}\n{other}"))[""].time_us.tolist() == [21.5, 88.13]
    (why,) = read_library(tmp_path).skipped
    assert "other than float none -1, the first" in why
    # What was cut is the first of nothing.
    cut = row.replace("none      -1    21.50", "no 21.50")
    assert _read(tmp_path, mine=LOG.replace(row, cut))[""].time_us.tolist() == [88.13]


def test_results_that_an_older_log_calls_wrong_are_left_out(tmp_path: Path) -> None:
    failed = SILENT.replace(" #wrong", "  error").replace("values : 0 OK", "values : 12 FAILED")
    assert set(_read(tmp_path, a=SILENT, b=failed)[""].source) == {"a"}
    # Where each line says it, those that are right are right.
    assert set(_read(tmp_path, b=SILENT.replace("values : 0 OK", "values : 12 FAILED"))[""].source) == {"a", "b"}
