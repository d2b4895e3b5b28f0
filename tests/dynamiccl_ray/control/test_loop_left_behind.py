"""NCCL's own choice has become faster, and nothing that a key has measured since says so."""

from __future__ import annotations

import numpy as np
import pytest
from looped import MIB, Times, loop_of, own_channels, pair, play

from dynamiccl_ray.actions import OWN_ACTION, flat_action
from dynamiccl_ray.control.loop import Loop, Phase


def _times(own: float, here: float = 2.9) -> Times:
    """What the change does: NCCL's own choice takes ``own`` for keys 0 and 1, and pair 1 more for key 1, ``here`` for
    key 0. The others have another collective, and nothing changes for them."""

    def of(row: int, action: int) -> float:
        if action == OWN_ACTION:
            return own if row < 2 else 3.0
        return (here, 3.4)[row] if row < 2 else 2.9

    return of


def _exploiting(before: float = 3.0, octaves: int = 1, trigger: float = 1e6) -> Loop:
    """Eight keys; key 1 lies so many octaves above key 0. All exploit pair 1."""
    keys = own_channels(8)
    keys.nbytes[:] = MIB
    keys.nbytes[1] <<= octaves
    keys.collective[2:] = 2
    loop = loop_of(keys, trigger=trigger)
    times: Times = lambda row, action: (before if row < 2 else 3.0) if action == OWN_ACTION else 2.9  # noqa: E731
    play(loop, 32, times, drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert (loop.phase == Phase.EXPLOIT).all()
    assert (loop.wanted == pair(1)).all()
    return loop


def _checked(loop: Loop, times: Times, rounds: int = 12) -> bool:
    """Whether key 0 is checked once key 1 has begun anew."""
    for _ in range(rounds):
        play(loop, 1, times, drawn=lambda due: np.full(due.draw.sum(), pair(1)))
        if loop.phase[0] == Phase.CHECK:
            assert loop.shifts.tolist() == [0, 1, *[0] * 6]
            return True
    assert loop.shifts.tolist() == [0, 1, *[0] * 6], "key 1 alone notices"
    return False


def test_a_key_is_checked_where_one_that_is_near_says_that_nccls_own_choice_is_ahead_now() -> None:
    loop = _exploiting()
    assert _checked(loop, _times(2.3))
    assert loop.checks.actions[0, :2].tolist() == [pair(1), OWN_ACTION]
    play(loop, 60, _times(2.3), drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert (loop.phase[0], loop.wanted[0]) == (Phase.EXPLOIT, OWN_ACTION)


def test_nccls_own_choice_is_checked_however_slow_it_was() -> None:
    loop = _exploiting(before=4.0)
    # Something else is near enough to contend.
    loop.evidence.samples[0, pair(2)], loop.evidence.total[0, pair(2)] = 4, 4 * 2.95
    assert _checked(loop, _times(2.3))
    assert loop.checks.actions[0, :3].tolist() == [pair(1), OWN_ACTION, pair(2)]


@pytest.mark.parametrize(
    ("own", "octaves"),
    # Not so much faster that it says anything of others; and too far away.
    [(2.72, 1), (2.3, 3)],
)
def test_nothing_is_checked_for_what_says_little_of_others(own: float, octaves: int) -> None:
    assert not _checked(_exploiting(octaves=octaves), _times(own))


@pytest.mark.parametrize(("ahead", "checked"), [(0.05, True), (0.01, False)])
def test_it_has_to_be_ahead_of_what_is_in_force(ahead: float, checked: bool) -> None:
    # As much faster as for key 1.
    assert _checked(_exploiting(before=3.5), _times(2.9 - ahead)) == checked


def test_where_what_is_in_force_has_moved_too_its_own_detector_says_so() -> None:
    loop = _exploiting()
    moves = _times(2.3, 2.8)
    assert not _checked(loop, moves, 3)


def test_what_was_told_or_has_found_out_lately_is_told_nothing() -> None:
    loop = _exploiting()
    loop._told_at[0] = loop.measured[0]
    assert not _checked(loop, _times(2.3))


def test_what_begins_anew_forgets_what_it_was_told() -> None:
    loop = _exploiting()
    loop._own_near[0] = 2.0
    loop.shift(np.array([0]))
    assert np.isnan(loop._own_near[0])


@pytest.mark.parametrize("trigger", [1e6, 1e50])
def test_what_a_faster_network_puts_far_ahead_while_a_key_compares_is_not_in_force_for_that(trigger: float) -> None:
    """NCCL's own choice, and what was drawn, have become faster after the last draw, and look hopeless from then on."""
    keys = own_channels(1)
    keys.channels[0, 1, 3] = True
    loop, (drawn, found) = loop_of(keys, trigger=trigger, compares=12), (pair(1), int(flat_action(1, 3, 0)))
    took = {OWN_ACTION: 3.0, drawn: 2.9, found: 3.1}
    for i in range(40):
        by = -1.0 * (i > 3)
        times: Times = lambda row, action, by=by: took.get(action, 3.2) + by  # noqa: E731
        play(loop, 1, times, sigma=0.01, seed=i, drawn=lambda due: np.full(due.draw.sum(), drawn))
    assert loop.phase[0] == Phase.EXPLOIT
    assert loop.evidence.tried[0, found]
    assert loop.wanted[0] == (drawn if trigger < 1e50 else found), "without a trigger nothing is checked"


def test_a_key_whose_choice_stands_tells_what_it_has_measured_of_nccls_own_choice() -> None:
    """All that it has compared has become faster alike."""
    loop = _exploiting()
    of: Times = lambda row, action: 2.3 - 0.1 * (action != OWN_ACTION) if row == 1 else 2.9  # noqa: E731
    loop._check(np.array([1]))
    drifts = play(loop, 20, of, rows=[1])
    assert [(drift.row, drift.anew) for drift in drifts] == [(1, False)]
    assert loop._own_near[0] == pytest.approx(2.3, abs=0.05)
    assert loop._told_at[1] > loop._told_at[0]
    play(loop, 1, of, rows=[0])
    assert loop.phase[0] == Phase.CHECK
    assert loop._told_at[0] == loop.measured[0]


def test_a_check_in_which_nccls_own_choice_was_hopeless_says_nothing_of_it() -> None:
    loop = _exploiting(before=4.0)
    for row in (0, 1):
        loop.evidence.samples[row, pair(2)], loop.evidence.total[row, pair(2)] = 4, 4 * 2.95
    loop._check(np.array([1]))
    assert OWN_ACTION not in loop.checks.actions[1]
    drifts = play(
        loop, 20, lambda _, action: 4.0 if action == OWN_ACTION else 2.5 + 0.05 * (action == pair(2)), rows=[1]
    )
    assert [drift.anew for drift in drifts[:1]] == [False]
    assert np.isnan(loop._own_near[0])


def _told(loop: Loop, by: float = 0.5) -> float:
    """What key 0 is told that NCCL's own choice takes where that is faster by so much for key 1; NaN for nothing."""
    before = loop.evidence.baseline.copy()
    before[1] += by
    loop._tell_near(np.array([1]), before)
    return float(loop._own_near[0])


def test_what_is_told_is_the_most_that_any_neighbour_says_until_the_next_decision_is_over() -> None:
    loop = _exploiting()
    for by, most in ((0.4, 0.4), (0.6, 0.6), (0.5, 0.6)):
        assert _told(loop, by) == pytest.approx(3.0 - most, abs=0.01)
    # What is in force is slower by a tenth: that is for its own detector.
    play(loop, 1, _times(3.0, 3.0), rows=[0])
    assert loop.phase[0] == Phase.EXPLOIT
    assert np.isnan(loop._own_near[0])
    assert np.isnan(_told(loop, 0.29))


@pytest.mark.parametrize("trigger", [1e6, 1e50])
def test_without_a_trigger_nothing_is_checked(trigger: float) -> None:
    loop = _exploiting(trigger=trigger)
    assert _told(loop) == pytest.approx(2.5)
    play(loop, 1, _times(2.5), rows=[0])
    assert (loop.phase[0] == Phase.CHECK) == (trigger < 1e50)


@pytest.mark.parametrize("phase", [Phase.BASELINE, Phase.LEARN, Phase.ADAPT, Phase.CHECK])
def test_only_keys_that_exploit_are_told(phase: Phase) -> None:
    loop = _exploiting()
    loop.phase[0] = phase
    assert np.isnan(_told(loop))


def test_a_key_that_exploits_nccls_own_choice_or_was_told_earlier_that_it_is_hopeless_is_told_nothing() -> None:
    loop = _exploiting()
    loop.wanted[0] = OWN_ACTION
    assert np.isnan(_told(loop))
    loop = _exploiting()
    loop.keys.lead[0] = 1.0
    assert loop.hopeless_earlier[0]
    assert np.isnan(_told(loop))


def test_what_a_key_was_told_stays_with_it_where_others_are_forgotten() -> None:
    loop = _exploiting()
    loop._own_near[4] = 2.0
    loop.keep(np.arange(8) != 1)
    assert np.isnan(loop._own_near).tolist() == [True, True, True, False, True, True, True]
