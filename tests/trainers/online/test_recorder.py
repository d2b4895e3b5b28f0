"""What a run leaves on disk, whatever happens to it."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from dynamiccl_ray.actors.episodes import Experience
from dynamiccl_ray.actors.status import SAMPLE_DTYPE, Epoch
from dynamiccl_ray.agent.observation import SIZE
from dynamiccl_ray.agent.reward import PRIMARY
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.trainers.common import checkpoint
from dynamiccl_ray.trainers.online import recorder as recording
from dynamiccl_ray.trainers.online import summary
from dynamiccl_ray.trainers.online.ending import Disk, Ending
from dynamiccl_ray.trainers.online.recorder import Recorder, part_files, read_rewards, read_samples


def epoch(number: int, n: int = 5, phase: Phase = Phase.LEARN) -> Epoch:
    samples = np.zeros(n, SAMPLE_DTYPE)
    samples["dseq"] = 100 * number + np.arange(n)
    samples["phase"] = phase
    return Epoch(
        number=number, comm=7, ranks=4, nodes=2, name="", version=1, phase=phase, samples=samples, took_s=0.5,
        judged=np.zeros(1, np.int64), terms={PRIMARY: np.array([0.1 * number])},
    )  # fmt: skip


def episode(key: int, decisions: int = 3) -> Experience:
    return Experience(
        comm=2**64 - 1,
        key=key,
        ordinal=32,
        observations=np.arange((decisions + 1) * SIZE, dtype=np.float32).reshape(-1, SIZE),
        heads=np.arange(decisions * 3).reshape(-1, 3),
        log_probs=np.full(decisions, -0.5, np.float32),
        rewards=np.linspace(0, 1, decisions, dtype=np.float32),
    )


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every epoch makes a file."""
    monkeypatch.setattr(recording, "_PART_S", 0.0)


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """No file may be longer than 100 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("_at_once")
def test_a_run_that_is_killed_leaves_what_it_has_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "run", 0)
    phases = [Phase.BASELINE, Phase.LEARN, Phase.EXPLOIT]
    for number, phase in enumerate(phases):
        recorder.add(epoch(number, phase=phase))
    (tmp_path / "samples.parquet" / ".unfinished").write_bytes(b"PAR1 half of it")
    samples = read_samples(tmp_path)
    assert samples["dseq"].tolist() == [100 * number + i for number in range(3) for i in range(5)]
    assert samples["phase"].tolist() == [phase.name.lower() for phase in phases for _ in range(5)]
    assert read_rewards(tmp_path)["reward"] == pytest.approx([0.0, 0.1, 0.2])
    assert read_rewards(tmp_path)["took_s"].tolist() == [0.5] * 3


@pytest.mark.usefixtures("_at_once")
def test_episodes_are_in_the_same_files_as_what_was_measured_meanwhile(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "run", 0)
    recorder.learned([episode(1), episode(2, 1)])
    recorder.add(epoch(0))
    with no_room():
        recorder.learned([episode(3)])
        recorder.add(epoch(1))
    recorder.learned([episode(4)])
    recorder.learned([])
    recorder.add(epoch(2))
    # What is killed here has no more to say.
    table = pq.read_table(tmp_path / "episodes.parquet")
    assert table["key"].to_pylist() == [1, 2, 4]
    assert table["comm"].to_pylist() == [2**64 - 1] * 3
    assert [len(of) for of in table["observation"].to_pylist()] == [4 * SIZE, 2 * SIZE, 4 * SIZE]
    assert table["chunk"].to_pylist() == [[2, 5, 8], [2], [2, 5, 8]]
    assert len(list((tmp_path / "episodes.parquet").glob("part-*.parquet"))) == 2


def test_files_come_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    for name in ("part-1000000.parquet", "part-000002.parquet", "part-999999.parquet", ".unfinished", "note.txt"):
        (tmp_path / "table" / name).touch()
    assert [path.stem[5:] for path in part_files(tmp_path, "table")] == ["000002", "999999", "1000000"]


def test_episodes_that_wait_take_a_bounded_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path, "run", 0)
    recorder.learned([episode(1)])
    assert not list((tmp_path / "episodes.parquet").glob("part-*.parquet"))
    monkeypatch.setattr(recording, "_MOST_BYTES", 8 * SIZE * 4)
    recorder.learned([episode(2)])
    assert pq.read_table(tmp_path / "episodes.parquet")["key"].to_pylist() == [1, 2]


def test_what_an_earlier_run_wrote_there_is_not_this_ones(tmp_path: Path) -> None:
    for n in (3, 2):
        with Recorder(tmp_path, "run", 0) as recorder:
            recorder.add(epoch(0, n))
    assert len(read_samples(tmp_path)["dseq"]) == 2
    with Recorder(tmp_path, "run", 0):
        pass
    assert len(read_samples(tmp_path)["dseq"]) == len(read_rewards(tmp_path)["epoch"]) == 0


def test_what_an_earlier_run_wrote_stays_where_one_goes_on(tmp_path: Path) -> None:
    with Recorder(tmp_path, "first", 0) as recorder:
        recorder.add(epoch(0, 3))
    (tmp_path / "samples.parquet" / ".unfinished").write_bytes(b"PAR1 half of it")
    for run in ("second", "third"):
        with Recorder(tmp_path, run, 0, goes_on=True) as recorder:
            recorder.add(epoch(1, 2))
    samples = read_samples(tmp_path)
    assert samples["run"].tolist() == ["first"] * 3 + ["second"] * 2 + ["third"] * 2
    assert len(read_rewards(tmp_path)["epoch"]) == 3
    assert not list(tmp_path.rglob(".unfinished"))


@pytest.mark.usefixtures("_at_once")
def test_a_full_disk_is_said_once_counted_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path, "run", 0)
    recorder.add(epoch(0))
    with caplog.at_level(logging.WARNING), no_room():
        for number in (1, 2, 3):
            recorder.add(epoch(number))
    assert recorder.unwritten == 15
    assert len([r for r in caplog.records if "could not be written" in r.getMessage()]) == 1
    recorder.add(epoch(4))
    recorder.close()
    assert read_samples(tmp_path)["epoch"].tolist() == [0] * 5 + [4] * 5
    assert not list(tmp_path.rglob(".unfinished"))


def test_a_checkpoint_for_which_there_is_no_room_leaves_the_one_before(tmp_path: Path) -> None:
    path, disk = tmp_path / "checkpoint.pt", Disk()
    assert disk.write("checkpoint", lambda: checkpoint.write(path, {"a": np.arange(1000)}))
    with no_room():
        assert not disk.write("checkpoint", lambda: checkpoint.write(path, {"a": np.arange(2000)}))
    assert len(checkpoint.read(path)["a"]) == 1000
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_what_the_summary_looks_back_on_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "MOST_BYTES", 100_000)
    recent = summary.Recent()
    for number in range(1000):
        recent.add(epoch(number, 50))
    assert 10 < len(recent.epochs) < 40
    assert recent.epochs[-1].number == 999
    before = len(recent.epochs)
    nothing: Any = epoch(1000, 0)
    object.__setattr__(nothing, "judged", np.zeros(0, np.int64))
    recent.add(nothing)
    assert len(recent.epochs) == before


def test_what_the_summary_looks_back_on_holds_no_message() -> None:
    """What Ray delivers is a view of its object store, which every process of a run maps."""
    message = np.zeros(1000, SAMPLE_DTYPE)
    said = weakref.ref(message)
    recent = summary.Recent()
    views = {"samples": message[:5], "decisions": message[:0].view(), "judged": message["bytes"][:1].view(np.int64)}
    recent.add(replace(epoch(0), **views, terms={PRIMARY: message["skew"][:1]}))
    del message, views
    assert said() is None
    assert len(recent.epochs[0].samples) == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_what_it_may_and_nothing_else(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Ending() as ending:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert ending.told, "what was under way went on"
        with pytest.raises(KeyboardInterrupt), ending.interruptible():
            raise AssertionError("begun after the run was told to end")
    assert signal.getsignal(number) == before
    with Ending() as ending:
        with pytest.raises(KeyboardInterrupt), ending.interruptible():
            signal.raise_signal(number)
        assert ending.told
        os.kill(os.getpid(), number)


def test_who_listens_last_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has a handler of its own."""
    before = signal.getsignal(signal.SIGTERM)
    with Ending() as ending:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ending.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ending.told
    assert signal.getsignal(signal.SIGTERM) == before
