"""Static tables under the plugin: the same decisions as the live table that they were written from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from rig import BELIEF, CALLS, KIB, Rig, indices, play, stage, table_key, used_of
from test_plugin import ACTIONS, SHIPPED, check_used, finish, table_of
from tuners import Answer, Tuner

from dynamiccl_ray.actions import N_ACTIONS
from dynamiccl_ray.control.table import ENTRY_DTYPE, DecisionTable
from dynamiccl_ray.keys import N_BINS, N_KEYS, bin_bytes
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.segments import segments
from dynamiccl_ray.static.blocks import Block, text_of, write_text

RANKS, NODES, CHANNELS = 8, 2, 16
CALLS_PER_TABLE = 10_000


def block(table: DecisionTable, name: str = "", ranks: int = RANKS) -> Block:
    return Block(ranks=ranks, nodes=NODES, max_channels=table.max_channels, name=name, entries=table.entries)


def written(path: Path, *blocks: Block) -> str:
    write_text(path, text_of(blocks))
    return str(path)


def learned(seed: int) -> DecisionTable:
    """Any actions in stretches of bins, as runs leave them, and gaps."""
    rng = np.random.default_rng(seed)
    flat: dict[int, int] = {}
    for start in rng.integers(0, N_KEYS, 600):
        action = int(rng.integers(N_ACTIONS))
        flat |= dict.fromkeys(range(start, min(N_KEYS, start + int(rng.integers(1, 12)))), action)
    keys = np.array(list(flat), np.int64)
    table = DecisionTable.of_flat(1, keys, np.array(list(flat.values()), np.int64), max_channels=CHANNELS)
    entries = table.entries
    entries[entries["channels"] > CHANNELS] = np.zeros(1, ENTRY_DTYPE)
    entries["chunk_log2"][entries["algo"] == 255] = 0
    return DecisionTable(1, entries, CHANNELS)


def random_calls(seed: int) -> Iterator[tuple[int, int, int, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(seed)
    for _ in range(CALLS_PER_TABLE):
        least = bin_bytes(int(rng.integers(N_BINS)))
        nbytes = int(rng.choice([least, max(0, least - 1), least + int(rng.integers(1 + least // 8))]))
        cost = rng.random((7, 3), np.float32)
        cost[rng.random((7, 3)) < 0.3] = -1.0
        yield int(rng.integers(5)), nbytes, int(rng.choice([1, 1, 2, 9])), cost


def answers(tuner: Tuner, seed: int) -> list[Answer]:
    return [tuner.ask(*call) for call in random_calls(seed)]


@contextmanager
def live(version: int, table: DecisionTable, shm: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuner]:
    monkeypatch.setenv("DYNAMICCL_SHM_DIR", shm)
    monkeypatch.delenv("DYNAMICCL_TABLE", raising=False)
    tuner = Tuner(version, RANKS, NODES)
    (path,) = segments("default")
    with Channel(path) as channel:
        assert stage(channel, table, 0) == 1
        yield tuner
        tuner.close()


@pytest.mark.parametrize("version", range(2, 7))
def test_ten_thousand_calls_are_decided_as_by_the_live_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "")
    monkeypatch.setenv("NCCL_PROTO", "")
    monkeypatch.delenv("DYNAMICCL_JOB_ID", raising=False)
    table = learned(version)
    with TemporaryDirectory(prefix="dynamiccl-tests-", dir="/dev/shm") as shm:
        with live(version, table, shm, monkeypatch) as tuner:
            expected = answers(tuner, version)
        monkeypatch.setenv("DYNAMICCL_TABLE", written(tmp_path / "table", block(table)))
        tuner = Tuner(version, RANKS, NODES)
        assert os.listdir(shm) == []
        got = answers(tuner, version)
        tuner.close()
    assert got == expected
    untouched = Tuner(version, RANKS + 1, NODES)
    assert answers(untouched, version) != expected, "a table that says nothing would do as well"
    untouched.close()


# ---- whom a block is about ----


@pytest.mark.parametrize(
    ("ranks", "name", "channels"),
    [(8, None, 2), (8, "", 2), (8, "other", 2), (8, "dp", 4), (16, "dp", 8), (16, "tp", 0), (4, "dp", 0)],
)
@pytest.mark.parametrize("turned", [False, True])
def test_the_most_exact_block_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, name: str | None, channels: int, turned: bool
) -> None:
    def of(count: int) -> DecisionTable:
        entries = np.zeros(N_KEYS, ENTRY_DTYPE)
        entries[table_key((Collective.ALL_REDUCE, KIB))] = (1, 0, 1, 2, count, 0, 0, 0)
        return DecisionTable(1, entries, CHANNELS)

    blocks = [block(of(2)), block(of(4), "dp"), block(of(8), "dp", 16)]
    path = written(tmp_path / "table", *(blocks[::-1] if turned else blocks))
    monkeypatch.setenv("DYNAMICCL_TABLE", path)
    tuner = Tuner(6, ranks, NODES, name=name)
    assert tuner.mask.value == 0, "no profiler events"
    assert tuner.ask(Collective.ALL_REDUCE, KIB, 1, np.ones((7, 3))).channels == channels
    tuner.close()


# ---- in a job ----


@pytest.mark.parametrize("release", SHIPPED)
def test_a_job_follows_a_static_table(rig: Rig, release: str) -> None:
    path = written(rig.directory / "table", block(table_of(ACTIONS)))
    env = {"DYNAMICCL_TABLE": path, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
    job = rig.start(play(steps=5, places=(0, 5)), release=release, env=env)
    finish(job)
    assert list(rig.shm.iterdir()) == []
    for process in (0, 1):
        check_used(used_of(job.log(process)), 0, SHIPPED[release][0])
        said = job.stderr(process)
        assert f"static table {path}, digest {block(table_of(ACTIONS)).digest}, 8 ranks on 2 nodes" in said
        assert f"wins over DYNAMICCL_JOB_ID={rig.job_id}" in said


@pytest.mark.parametrize("variable", ["NCCL_ALGO", "NCCL_PROTO"])
def test_the_users_environment_wins_over_a_table(rig: Rig, variable: str) -> None:
    env = {"DYNAMICCL_TABLE": written(rig.directory / "table", block(table_of(ACTIONS))), variable: "ring"}
    job = rig.start(play(steps=2), env=env)
    finish(job)
    assert np.all(used_of(job.log(0))["own"] == 1)


def test_a_communicator_takes_the_file_as_it_is_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps what it has taken; nothing of an earlier communicator is left in one that follows."""
    path = tmp_path / "table"
    monkeypatch.setenv("DYNAMICCL_TABLE", written(path, block(table_of(ACTIONS))))
    call = (*CALLS[0], 1, np.ones((7, 3)))
    first = Tuner(6, RANKS, NODES)
    path.unlink()
    second = Tuner(6, RANKS, NODES)
    assert first.ask(*call).channels == 4
    assert second.ask(*call).channels == 0
    first.close()
    third = Tuner(6, RANKS, NODES)
    assert third.ask(*call).channels == 0
    second.close()
    third.close()


