"""Segments as files: their names, the directory they are in, what the dead leave behind."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rig import CALLS, Rig, play, wait_for

from dynamiccl_ray.plugin_bridge import native_dir
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.nccl_job import HOST_NAME, NcclJob
from dynamiccl_ray.plugin_bridge.segments import process_alive, remove_stale, sanitized, segments


def test_names_are_sanitized_alike_on_both_sides(rig: Rig) -> None:
    name = "a b/c-d:x.Y_" + "z" * 80
    with rig.job(play(), job_id=name) as job:
        job.set_credit(0)
        job.start()
        (path,) = wait_for(lambda: list(segments(name)), what="the segment")
        assert path.name == f"dynamiccl-{sanitized(name)}-{job.pids()[0]}-0"
    assert sanitized(name) == "a=20b=2Fc=2Dd=3Ax.Y_" + "z" * 51


def test_leftovers_of_the_dead_go_and_the_living_stay(rig: Rig, segment: tuple[NcclJob, Path]) -> None:
    job, live = segment
    pid = job.pids()[0]
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    content = live.read_bytes()
    of_dead = rig.shm / f"dynamiccl-other-{dead.pid}-0"
    of_dead.write_bytes(content[:56] + struct.pack("<I", dead.pid) + content[60:])
    recycled = rig.shm / f"dynamiccl-other-{pid}-7"
    recycled.write_bytes(content[:48] + struct.pack("<Q", 1) + content[56:])
    for copy in (of_dead, recycled):
        copy.chmod(0o600)
    unreadable_dead = rig.shm / f"dynamiccl-other-{dead.pid}-1"
    unreadable_dead.write_bytes(b"old")
    unreadable_live = rig.shm / f"dynamiccl-other-{os.getpid()}-1"
    unreadable_live.write_bytes(b"old")
    held = unreadable_live.open("r+b")
    fcntl.fcntl(held, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    foreign = rig.shm / "dynamiccl-notes.txt"
    foreign.write_text("mine")
    assert set(segments()) == {live, of_dead, recycled, unreadable_dead, unreadable_live}
    assert set(segments("other")) == {of_dead, recycled, unreadable_dead, unreadable_live}
    assert remove_stale("no such job") == []
    assert set(remove_stale()) == {of_dead, recycled, unreadable_dead}
    assert set(rig.shm.iterdir()) == {live, unreadable_live, foreign}
    held.close()
    unreadable_live.unlink()
    foreign.unlink()
    assert process_alive(pid, Channel(live, claim=False).identity.start_time)
    assert not process_alive(pid, 1)
    assert not process_alive(2**22 + 1, 1)


def test_a_leftover_of_the_same_name_is_not_touched(rig: Rig) -> None:
    """Process ids repeat in containers that share /dev/shm; the plugin takes the next name."""
    host = rig.directory / "host"
    host.write_text(f'#!/bin/sh\necho mine > "{rig.shm}/dynamiccl-job1-$$-0"\nexec "{native_dir() / HOST_NAME}" "$@"\n')
    host.chmod(0o755)
    job = rig.job(play(steps=10))
    job._command[0] = str(host)
    job.start()
    leftover = rig.shm / f"dynamiccl-job1-{job.pids()[0]}-0"
    job.wait(20)
    assert leftover.read_text() == "mine\n"
    assert list(segments()) == [leftover]


# ---- nowhere to put it ----


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Any]:
    """Mounts a tmpfs with the options given, or skips."""
    made: list[Path] = []

    def mount(options: str) -> Path:
        where = tmp_path / f"mount{len(made)}"
        where.mkdir()
        if os.geteuid() != 0:
            pytest.skip("mounting a tmpfs needs root")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        made.append(where)
        return where

    yield mount
    for where in made:
        subprocess.run(["umount", str(where)], check=True)


def check_runs_untuned(rig: Rig, shm: Path, message: str) -> None:
    job = rig.start(play(steps=10, comms=2), env={"DYNAMICCL_SHM_DIR": str(shm)})
    job.set_credit(10)
    job.wait(30)
    assert job.returncodes() == [0]
    log = job.log(0)
    assert len(log) == 2 * 10 * len(CALLS)
    assert np.all(log["own"] == 1)
    lines = job.stderr(0).splitlines()
    assert len(lines) == 1, lines
    assert message in lines[0]
    assert "tuning stays off" in lines[0]


def test_a_directory_that_is_not_there(rig: Rig, tmp_path: Path) -> None:
    check_runs_untuned(rig, tmp_path / "none", "No such file or directory")


def test_a_directory_with_too_long_a_name(rig: Rig, tmp_path: Path) -> None:
    long = tmp_path / ("d" * 200)
    long.mkdir()
    check_runs_untuned(rig, long, "too long")


def test_a_directory_that_cannot_be_written(rig: Rig, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if os.geteuid() == 0:
        check_runs_untuned(rig, request.getfixturevalue("mounted")("ro,size=200m"), "Read-only file system")
    else:
        tmp_path.chmod(0o500)
        check_runs_untuned(rig, tmp_path, "Permission denied")


def test_a_full_directory(rig: Rig, mounted: Any) -> None:
    shm = mounted("size=200m")
    with (shm / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 195 << 20)
    check_runs_untuned(rig, shm, "free")
    assert [path.name for path in shm.iterdir()] == ["ballast"]


def test_dockers_default_of_64_mib_is_left_to_nccl(rig: Rig, mounted: Any) -> None:
    shm = mounted("size=64m")
    check_runs_untuned(rig, shm, "free")
    assert list(shm.iterdir()) == []


def test_no_inode_left(rig: Rig, mounted: Any) -> None:
    check_runs_untuned(rig, mounted("size=200m,nr_inodes=1"), "No space left")


# ---- the ring ----
