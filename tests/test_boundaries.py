"""What one process does at the ends of its steps, with the other ranks played: they bring what it brings."""

from __future__ import annotations

import logging
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
from dynamiccl_ray.torch import PATIENCE, QUIET, Boundaries


class Group:
    """An all-reduce over ranks that are all alike. ``lost``: the next one fails."""

    def __init__(self) -> None:
        self.reductions = 0
        self.lost = False

    def allreduce(self, words: Any, options: Any) -> Group:
        self.reductions += 1
        return self

    def wait(self) -> None:
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


def test_in_quiet_times_few_boundaries_ask(boundaries: Boundaries) -> None:
    for _ in range(PATIENCE + 10 * QUIET):
        boundaries.step()
    assert 10 <= boundaries._group.reductions - PATIENCE <= 11


def test_what_all_ranks_bring_is_in_force_one_step_later_and_found_soon_after_quiet_times(
    boundaries: Boundaries, rank: Trained
) -> None:
    for _ in range(2 * PATIENCE):
        boundaries.step()
    with Channel(rank.path) as runner:
        for version in range(1, 20):
            assert runner.stage(table_of(version)) is Prepared.PREPARED
            steps = 0
            while runner.status.base_version < version:
                boundaries.step()
                rank.call(4, 1 << 20)
                steps += 1
                assert steps <= (QUIET + 1 if version == 1 else 2)
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
        for _ in range(5 * QUIET):
            boundaries.step()
    assert boundaries._group.reductions == 1, "a group that has failed is asked no more"
    assert len(caplog.records) == 1


def test_a_rank_lost_while_a_table_is_agreed_on_ends_the_job(boundaries: Boundaries, rank: Trained) -> None:
    for _ in range(QUIET):
        boundaries.step()
    with Channel(rank.path) as runner:
        runner.stage(table_of(1))
        boundaries.step()
        assert runner.status.offered_version == 1
        boundaries._group.lost = True
        with pytest.raises(RuntimeError, match="not known"):
            boundaries.step()
        assert runner.status.base_version == 0
