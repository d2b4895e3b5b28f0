"""What one process does at the ends of its steps, with the other ranks played: they bring what it brings."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from trained import Trained

from dynamiccl_ray.actions import Action
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.layout import Prepared
from dynamiccl_ray.torch import MOST_REST, PERIOD_NS, Boundaries


class Group:
    """An all-reduce over ranks that are all alike, but for the pace of the fastest. ``lost``: the next one fails."""

    def __init__(self) -> None:
        self.reductions = 0
        self.lost = False
        self.step_ns: int | None = None

    def allreduce(self, words: Any, options: Any) -> Group:
        self.reductions += 1
        if self.step_ns is not None:
            words[0][-1] = self.step_ns
        return self

    def wait(self, timeout: Any = None) -> None:
        if self.lost:
            raise RuntimeError("connection closed by peer")


@pytest.fixture
def rank(job: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trained]:
    monkeypatch.setenv("DYNAMICCL_JOB_ID", job)
    trained = Trained(job, 0x51, 2)
    yield trained
    trained.close()


@pytest.fixture
def boundaries(rank: Trained, monkeypatch: pytest.MonkeyPatch) -> Boundaries:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda **_: Group())
    return Boundaries()


def table_of(version: int) -> DecisionTable:
    return DecisionTable.of(version, {key_of(4, 1 << 20, False): Action(pair=version % 3 + 1)}, max_channels=1)


@pytest.mark.parametrize(
    ("step_ns", "every"),
    [
        (PERIOD_NS // 4, 4),
        (PERIOD_NS // 4 + 1, 4),
        (PERIOD_NS // 4 - 1, 5),
        (PERIOD_NS, 1),
        (100 * PERIOD_NS, 1),
        (1, MOST_REST + 1),
        (0, 1),
    ],
)
def test_all_reduces_are_a_period_apart_by_the_pace_that_all_ranks_were_told(
    boundaries: Boundaries, step_ns: int, every: int
) -> None:
    boundaries.step()
    boundaries._group.step_ns = step_ns
    # The first one was before anybody knew the pace.
    boundaries.step()
    before = boundaries._group.reductions
    for _ in range(10 * every):
        boundaries.step()
    assert boundaries._group.reductions - before == 10


def test_the_pace_that_a_rank_brings_is_that_of_the_steps_since_it_last_did(
    boundaries: Boundaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("dynamiccl_ray.torch.time.perf_counter", lambda: now[0])
    brought = []
    for step_s in 3 * [0.025] + 100 * [0.01] + 12 * [1.0]:
        boundaries.step()
        if boundaries._work is not None:
            brought.append(int(boundaries._boundary.words[-1]))
        now[0] += step_s
    # Nobody knows it at first; where it changes between two, it is their mean.
    assert brought[:2] == [0, 25_000_000]
    assert brought.count(10_000_000) >= 3
    assert brought[-3:] == 3 * [1_000_000_000]


def test_what_all_ranks_bring_is_in_force_one_step_later(boundaries: Boundaries, rank: Trained) -> None:
    boundaries.step()
    boundaries._group.step_ns = PERIOD_NS // 8
    with Channel(rank.path) as runner:
        for version in range(1, 20):
            assert runner.stage(table_of(version)) is Prepared.PREPARED
            offered = False
            for _ in range(9):
                boundaries.step()
                rank.call(4, 1 << 20)
                assert runner.status.base_version == (version if offered else version - 1)
                offered |= runner.status.offered_version == version
            assert runner.status.base_version == version
    boundaries.step(loss=0.25)
    with Channel(rank.path) as runner:
        said = runner.job
    assert said is not None
    assert said.loss == 0.25
    assert said.step == boundaries.count - 1


def test_a_lost_rank_changes_nothing_while_nothing_is_asked(
    boundaries: Boundaries, caplog: pytest.LogCaptureFixture
) -> None:
    boundaries.step()
    boundaries._group.lost = True
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * MOST_REST):
            boundaries.step()
    assert boundaries._group.reductions == 1, "a group that has failed is asked no more"
    assert len(caplog.records) == 1


def test_a_rank_lost_while_a_table_is_agreed_on_ends_the_job(boundaries: Boundaries, rank: Trained) -> None:
    boundaries.step()
    with Channel(rank.path) as runner:
        runner.stage(table_of(1))
        boundaries.step()
        assert runner.status.offered_version == 1
        boundaries._group.lost = True
        with pytest.raises(RuntimeError, match="not known"):
            boundaries.step()
        assert runner.status.base_version == 0


EXITS = """
import dynamiccl_ray.torch

class Work:
    def wait(self, timeout):
        print("waited", timeout.total_seconds() <= 10, flush=True)
        raise RuntimeError("a rank was lost")

dynamiccl_ray.torch._boundaries._work = Work()
"""


def test_an_all_reduce_that_is_under_way_at_exit_is_waited_for_and_not_for_ever() -> None:
    """Gloo's thread may hold the last of its tensors, which Python cannot free any more: the process would abort."""
    done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "waited True\n", "")


def test_what_is_under_way_at_exit_is_waited_for_once(boundaries: Boundaries) -> None:
    boundaries.close()
    boundaries.step()
    assert boundaries._work is not None
    boundaries.close()
    assert boundaries._work is None
