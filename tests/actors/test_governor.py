"""The budget of the plugin: what is measured of it, and what follows."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from made import comm_context, context
from pydantic import ValidationError

from dynamiccl_ray.actors.governor import LEAD, STRETCH_S, Governor, Meter
from dynamiccl_ray.config.overhead import Overhead
from dynamiccl_ray.plugin_bridge.layout import MOST_DUTY


def governor(percent: float = 0.5, **options: Any) -> Governor:
    return Governor(Overhead(max_percent=percent, **options))


def plugin(duty: int, *, full: float, decide: float = 0.0) -> float:
    """What it takes: getCollInfo always, the profiler by its duty."""
    return decide + full / 2**duty


def settled(governor: Governor, *, learning: bool, full: float, decide: float = 0.0, stretches: int = 40) -> int:
    for _ in range(stretches):
        governor.hear(plugin(governor.duty(learning=learning), full=full, decide=decide))
        governor.end_epoch(exploiting=not learning)
    return governor.duty(learning=learning)


@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("full", [0.004, 0.006, 0.03, 0.3])
def test_the_budget_holds_and_no_more_is_given_up_than_it_takes(learning: bool, full: float) -> None:
    duty = settled(governor(), learning=learning, full=full)
    assert plugin(duty, full=full) <= 0.005
    assert duty == 0 or plugin(duty - 1, full=full) > 0.4 * 0.005


def test_within_the_budget_everything_is_profiled() -> None:
    assert settled(governor(), learning=False, full=0.0049) == 0
    assert settled(governor(100), learning=False, full=0.9) == 0


def test_what_profiling_cannot_save_ends_at_the_least() -> None:
    assert settled(governor(), learning=False, full=0.01, decide=0.02) == MOST_DUTY


def test_who_only_exploits_gives_way_first() -> None:
    of = governor()
    of.hear(0.012)
    of.end_epoch(exploiting=True)
    assert (of.duty(learning=False), of.duty(learning=True)) == (2, 0)
    of.hear(0.5)
    of.end_epoch(exploiting=True)
    assert of.duty(learning=False) == MOST_DUTY
    assert of.duty(learning=True) == 2 + 7 - LEAD


def test_where_nobody_exploits_learning_gives_way_at_once() -> None:
    of = governor()
    of.hear(0.012)
    of.end_epoch(exploiting=False)
    assert of.duty(learning=True) == 2


def test_it_comes_back_when_the_job_has_time() -> None:
    of = governor()
    assert settled(of, learning=False, full=0.1) > 3
    assert settled(of, learning=False, full=0.001) == 0


def test_the_largest_of_an_epoch_counts_and_nothing_is_heard_twice() -> None:
    of = governor()
    for share in (math.nan, 0.001, 0.02, math.nan, 0.004):
        of.hear(share)
    of.end_epoch(exploiting=True)
    assert of.share == 0.02
    duty = of.duty(learning=False)
    for _ in range(10):
        of.end_epoch(exploiting=True)
    assert of.duty(learning=False) == duty == 2


def test_a_fixed_duty_is_fixed() -> None:
    of = governor(profile_one_in=8)
    of.hear(0.5)
    of.end_epoch(exploiting=True)
    assert of.duty(learning=True) == of.duty(learning=False) == 3
    for bad in (0, 3, 512):
        with pytest.raises(ValidationError):
            Overhead(profile_one_in=bad)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeRank:
    """A rank of communicator ``comm`` in process ``pid``."""

    def __init__(self, comm: int, pid: int) -> None:
        self.comm, self.pid, self.own_ns, self.stepped_s = comm, pid, 0, 0.0
        self.duty, self.noted = -1, -1.0

    @property
    def channel(self) -> Any:
        return SimpleNamespace(
            status=SimpleNamespace(own_ns=self.own_ns),
            govern=lambda duty: setattr(self, "duty", duty),
            note_overhead=lambda share: setattr(self, "noted", share),
        )


def measured(ranks: list[Any], meter: Meter, clock: Clock) -> float:
    clock.now += STRETCH_S
    meter.look(ranks)
    return meter.take()


def test_the_communicators_of_a_process_are_one_and_the_worst_process_counts() -> None:
    clock = Clock()
    ranks: list[Any] = [FakeRank(1, 10), FakeRank(2, 10), FakeRank(1, 11)]
    meter = Meter(clock)
    assert math.isnan(measured(ranks, meter, clock)), "nothing to compare with"
    for rank, ns in zip(ranks, (2e6, 4e6, 1e6), strict=True):
        rank.own_ns += ns
    assert measured(ranks, meter, clock) == pytest.approx(0.006 / STRETCH_S)
    assert math.isnan(meter.take())
    assert [rank.noted for rank in ranks] == pytest.approx([0.006 / STRETCH_S] * 2 + [0.001 / STRETCH_S])
    assert math.isnan(measured(ranks, meter, clock)), "an idle job says nothing"


def test_steps_are_what_it_is_compared_with_where_they_are_reported() -> None:
    """A job that waits for data half of its time is not slowed down less for that."""
    clock = Clock()
    ranks: list[Any] = [FakeRank(1, 10)]
    meter = Meter(clock)
    measured(ranks, meter, clock)
    ranks[0].own_ns += 1e6
    ranks[0].stepped_s += STRETCH_S / 2
    assert measured(ranks, meter, clock) == pytest.approx(0.002 / STRETCH_S)
    ranks[0].own_ns += 1e6
    ranks[0].stepped_s += 100.0  # steps that were not seen before
    assert measured(ranks, meter, clock) == pytest.approx(0.001 / STRETCH_S)


def test_a_new_duty_begins_a_stretch_anew() -> None:
    clock = Clock()
    ranks: list[Any] = [FakeRank(1, 10), FakeRank(2, 10), FakeRank(3, 10)]
    meter = Meter(clock)
    measured(ranks, meter, clock)
    meter.follow(context(comm_context(1, keys=[0], duty=3), comm_context(2, keys=[0])), ranks)
    assert [rank.duty for rank in ranks] == [3, 0, 0]
    ranks[0].own_ns += 1e6
    clock.now += STRETCH_S / 2
    meter.follow(context(comm_context(1, keys=[0], duty=4)), ranks)
    assert math.isnan(measured(ranks, meter, clock))
    ranks[0].own_ns += 1e6
    meter.follow(context(comm_context(1, keys=[0], duty=4)), ranks)
    assert measured(ranks, meter, clock) == pytest.approx(0.001 / STRETCH_S)
    meter.leave(ranks)
    assert {rank.duty for rank in ranks} == {MOST_DUTY}
