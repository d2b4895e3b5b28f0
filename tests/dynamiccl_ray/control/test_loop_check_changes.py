"""A network that changes while a key is checked, or right after; and what counts then of what was measured before."""

from __future__ import annotations

import numpy as np
import pytest
from checked import alarmed, all_turns, drawn_far, far
from looped import Times, exploiting, pair, play, some_keys

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.control import check
from dynamiccl_ray.control.loop import Drift, Phase


@pytest.mark.parametrize("after", [3, 5, 7, 9, 12])
def test_a_network_that_changes_during_a_check_or_right_after_it_is_noticed(after: int) -> None:
    """So that what was in force is not taken for the best because it was until then, nor for what is usual."""
    loop = drawn_far()
    alarmed(loop, far(0.2))
    changed: Times = lambda row, action: 4.2 if action == pair(1) else far(0.2)(row, action)  # noqa: E731
    drifts: list[Drift] = []
    for turn in range(60):
        drifts += play(loop, 1, far(0.2) if turn < after else changed, sigma=0.01, seed=turn, rows=[0])
        if loop.shifts[0]:
            break
    assert [drift.anew for drift in drifts] == ([True] if after < 7 else [False, True])


def test_what_is_behind_in_some_turns_and_ahead_in_others_is_not_as_far_behind_as_it_was() -> None:
    loop, row, one = drawn_far(), np.array([0]), np.ones(1)
    loop._check(row)
    assert loop.checks.actions[0, :2].tolist() == [pair(1), OWN_ACTION]
    for behind in (0.5, 0.5, -0.4):  # 0.2 on the mean; it was 0.1
        for time in (3.0, 3.0 + behind):
            loop.checks.record(row, one, time * one, 0 * one, loop.evidence, 0.01 * one)
    assert loop.checks.takes_turns[0, 1] == check.TURNS


def test_a_check_begins_anew_once() -> None:
    loop, row = drawn_far(), np.array([0])
    loop._check(row)
    for again in (True, False):
        loop.checks.off[0, 0] = [3.0, 3.0, 3.0, 3.0, 4.0, 4.0]
        loop.checks.turns[0, 0] = check.TURNS
        assert loop.checks.moved(row, np.array([0.01])).tolist() == [again]
        assert loop.checks.turns[0, 0] == (0 if again else check.TURNS)


def test_what_moves_in_every_check_does_not_keep_a_key_there() -> None:
    loop, turns = drawn_far(), 0
    alarmed(loop, far(0.3))
    while loop.phase[0] == Phase.CHECK:
        play(loop, 1, far(0.4 * (turns // 6 % 2)), sigma=0.01, seed=turns, rows=[0])
        turns += 1
        assert turns < 60


def test_what_a_check_has_not_shown_to_be_slower_gives_way_soon_once_it_is() -> None:
    """A check saw it once, and did not see it for sure; hundreds of times from before the change say it is the best."""
    loop = exploiting(some_keys(2))
    first, other = pair(1), pair(2)
    alike: Times = lambda row, action: {first: 2.9, other: 2.93}.get(action, 3.0)  # noqa: E731
    for of in np.array([[first], [other]]):
        loop.evidence.samples[0, of] = loop.evidence.total[0, of] = 0
        known = np.array([alike(0, int(of[0]))])
        loop.evidence.record(np.array([0]), of, np.array([500.0]), known, np.array([0.05]))
    alarmed(loop, lambda row, action: alike(row, action) + 0.2)
    assert [drift.anew for drift in all_turns(loop, lambda row, action: alike(row, action) + 0.2)] == [False]
    first = int(loop.exploited()[0])
    ran = 0
    while loop.wanted[0] == first and ran < 400:
        play(
            loop,
            1,
            lambda row, action: alike(row, action) + 0.2 + 0.15 * (action == first),
            sigma=0.01,
            seed=ran,
            rows=[0],
        )
        ran += 1
    assert ran <= 3, "decisions"
    assert loop.shifts[0] == 0