# ---- files that are refused ----


def bad_files(directory: Path) -> dict[str, tuple[Path | str, str]]:
    good = text_of([block(table_of(ACTIONS))])
    files = {}
    for name, text, why in (
        ("malformed", good.replace("ring", "rung", 1), ":6: there is no algorithm rung"),
        ("cut at a line", good.removesuffix("end\n"), "the file was cut short"),
        ("cut in a line", good[:-9], "the file was cut short"),
        ("empty", "", ":1: a table ends with a line that says end"),
        ("huge", good.removesuffix("end\n") + "# x\n" * 300_000 + "end\n", "larger than 1 MiB"),
        ("writable", good, "others than its owner may write to it"),
    ):
        path = directory / name
        path.write_text(text)
        path.chmod(0o664 if name == "writable" else 0o644)
        files[name] = (path, why)
    os.mkfifo(directory / "pipe")
    files["a pipe"] = (directory / "pipe", "it is not a file")
    files["a directory"] = (directory, "it is not a file")
    files["nothing there"] = (directory / "none", "No such file or directory")
    files["relative"] = ("table", "it must be an absolute path")
    return files


@pytest.mark.parametrize("name", [
    "malformed", "cut at a line", "cut in a line", "empty", "huge", "writable", "a pipe", "a directory",
    "nothing there", "relative",
])  # fmt: skip
def test_a_bad_file_is_refused_whole_and_said_once(rig: Rig, name: str) -> None:
    path, why = bad_files(rig.directory)[name]
    job = rig.start(play(steps=2, comms=2), env={"DYNAMICCL_TABLE": str(path), "NCCL_DEBUG": "WARN"})
    finish(job)
    assert np.all(used_of(job.log(0))["own"] == 1)
    assert list(rig.shm.iterdir()) == []
    said = [line for line in job.stderr(0).splitlines() if why in line]
    assert len([line for line in said if line.startswith("TUNER/DynamICCL: ")]) == 1
    assert len([line for line in said if "NCCL WARN" in line]) == 2, "each communicator says so in NCCL's log"
    assert all(str(path) in line for line in said)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_file_is_refused(rig: Rig) -> None:
    path = written(rig.directory / "table", block(table_of(ACTIONS)))
    os.chown(path, 12345, -1)
    job = rig.start(play(steps=2), env={"DYNAMICCL_TABLE": path})
    finish(job)
    assert np.all(used_of(job.log(0))["own"] == 1)
    assert "it belongs to another user" in job.stderr(0)


def test_a_link_is_followed(rig: Rig) -> None:
    """Kubernetes mounts its files as links."""
    written(rig.directory / "table", block(table_of(ACTIONS)))
    link = rig.directory / "link"
    link.symlink_to(rig.directory / "table")
    job = rig.start(play(steps=2), env={"DYNAMICCL_TABLE": str(link)})
    finish(job)
    used = used_of(job.log(0))
    assert BELIEF.channels > 4
    assert set(used[indices(used) == 0]["asked"]) == {4}
