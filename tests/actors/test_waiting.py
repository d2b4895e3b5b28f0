"""An epoch ends when what it waits for has been measured, and does not wait for what is rare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from made import comm_context, context
from test_reduction import collectives

from dynamiccl_ray.actors.messages import COLLECTIVE_DTYPE
from dynamiccl_ray.actors.waiting import GRACE, Waiting


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def waiting(need: dict[int, list[int]], clock: Clock, **changes: Any) -> Waiting:
    comms = [comm_context(comm, keys=list(range(len(of))), need=of) for comm, of in need.items()]
    versions = changes.pop("versions", dict.fromkeys(need, 3))
    return Waiting(context(*comms), versions, changes.pop("served", set(need)), clock, **changes)


def measured(key: int, n: int, version: int = 3) -> Any:
    return collectives(list(range(n)), key=key, version=version)


def test_all_keys_have_what_they_need(clock: Clock) -> None:
    it = waiting({1: [2, 8], 2: [2]}, clock)
    assert not it.idle
    for comm, key, n in ((1, 0, 2), (1, 1, 8), (2, 0, 2)):
        clock.now = 20.0
        assert not it.done()
        it.count(comm, measured(key, n))
    assert it.done()


def test_records_of_another_table_do_not_count(clock: Clock) -> None:
    it = waiting({1: [2]}, clock)
    it.count(1, measured(0, 5, version=2))
    assert not it.done()
    it.count(1, measured(0, 2, version=3))
    assert it.done()


def test_a_rare_key_holds_the_others_up_for_as_long_again_and_no_longer(clock: Clock) -> None:
    it = waiting({1: [2, 2, 2, 2]}, clock)
    it.count(1, measured(0, 2))
    clock.now = 12.0
    it.count(1, measured(1, 2))
    assert not it.done(), "half of them have come, after 2 s"
    clock.now = 13.9
    assert not it.done()
    clock.now = 14.0
    assert it.done()


@pytest.mark.parametrize("keys", [1, 40])
def test_a_communicator_that_is_idle_holds_nobody_up(clock: Clock, keys: int) -> None:
    it = waiting({1: [2, 2], 2: [2] * keys}, clock)
    clock.now = 11.0
    it.count(1, np.concatenate([measured(0, 2), measured(1, 2)]))
    assert not it.done()
    clock.now = 12.0
    assert it.done()


def test_silence_is_not_waited_for(clock: Clock) -> None:
    it = waiting({1: [3, 2]}, clock, patience=1.0)
    for clock.now in (10.9, 11.8):
        it.count(1, measured(0, 1))
        assert not it.done()
    clock.now = 12.7
    it.count(1, measured(7, 1))
    assert not it.done()
    clock.now = 12.8
    assert it.done(), "what came last was not waited for"


def test_when_another_runner_is_done_what_is_almost_there_is_waited_for(clock: Clock) -> None:
    it = waiting({1: [2]}, clock)
    clock.now = 10.1
    it.close()
    assert not it.done()
    clock.now = 10.2
    assert it.done(), "as much time again"
    it = waiting({1: [2]}, clock)
    clock.now = 15.0
    it.close()
    clock.now = 15.0 + GRACE
    it.close()
    assert it.done(), "and no more"


def test_who_waits_for_nothing_is_done_when_the_others_are(clock: Clock) -> None:
    it = waiting({1: [2]}, clock, served={2})
    clock.now = 100.0
    assert not it.idle, "some runner waits"
    assert not it.done()
    it.close()
    assert it.done()


def test_nothing_is_waited_for_that_is_served_elsewhere_or_needs_nothing(clock: Clock) -> None:
    assert waiting({1: [0, 0]}, clock).idle
    it = waiting({1: [2], 2: [2]}, clock, served={1})
    it.count(2, np.zeros(0, COLLECTIVE_DTYPE))
    it.count(1, measured(0, 2))
    assert it.done()
    assert not waiting({1: [0]}, clock).done(), "how long it takes is for whoever waits to say"


def test_a_key_that_nobody_knows_ends_an_epoch_that_waits_for_nothing(clock: Clock) -> None:
    it = waiting({1: [0, 0]}, clock)
    clock.now = 12.0
    it.count(1, measured(0, 5))
    clock.now = 14.0
    assert not it.done(), "a key that is known is no news"
    it.count(1, measured(7, 1))
    clock.now = 17.9
    assert not it.done(), "the others may be on their way"
    clock.now = 18.0
    it.count(1, measured(8, 1))
    assert it.done()

    it = waiting({1: [2]}, clock)
    it.count(1, measured(7, 1))
    clock.now = 100.0
    assert not it.done(), "a new key ends nothing that others wait for"


def test_a_communicator_that_nobody_knows_ends_one_such_epoch(clock: Clock) -> None:
    """If some of its ranks are served nowhere, nobody ever knows of it."""
    heard: set[int] = set()
    for ends in (True, False):
        it = waiting({}, clock, heard=heard)
        clock.now += 1.0
        it.count(1, measured(0, 1))
        clock.now += 1.0
        assert it.done() == ends
    assert heard == {1}
