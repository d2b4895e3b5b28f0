"""A rank as its runner knows it: how fast it calls, and what is still to come."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dynamiccl_ray.actors.ranks import Rank
from dynamiccl_ray.plugin_bridge.channel import JobReport
from dynamiccl_ray.plugin_bridge.layout import RING_RECORDS


@dataclass
class Played:
    """A segment and a clock. ``stall_s`` is how long the runner is held up while it looks at the segment."""

    hz: float = 1000.0
    now: float = 100.0
    stall_s: float = 0.0
    before: int = 0
    """Calls before the clock began."""
    records: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: {"full": 0, "timer": 0})
    unprofiled: int = 0
    backlog: int = 0
    job: JobReport | None = None

    @property
    def status(self) -> Any:
        self.now += self.stall_s
        calls = self.before + round((self.now - 100.0) * self.hz)
        return SimpleNamespace(
            dseq=calls,
            records=self.records,
            dropped=self.dropped,
            unprofiled=self.unprofiled,
            backlog=self.backlog,
        )

    def beat(self) -> None:
        pass

    def drain(self, into: Any) -> Any:
        return into[:0]


@pytest.fixture
def its(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr("dynamiccl_ray.actors.ranks.time.monotonic", lambda: played.now)
    return played


def rank_of(its: Any) -> Rank:
    return Rank(its, 7, 0)


# ---- how fast it calls ----


def test_the_rate_is_what_came_between_two_looks(its: Played) -> None:
    rank = rank_of(its)
    for after in (0.1, 0.2):
        its.now += after
        rank.look()
    assert rank.rate_hz == pytest.approx(1000)
    its.hz, its.now = 0.0, its.now + 0.01
    rank.look()
    assert rank.rate_hz == pytest.approx(1000), "a burst is no rate"


def test_one_look_is_no_rate_whatever_was_called_before(its: Played) -> None:
    its.before = 158_000
    rank = rank_of(its)
    its.now += 10.0
    rank.look()
    assert rank.rate_hz == 0
    its.now += 0.1
    rank.look()
    assert rank.rate_hz == pytest.approx(1000)


def test_a_runner_that_is_held_up_while_it_looks_sees_no_more_calls_than_there_are(its: Played) -> None:
    rank = rank_of(its)
    rank.look()
    for stall_s in (3.0, 0.0, 5.0, 0.0):
        its.now += 0.06
        its.stall_s = stall_s
        rank.look()
        assert 0 < rank.rate_hz <= 1001


# ---- how seldom it may be looked at ----


def test_a_rank_of_which_nothing_is_known_may_go_unseen(its: Played) -> None:
    assert rank_of(its).unseen_s == np.inf


def test_a_ring_is_drained_long_before_it_is_full(its: Played) -> None:
    its.hz = 500_000.0
    rank = rank_of(its)
    for _ in range(2):
        its.now += 0.1
        rank.look()
    assert 0 < rank.unseen_s * its.hz < RING_RECORDS / 2


def test_no_step_of_a_job_that_says_how_its_steps_go_is_missed(its: Played) -> None:
    rank = rank_of(its)
    for step, took_s in enumerate((0.3, 0.08), start=1):
        its.job = JobReport(reports=step, step=step, iteration_s=took_s, loss=1.0, faults=0)
        rank.drain(applied_since=0)
        assert rank.unseen_s < took_s


# ---- what is still to come ----


def test_a_rank_stands_still_once_every_call_is_accounted_for(its: Played) -> None:
    its.hz, its.before = 0.0, 10
    rank = rank_of(its)
    its.records = 8
    assert not rank.standing_still
    its.dropped["timer"] = 2
    assert rank.standing_still
    its.backlog = 1
    assert not rank.standing_still, "measured, and not drained yet"
    its.backlog, its.before = 0, 13
    assert not rank.standing_still
    its.unprofiled = 3
    assert rank.standing_still, "nobody measures those"


def test_what_was_given_up_is_waited_for_no_more_and_what_comes_later_is(its: Played) -> None:
    its.hz, its.before, its.records = 0.0, 10, 7
    rank = rank_of(its)
    rank.give_up()
    assert rank.standing_still
    its.before = 12
    assert not rank.standing_still, "two more calls"
    its.records = 9
    assert rank.standing_still
    its.records = 12
    assert rank.standing_still, "one of those that were given up came after all"
    rank.give_up()
    its.before = 13
    assert not rank.standing_still, "nothing is given up any more"
