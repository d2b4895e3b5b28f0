"""What others can do to a segment, and what a process can do to its own: nothing that training notices."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import wait_for
from trained import Trained
from typer.testing import CliRunner

from dynamiccl_ray.actions import Action
from dynamiccl_ray.cli.app import app
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import ChannelError
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.job import Reporter
from dynamiccl_ray.plugin_bridge.layout import Prepared
from dynamiccl_ray.plugin_bridge.segments import remove_stale, segments

ALL_REDUCE, BYTES = 4, 1 << 20
TABLE = DecisionTable.of(1, {key_of(ALL_REDUCE, BYTES, False): Action(pair=6, channels=3)}, max_channels=16)
TESTS = Path(__file__).parents[1]


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYNAMICCL_SHM_DIR", str(tmp_path))
    monkeypatch.setenv("DYNAMICCL_JOB_ID", "hostile")
    return tmp_path


@pytest.fixture
def rank(shm: Path) -> Iterator[Trained]:
    rank = Trained("hostile", 7, 2)
    yield rank
    rank.close()


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A process that can make segments; ``TABLE`` and the rest are those of this file."""
    path = os.pathsep.join([str(TESTS), str(Path(__file__).parent), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", f"from test_hostile import *\n{code}"],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# ---- other users ----


@pytest.mark.parametrize("owner", ["another", "ours, open to all"])
def test_a_segment_that_others_may_write_to_is_not_opened(rank: Trained, shm: Path, owner: str) -> None:
    planted = shm / f"dynamiccl-hostile-{os.getpid()}-99"
    planted.write_bytes(rank.path.read_bytes())
    planted.chmod(0o600 if owner == "another" else 0o666)
    if owner == "another":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(planted, 12345, 12345)
    for claim in (True, False):
        with pytest.raises(ChannelError, match=r"belongs to user \d+ with mode"):
            Channel(planted, claim=claim)
    reporter = Reporter("hostile")
    assert reporter.step(1, 0.5), "the segment of our own is there"
    assert planted not in reporter._segments.open


def test_what_another_user_has_made_is_not_removed(shm: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    theirs = shm / "dynamiccl-hostile-1-0"
    theirs.write_bytes(b"")
    os.chown(theirs, 12345, 12345)
    assert remove_stale("hostile") == []
    assert theirs.exists()


def test_a_size_that_is_another_or_ranks_without_end(rank: Trained, shm: Path) -> None:
    longer = shm / "dynamiccl-hostile-1-1"
    longer.write_bytes(rank.path.read_bytes() + b"x")
    longer.chmod(0o600)
    with pytest.raises(ChannelError, match="expected"):
        Channel(longer)
    damaged = bytearray(rank.path.read_bytes())
    damaged[40 + 28 : 40 + 32] = b"\xff" * 4  # `ranks`: docs/channel.md
    longer.write_bytes(damaged)
    with pytest.raises(ChannelError, match="has 4294967295 ranks"):
        Channel(longer)


def test_an_offer_that_leads_out_of_the_segment_is_none(shm: Path) -> None:
    """It is the job's own word, but whoever may write to the file may write to that."""
    code = """
from dynamiccl_ray.plugin_bridge.boundary import Boundary
rank = Trained('hostile', 7, 2)
with rank.path.open('r+b') as file:
    file.seek(1147152)  # `offered`: docs/channel.md
    file.write((5 << 8 | 255).to_bytes(8, 'little'))
with Channel(rank.path, claim=False) as job:
    boundary = Boundary()
    boundary.serve([job])
    boundary.bring()
    assert not boundary.offering
    boundary.take()
    assert job.status.base_version == 0
rank.close()
"""
    done = run(code)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_a_process_in_another_pid_namespace_is_alive(rank: Trained, shm: Path) -> None:
    """Containers that share /dev/shm: a process id of one means nothing in another."""
    code = "print([path.name for path in remove_stale('hostile')])"
    path = os.pathsep.join([str(TESTS), str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", f"from test_hostile import *\n{code}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout.strip() == "[]", done.stderr
    assert rank.path.exists()


def test_a_dead_process_leaves_what_can_be_removed(shm: Path) -> None:
    done = run("Trained('hostile', 7, 2); os._exit(0)")
    assert done.returncode == 0, done.stderr
    (left,) = segments("hostile")
    assert remove_stale("hostile") == [left]


# ---- the process itself ----


def test_job_ids_that_differ_have_files_that_differ(shm: Path) -> None:
    ids = ["a-b", "a_b", "a b", "ä", "a=2Db", "Ä", "x" * 70]
    for job in ids:
        done = run(f"Trained({job!r}, 7, 2); os._exit(0)", DYNAMICCL_JOB_ID=job)
        assert done.returncode == 0, done.stderr
    for job in ids:
        assert len(list(segments(job))) == 1, job
    assert len(list(shm.iterdir())) == len(ids)


def test_a_forked_child_leaves_its_parents_segment_alone(rank: Trained) -> None:
    rank.call(ALL_REDUCE, BYTES)
    if (pid := os.fork()) == 0:
        rank.call(ALL_REDUCE, BYTES)
        rank.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert rank.path.exists()
    with Channel(rank.path) as channel:
        assert channel.alive, "the child took the lock along"
        assert channel.status.dseq == 1, "the child called into it"


def test_a_dead_parent_is_dead_though_a_child_lives_on(shm: Path) -> None:
    code = """
rank = Trained('hostile', 7, 2)
if os.fork() == 0:
    os.close(1), os.close(2)
    time.sleep(30)
os._exit(0)
"""
    assert run(code).returncode == 0
    (left,) = segments("hostile")
    assert remove_stale("hostile") == [left]


def test_a_limit_on_file_sizes_turns_tuning_off_and_kills_nobody(shm: Path) -> None:
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
import ctypes
from dynamiccl_ray.plugin_bridge import plugin_path
from trained import _Tuner
tuner, context = _Tuner.in_dll(ctypes.CDLL(str(plugin_path())), 'ncclTunerPlugin_v6'), ctypes.c_void_p()
assert tuner.init(ctypes.byref(context), 7, 2, 1, None, None, None) == 0
assert not list(segments('hostile'))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "tuning stays off (ulimit -f)" in done.stderr


def test_an_abort_ends_a_wait_at_a_hold(shm: Path) -> None:
    """ncclCommAbort comes from another thread, and ends the tuner under the call that waits."""
    rank = Trained("hostile", 7, 2)
    with Channel(rank.path) as channel:
        outcome, hold_at, _ = channel.prepare(TABLE, 0)
        assert (outcome, hold_at) == (Prepared.PREPARED, 1)
        waiting = threading.Thread(target=rank.call, args=(ALL_REDUCE, BYTES))
        waiting.start()
        wait_for(lambda: channel.status.hold_waits == 1)
        began = time.monotonic()
        rank.close()
        waiting.join(20)
        assert not waiting.is_alive()
        assert time.monotonic() - began < 5
    assert rank.told == [(-1, 0)]
    assert not rank.path.exists()


def test_steps_are_reported_without_a_descriptor_for_each_communicator(shm: Path) -> None:
    ranks = [Trained("hostile", 100 + i, 2) for i in range(20)]
    before = len(list(Path("/proc/self/fd").iterdir()))
    reporter = Reporter("hostile")
    assert reporter.step(1, 0.5)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before
    for rank in ranks:
        rank.close()


def test_a_job_name_runs_no_command(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    result = CliRunner().invoke(app, ["plugin", "env", "--job", f"a b; touch {mark}; $(touch {mark})"])
    assert result.exit_code == 0, result.output
    shell = 'eval "$0"; printf %s "$DYNAMICCL_JOB_ID"'
    done = subprocess.run(["bash", "-c", shell, result.output], capture_output=True, text=True, check=True)
    assert done.stdout == f"a b; touch {mark}; $(touch {mark})"
    assert not mark.exists()
