"""What the best of a key says to one that is near it in size."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from looped import Times, loop_of, pair, play, some_keys

from dynamiccl_ray.actions import OWN_ACTION, flat_action
from dynamiccl_ray.control import check
from dynamiccl_ray.control.loop import Loop, Phase

FOUND = int(flat_action(1, 3, 0))


def _times(here: float) -> Times:
    """Key 1 is a tenth faster than NCCL's own choice with pair 1, and a third with what it finds; key 0 takes ``here``
    with that."""
    there = {OWN_ACTION: 3.0, pair(1): 2.9, FOUND: 2.6}
    return lambda row, action: here if row == 0 and action == FOUND else there.get(action, 3.2)


def _beside(here: float, cost_us: float = 0.0, trigger: float = 1e6) -> Loop:
    """Key 0 exploits pair 1, and its neighbour has found something since. Exploring has cost so much until then."""
    loop = loop_of(some_keys(2), trigger=trigger, explore={"max_regret": 0.5})
    play(loop, 12, _times(here), rows=[0], drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert (loop.phase[0], loop.wanted[0]) == (Phase.EXPLOIT, pair(1))
    play(loop, 8, _times(here), rows=[1], drawn=lambda due: np.full(due.draw.sum(), FOUND))
    one, of = np.ones(1), np.zeros(1, np.int64)
    loop.budget.spend(of, one, one, cost_us * one, np.full(1, 2.0))
    play(loop, 1, _times(here), rows=[0])
    return loop


@pytest.mark.parametrize("here", [2.6, 3.2])
def test_a_key_that_exploits_takes_what_a_neighbour_has_found_since_if_it_is_good_here_too(here: float) -> None:
    loop = _beside(here)
    assert (loop.wanted[0], loop.need[0]) == (FOUND, loop.control.learning.draw_samples)
    assert loop.exploited()[0] == pair(1), "what is kept or exported meanwhile is what is known to be good"
    # What is checked meanwhile is what is the best, of what was measured.
    other = copy.deepcopy(loop)
    other._check(np.array([0]))
    assert other.checks.actions[0, 0] == pair(1)
    play(loop, 1, _times(here), rows=[0])
    if here < 2.9:
        assert loop.phase[0] == Phase.CHECK, "what is ahead is proved in turns"
        assert loop.checks.actions[0, :2].tolist() == [FOUND, OWN_ACTION]
        play(loop, 2 * check.TURNS, _times(here), rows=[0])
    for _ in range(4):
        assert (loop.phase[0], loop.wanted[0]) == (Phase.EXPLOIT, FOUND if here < 2.9 else pair(1))
        play(loop, 1, _times(here), rows=[0])


@pytest.mark.parametrize("trigger", [1e6, 1e50])
def test_what_is_found_once_the_network_has_become_faster_does_not_stay_in_force_for_that(trigger: float) -> None:
    """It is ahead of all that is known, and behind all of it as it is now."""
    loop = _beside(2.85, trigger=trigger)
    faster: Times = lambda row, action: _times(2.85)(row, action) - 0.4 * (action != FOUND)  # noqa: E731
    play(loop, 60, faster, rows=[0], drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert loop.phase[0] == Phase.EXPLOIT
    assert loop.wanted[0] == (pair(1) if trigger < 1e50 else FOUND), "without a trigger nothing is checked"


def test_what_a_neighbour_has_found_is_tried_out_of_what_exploring_may_cost() -> None:
    loop = _beside(3.2)
    spent = loop.budget.cost_us
    play(loop, 1, _times(3.2), rows=[0])
    assert loop.budget.cost_us - spent == pytest.approx(2 * (np.exp(3.2) - np.exp(2.9)))
    assert _beside(3.2, cost_us=1e6).wanted[0] == pair(1), "nothing may be explored for now"


@pytest.mark.parametrize(
    ("ahead", "octaves", "rounds", "may", "tries"),
    [
        (0.4, 1, 6, True, True),
        (0.15, 1, 6, True, False),
        (0.18, 0, 6, True, True),
        (0.13, 0, 6, True, False),
        (0.18, 1, 6, True, False),
        (0.4, 2, 6, True, True),
        (0.25, 1, 6, True, True),
        (0.25, 2, 6, True, False),
        (0.6, 3, 6, True, False),
        (0.4, 1, 2, True, False),
        (0.4, 1, 6, False, False),
    ],
)
def test_what_is_the_best_of_a_key_that_is_near_is_compared_once_where_it_is_far_ahead(
    ahead: float, octaves: int, rounds: int, may: bool, tries: bool
) -> None:
    """Key 0 has drawn a pair with NCCL's own channels; its neighbour has found out in so many ``rounds`` how many it
    takes. Here that is slow."""
    keys = some_keys(2)
    keys.nbytes[1] = keys.nbytes[0] << octaves
    # A model speaks of something else, so that nobody is idle enough to look for channels.
    keys.prior[:, 2, 0] = 0.5
    keys.channels[0, 1, 3] = may
    loop, found = loop_of(keys, draws=4, compares=20), int(flat_action(1, 3, 0))
    there = {OWN_ACTION: 3.0, pair(1): 2.9, found: 3.0 - ahead}
    times = lambda row, action: 3.2 if row == 0 and action == found else there.get(action, 3.2)  # noqa: E731
    play(loop, 6, times, rows=[0], drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    play(loop, rounds, times, rows=[1], drawn=lambda due: np.full(due.draw.sum(), found))
    asked = []
    for _ in range(8):
        asked.append(int(loop.wanted[0]))
        play(loop, 1, times, rows=[0])
    assert asked.count(found) == tries


def test_what_is_further_ahead_for_one_neighbour_than_for_another_is_compared_first() -> None:
    keys = some_keys(3)
    keys.nbytes[:] = keys.nbytes[0]
    keys.prior[:, 2, 0] = 0.5
    loop, (less, more) = loop_of(keys, draws=4, compares=20), (int(flat_action(1, c, 0)) for c in (2, 3))
    times = lambda _, action: {OWN_ACTION: 3.0, pair(1): 2.9, less: 2.7, more: 2.5}.get(action, 3.2)  # noqa: E731
    # Key 2 has drawn all, and compares nothing yet.
    for row, drawn, rounds in ((0, pair(1), 6), (1, more, 6), (2, less, 5)):
        play(loop, rounds, times, rows=[row], drawn=lambda due, a=drawn: np.full(due.draw.sum(), a))
    assert loop._found.tolist() == [pair(1), more, less]
    asked = []
    for _ in range(4):
        asked.append(int(loop.wanted[0]))
        play(loop, 1, times, rows=[0])
    assert next(action for action in asked if action in (less, more)) == more
