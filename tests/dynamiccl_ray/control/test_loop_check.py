"""After an alarm, before anything is learned anew: does the choice still stand?"""

from __future__ import annotations

import numpy as np
import pytest
from checked import FADED, alarmed, all_turns, drawn_far, far
from looped import (
    DRAWS,
    Times,
    exploiting,
    loop_of,
    network,
    own_channels,
    pair,
    play,
    some_keys,
    through_a_file,
)
from scipy.signal import lfilter

from dynamiccl_ray.actions import OWN_ACTION, flat_action
from dynamiccl_ray.control import check
from dynamiccl_ray.control.loop import Drift, Loop, Measured, Phase
from dynamiccl_ray.knobs import OWN_PAIR


def _slower(by: float) -> Times:
    return lambda row, action: network()(row, action) + by


def test_a_key_that_is_checked_still_has_what_it_exploited() -> None:
    loop = exploiting(some_keys(3), rows=[0, 1])
    assert loop.exploited().tolist() == [pair(1), pair(1), -1]
    alarmed(loop, _slower(0.2))
    play(loop, 1, _slower(0.2), sigma=0.01, rows=[0])
    assert loop.wanted[0] == OWN_ACTION, "the check is at another action"
    assert loop.exploited().tolist() == [pair(1), pair(1), -1]
    loop.shift(np.array([0]))
    assert loop.exploited().tolist() == [-1, pair(1), -1]
    assert loop.settled[0] == pair(1)
    # One that is checked before it has compared has exploited nothing.
    loop = loop_of(some_keys(1))
    play(loop, 2, network(), drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    loop._check(np.array([0]))
    assert loop.exploited().tolist() == [-1]


@pytest.mark.parametrize("by", [0.2, -0.2])
def test_where_all_actions_take_longer_alike_the_choice_stands_and_nothing_is_learned(by: float) -> None:
    loop = exploiting(own_channels(2))
    ratio = loop.evidence.ratio(np.array([0]))
    alarmed(loop, _slower(by))
    (drift,) = all_turns(loop, _slower(by))
    assert (drift.row, drift.anew, drift.sample) == (0, False, -1)
    assert (loop.phase[0], loop.wanted[0], loop.shifts[0]) == (Phase.EXPLOIT, pair(1), 0)
    # All that was measured has moved with the network.
    assert loop.evidence.baseline[0] == pytest.approx(3.0 + by, abs=0.05)
    assert loop.evidence.ratio(np.array([0])) == pytest.approx(ratio, abs=0.04)
    assert play(loop, 50, _slower(by), sigma=0.01, rows=[0]) == [], "that is how things are now"
    assert loop.cusum.score[1] == exploiting(own_channels(2)).cusum.score[1]


def test_what_has_drawn_all_it_draws_is_checked_as_well_and_exploits_if_its_choice_stands() -> None:
    loop = loop_of(own_channels(2), compares=200)
    play(loop, 1 + DRAWS + 10, network(), sigma=0.01, drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert loop.phase[0] == Phase.LEARN
    alarmed(loop, _slower(0.15), 60)
    assert loop.shifts[0] == 0
    (drift,) = all_turns(loop, _slower(0.15))
    assert not drift.anew
    assert loop.checks.calm_until[0] > loop.measured[0], "there was an alarm"
    assert (loop.phase[0], loop.wanted[0], loop.shifts[0]) == (Phase.EXPLOIT, pair(1), 0)


def test_where_another_action_is_ahead_now_the_key_learns_anew_and_knows_what_was_checked() -> None:
    loop = exploiting(some_keys(2))
    crossed: Times = lambda row, action: 3.1 if action == pair(1) else 3.0  # noqa: E731
    alarmed(loop, crossed)
    (drift,) = all_turns(loop, crossed)
    assert drift.anew
    assert (loop.phase[0], loop.shifts[0], loop.wanted[0]) == (Phase.ADAPT, 1, OWN_ACTION)
    assert loop.evidence.baseline[0] == pytest.approx(3.0, abs=0.01)
    measured = loop.evidence.samples[0]
    assert measured[OWN_ACTION] == measured[pair(1)] == check.TURNS
    play(loop, 30, crossed, sigma=0.01, rows=[0], drawn=lambda due: np.full(due.draw.sum(), pair(2)))
    assert loop.phase[0] == Phase.EXPLOIT
    assert loop.wanted[0] != pair(1)


def test_what_a_check_measured_is_of_the_network_as_it_is_also_where_all_of_it_is_slower() -> None:
    loop = exploiting(some_keys(2))
    crossed: Times = lambda row, action: 3.2 if action == pair(1) else 3.1  # noqa: E731
    alarmed(loop, crossed)
    assert [drift.anew for drift in all_turns(loop, crossed)] == [True]
    assert loop.evidence.ratio(np.array([0]))[0, 1, 0] == pytest.approx(0.1, abs=0.01)


def _hopeless(by: float = 0.0) -> Times:
    """NCCL's own choice takes three times as long as pair 1, and both ``by`` longer; pair 2 is next."""
    return lambda row, action: {OWN_ACTION: 4.0 + by, pair(1): 2.9 + by, pair(2): 3.0}.get(action, 3.6)


def test_nccls_own_choice_is_not_measured_again_and_again_where_it_is_hopeless() -> None:
    loop, asked = loop_of(some_keys(2), draws=8, draw_samples=1), []
    drawn = lambda due: np.full(due.draw.sum(), pair(1 + len(asked) % 2))  # noqa: E731
    for _ in range(20):
        asked.append(int(loop.wanted[0]))
        play(loop, 1, _hopeless(), sigma=0.01, seed=len(asked), rows=[0], drawn=drawn)
    assert asked.count(OWN_ACTION) == 2, "the baseline, and the last draw"
    assert (loop.phase[0], loop.wanted[0]) == (Phase.EXPLOIT, pair(1))
    # Pair 2 is ahead now.
    alarmed(loop, _hopeless(0.25))
    checked = loop.checks.actions[0].tolist()
    assert (checked[:2], OWN_ACTION in checked) == ([pair(1), pair(2)], False)
    assert [drift.anew for drift in all_turns(loop, _hopeless(0.25))] == [True]
    assert (loop.phase[0], loop.wanted[0], loop.need[0]) == (Phase.BASELINE, OWN_ACTION, 1)
    play(loop, 1, _hopeless(0.25), rows=[0], drawn=drawn)
    assert (loop.phase[0], loop.evidence.baseline[0]) == (Phase.ADAPT, 4.25)
    # Where it is not, it takes four samples.
    loop.shift(np.array([1]))
    assert loop.need[1] == 4


@pytest.mark.parametrize(
    ("by", "own", "looks", "anew"),
    [
        (-0.08, 2.6, True, True),
        (0.25, 2.6, True, True),
        (-0.08, 4.0, True, False),
        (0.1, 2.6, False, False),
        (-0.015, 2.6, False, False),
    ],
)
def test_where_what_is_in_force_has_moved_nccls_own_choice_is_looked_at_however_hopeless_it_was(
    by: float, own: float, looks: bool, anew: bool
) -> None:
    """A fault may have ended that what is in force has hardly felt."""
    loop = loop_of(some_keys(2), draws=8, draw_samples=1)
    for seed in range(20):
        drawn = lambda due, of=1 + seed % 2: np.full(due.draw.sum(), pair(of))  # noqa: E731
        play(loop, 1, _hopeless(), sigma=0.01, seed=seed, rows=[0], drawn=drawn)
    loop._check(np.array([0]))
    after: Times = lambda row, action: own if action == OWN_ACTION else {pair(1): 2.9, pair(2): 3.0}[action] + by  # noqa: E731
    assert [drift.anew for drift in all_turns(loop, after)] == [anew]
    assert (OWN_ACTION in loop.checks.actions[0].tolist()) == looks


@pytest.mark.parametrize("by", [0.3, -0.3])
def test_a_pair_that_was_too_far_behind_to_contend_is_looked_at_once(by: float) -> None:
    loop = drawn_far()
    before = loop.evidence.samples[0].copy()
    loop._check(np.array([0]))
    assert pair(2) not in loop.checks.actions[0, :5].tolist()
    assert [drift.anew for drift in all_turns(loop, far(by))] == [False]
    assert loop.checks.actions[0, 5:].tolist() == [pair(2), -1, -1]
    assert loop.evidence.samples[0, pair(2)] - before[pair(2)] == 1
    assert loop.evidence.mean(np.array([0]), np.array([pair(2)]))[0] == pytest.approx(3.25 + by, abs=0.03)


def test_where_what_was_too_far_behind_to_contend_is_the_best_now_the_key_learns_anew() -> None:
    loop = drawn_far()
    # All that contended takes a third longer, and stands to each other as before.
    alarmed(loop, far(0.3))
    assert [drift.anew for drift in all_turns(loop, far(0.3, ahead=0.2))] == [True]
    assert (loop.phase[0], loop.shifts[0]) == (Phase.BASELINE, 1)


@pytest.mark.parametrize("faster", [False, True])
@pytest.mark.parametrize("in_force", [pair(1), int(flat_action(OWN_PAIR, 2, 0))])
def test_a_key_does_not_end_up_behind_nccls_own_choice_however_far_behind_that_was(in_force: int, faster: bool) -> None:
    """A fault of a link may make the action in force, and all like it, four times as slow. Also where that is NCCL's
    own choice with other channels."""
    keys, near = some_keys(2), pair(2)
    keys.channels[:, OWN_PAIR, 2] = True
    loop = loop_of(keys, draws=8, draw_samples=1)
    before: Times = lambda row, action: {OWN_ACTION: 4.0, in_force: 2.9, near: 3.0}.get(action, 4.5)  # noqa: E731
    for seed in range(20):
        drawn = lambda due, of=(in_force, near)[seed % 2]: np.full(due.draw.sum(), of)  # noqa: E731
        play(loop, 1, before, sigma=0.01, seed=seed, rows=[0], drawn=drawn)
    assert (loop.phase[0], loop.wanted[0]) == (Phase.EXPLOIT, in_force)
    loop._check(np.array([0]))
    assert OWN_ACTION not in loop.checks.actions[0].tolist()
    slower: Times = lambda row, action: 4.3 + 0.1 * (action == near) - 0.4 * faster  # noqa: E731
    after: Times = lambda row, action: 4.0 if action == OWN_ACTION else slower(row, action)  # noqa: E731
    assert [drift.anew for drift in all_turns(loop, after)] == [not faster]
    assert OWN_ACTION in loop.checks.actions[0].tolist()
    assert loop.phase[0] == (Phase.EXPLOIT if faster else Phase.ADAPT)


@pytest.mark.parametrize(("own", "turns"), [(0.1, 1), (0.02, check.TURNS), (0.4, check.TURNS)])
def test_what_is_as_far_behind_as_it_was_has_one_turn(own: float, turns: int) -> None:
    """NCCL's own choice was 0.1 behind. What is near has all turns, and so has what stands in another way."""
    loop = drawn_far()
    before = loop.evidence.samples[0].copy()
    loop._check(np.array([0]))
    times: Times = lambda row, action: 3.1 + own * (action == OWN_ACTION)  # noqa: E731
    assert [drift.anew for drift in all_turns(loop, times)] == [own == 0.4]
    measured = loop.evidence.samples[0] - (0 if own == 0.4 else np.minimum(before, FADED))
    assert (measured[OWN_ACTION], measured[pair(1)]) == (turns, check.TURNS)


def test_what_has_come_much_nearer_has_all_turns() -> None:
    """One turn would not tell that the network is another."""
    loop, row = drawn_far(), np.array([0])
    loop.evidence.total[0, OWN_ACTION], loop.evidence.baseline[0] = 3.5 * loop.evidence.samples[0, OWN_ACTION], 3.5
    loop._check(row)
    assert [drift.anew for drift in all_turns(loop, lambda row, action: 3.1 + 0.25 * (action == OWN_ACTION))] == [True]
    assert loop.evidence.samples[0, OWN_ACTION] == check.TURNS


def test_what_a_key_exploited_before_the_last_shift_is_looked_at_however_far_behind_it_was() -> None:
    """A fault of a link ends."""
    loop = drawn_far()
    fault: Times = lambda row, action: {OWN_ACTION: 3.4, pair(1): 4.4, pair(2): 3.25}.get(action, 4.5)  # noqa: E731
    for i in range(60):
        drawn = lambda due, of=1 + i % 2: np.full(due.draw.sum(), pair(of))  # noqa: E731
        play(loop, 1, fault, sigma=0.01, seed=i, rows=[0], drawn=drawn)
    assert (loop.phase[0], loop.exploited()[0], loop.settled[0]) == (Phase.EXPLOIT, pair(2), pair(1))
    loop.checks.calm_until[0] = 0
    alarmed(loop, lambda row, action: fault(row, action) - 0.1)
    ended: Times = lambda row, action: {OWN_ACTION: 3.3, pair(1): 2.9, pair(2): 3.15}.get(action, 4.5)  # noqa: E731
    assert [drift.anew for drift in all_turns(loop, ended)] == [True]
    assert pair(1) in loop.checks.actions[0].tolist()


def test_what_a_key_exploited_before_the_last_shift_is_looked_at_also_if_something_of_its_pair_contends() -> None:
    loop, fast = drawn_far(), int(flat_action(1, 4, 0))
    loop.keys.channels[0, 1, 4] = True
    loop.settled[0] = fast
    loop._check(np.array([0]))
    assert fast not in loop.checks.actions[0].tolist()
    ended: Times = lambda row, action: 2.5 if action == fast else far(0.3)(row, action)  # noqa: E731
    assert [drift.anew for drift in all_turns(loop, ended)] == [True]
    assert fast in loop.checks.actions[0].tolist()


def test_what_contends_of_the_same_pair_has_other_channels_if_anything_has() -> None:
    """Chunks are often alike: that one is as slow as another says nothing of the pair."""
    in_force, chunk, channels = pair(1), int(flat_action(1, 0, 2)), int(flat_action(1, 5, 0))
    for there in ([chunk, channels], [chunk]):
        keys = own_channels(2, small_chunk=True)
        keys.channels[:, 1, 5] = channels in there
        loop = loop_of(keys, draws=8, draw_samples=1)
        times: Times = lambda row, action: {in_force: 2.9, chunk: 2.91, channels: 3.0}.get(action, 3.1)  # noqa: E731
        for i in range(20):
            of = (in_force, *there)[i % (1 + len(there))]
            drawn = lambda due, of=of: np.full(due.draw.sum(), of)  # noqa: E731
            play(loop, 1, times, sigma=0.001, seed=i, rows=[0], drawn=drawn)
        loop._check(np.array([0]))
        contend = loop.checks.actions[0, :5].tolist()
        assert (there[-1] in contend, (chunk in contend) == (len(there) == 1)) == (True, True)


def test_what_would_be_behind_even_if_it_had_not_moved_is_not_looked_at() -> None:
    loop = drawn_far()
    alarmed(loop, far(0.2))
    assert [drift.anew for drift in all_turns(loop, far(0.2))] == [False]
    assert (loop.checks.actions[0, 5:] == -1).all()


def test_where_what_contends_differs_nothing_is_looked_at() -> None:
    loop = drawn_far()
    alarmed(loop, far(0.3))
    own: Times = lambda row, action: 2.8 if action == OWN_ACTION else far(0.3)(row, action)  # noqa: E731
    assert [drift.anew for drift in all_turns(loop, own)] == [True]
    assert (loop.checks.actions[0, 5:] < 0).all()


def _turns(loop: Loop, *times: float) -> None:
    """What contends in row 0, and what is looked at, takes so long, without noise."""
    row, one = np.array([0]), np.ones(1)
    took = dict(zip(loop.checks.actions[0].tolist(), times[:-1], strict=False))
    while not loop.checks.contended(row)[0]:
        time = took[int(loop.checks.next(row)[0])]
        loop.checks.record(row, one, time * one, 0 * one, loop.evidence, 0.01 * one)
    loop.checks.look(row, loop.settled[row], loop.evidence, loop.allowed(row).reshape(1, -1))
    assert not loop.checks.over(row)[0]
    loop.checks.record(row, one, times[-1] * one, 0 * one, loop.evidence, 0.01 * one)
    assert loop.checks.over(row)[0]


@pytest.mark.parametrize(("deviation", "ahead"), [(0.05, False), (0.02, True)])
def test_a_look_that_is_ahead_by_less_than_noise_explains_is_no_difference(deviation: float, ahead: bool) -> None:
    loop, row = drawn_far(), np.array([0])
    loop._check(row)
    _turns(loop, 3.2, 3.3, 3.08)  # the one in force, NCCL's own choice, and what is looked at
    # Of one collective, by how much means of 8 vary.
    assert loop.checks.again(row, np.array([deviation]))[0] == ahead


def _five(by: float = 0.0) -> Times:
    """Pair 1 is the best, and more are near it than contend; all of them are faster than NCCL's own choice."""
    return lambda row, action: (
        {OWN_ACTION: 3.15, **{pair(i): 2.85 + 0.05 * i for i in range(1, 6)}}.get(action, 4.5) + by
    )


def _drawn_five(slower: float = 0.0, seed: int = 0, **learning: int) -> tuple[Loop, list[Drift]]:
    """A key that has drawn all five; from the last draw on all take longer by so much."""
    loop, drifts = loop_of(own_channels(2), draws=12, draw_samples=1, **learning), []
    for i in range(70):
        drawn = lambda due, of=1 + i % 5: np.full(due.draw.sum(), pair(of))  # noqa: E731
        times = _five(slower if i > 11 else 0.0)
        drifts += play(loop, 1, times, sigma=0.01, seed=100 * seed + i, rows=[0], drawn=drawn)
    return loop, drifts


@pytest.mark.parametrize("by", [0.33, -0.33])
def test_a_burst_that_ends_during_a_check_changes_nothing(by: float) -> None:
    """Also where it ends between the turns of what contends and the looks: these are not measured side by side."""
    again = []
    for ends in range(30):
        (loop, _), done = _drawn_five(), 0
        alarmed(loop, _five(by))
        while loop.phase[0] == Phase.CHECK:
            drifts = play(loop, 1, _five(by if done < ends else 0.0), sigma=0.01, rows=[0])
            assert not any(drift.anew for drift in drifts)
            done += 1
            if loop.checks.actions[0, 1] in (pair(4), pair(5)):
                again.append(ends)
        assert loop.shifts[0] == 0
    assert bool(again) == (by > 0), "a look was faster than what contends, and was checked in turns"


@pytest.mark.parametrize("slower", [0.1, 0.2, 0.3])
def test_what_has_always_been_ahead_of_the_action_in_force_is_no_difference(slower: float) -> None:
    """In a check after the last draw that is NCCL's own choice, and all that was drawn may be faster."""
    for seed in range(5):
        loop, drifts = _drawn_five(slower, seed)
        assert [(drift.row, drift.anew) for drift in drifts] == [(0, False)]
        assert loop.shifts[0] == 0


@pytest.mark.parametrize("faster", [0.4, 0.9])
def test_what_became_faster_while_a_key_compared_is_not_taken_for_the_best_of_all(faster: float) -> None:
    """What is measured first then is ahead of all else, and was measured too seldom before to raise an alarm."""
    loop, drifts, after = loop_of(own_channels(2), draws=12, draw_samples=1, compares=4), [], 0
    for i in range(70):
        drawn = lambda due, of=1 + i % 5: np.full(due.draw.sum(), pair(of))  # noqa: E731
        times = _five(-faster if loop.decisions[0] > 13 else 0.0)
        drifts += play(loop, 1, times, sigma=0.01, seed=i, rows=[0], drawn=drawn)
        after = after or (int(loop.decisions[0]) if drifts else 0)
    assert after == 15, "it goes on comparing where it was"
    assert [drift.anew for drift in drifts] == [False], "all became faster alike"
    of = np.flatnonzero(loop.evidence.samples[0] > 0)
    now = loop.evidence.mean(np.zeros(len(of), np.int64), of)
    assert now == pytest.approx([_five(-faster)(0, int(action)) for action in of], abs=0.05)


def test_what_was_checked_before_it_was_compared_is_compared_however_long_the_check_took() -> None:
    loop, drifts = _drawn_five(0.2, compares=4)
    assert [drift.anew for drift in drifts] == [False]
    assert loop.checks.stood[0] == 0, "an alarm is looked into at once"


def test_one_time_that_is_fast_by_chance_is_checked_in_turns_and_the_choice_stands() -> None:
    loop, looks = drawn_far(), 0
    alarmed(loop, far(0.3))
    before = min(loop.evidence.samples[0, pair(1)], FADED)
    while loop.phase[0] == Phase.CHECK:
        look = loop.wanted[0] == pair(2)
        times = far(0.3, ahead=0.2) if look and not looks else far(0.3)
        looks += look
        drifts = play(loop, 1, times, sigma=0.01, seed=looks, rows=[0])
        assert loop.exploited()[0] == pair(1)
    assert [drift.anew for drift in drifts] == [False]
    assert looks == 2, "it is as far behind as it was"
    assert loop.evidence.samples[0, pair(1)] - before == check.TURNS, "of the second check alone"
    assert (loop.shifts[0], loop.exploited()[0]) == (0, pair(1)), "what the check measured last is not exploited"


@pytest.mark.parametrize(("look", "again"), [(3.05, False), (2.8, True)])
def test_only_what_is_ahead_of_all_that_contends_is_checked_again(look: float, again: bool) -> None:
    loop, row = drawn_far(), np.array([0])
    loop._check(row)
    _turns(loop, 3.2, 3.0, look)
    assert loop.checks.again(row, np.array([0.001]))[0] == again


def test_a_key_exploits_its_choice_also_before_something_is_decided_after_its_check() -> None:
    loop = drawn_far()
    alarmed(loop, far(0.3))
    while loop.phase[0] == Phase.CHECK:
        due = loop.due()
        loop.decide(due.row, due.actions(np.zeros(due.draw.sum(), np.int64)))
        row, action = np.zeros(loop.need[0], np.int64), np.full(loop.need[0], loop.wanted[0])
        log_us = np.full(len(row), far(0.3)(0, int(loop.wanted[0])))
        loop.observe(Measured(row=row, action=action, log_us=log_us, skew=np.zeros(len(row))))
    assert loop.wanted[0] == pair(2), "what was measured last"
    assert loop.exploited()[0] == pair(1)
    # And what is decided after it, if that is something else.
    loop.decide(np.array([0]), np.array([pair(2)]))
    assert loop.exploited()[0] == pair(2)


def test_what_comes_and_goes_during_a_check_is_no_difference() -> None:
    """Each turn of each action but one is half as slow again; so is the one, of another action each time."""
    for odd in range(2 * check.TURNS):
        loop = exploiting(some_keys(2))
        alarmed(loop, _slower(0.2))
        drifts, turn = [], 0
        while loop.phase[0] == Phase.CHECK:
            by = 0.6 if turn == odd else 0.2
            drifts += play(loop, 1, _slower(by), sigma=0.001, rows=[0])
            turn += 1
        assert [drift.anew for drift in drifts] == [False]


def test_a_choice_that_stood_is_left_in_peace_for_longer_and_longer() -> None:
    loop = exploiting(some_keys(2))
    between = []
    for i in range(4):
        by = 0.2 * (1 - i % 2)
        before = loop.measured[0]
        alarmed(loop, _slower(by), rounds=2000)
        between.append(int(loop.measured[0] - before))
        assert [drift.anew for drift in all_turns(loop, _slower(by))] == [False]
    assert between[1] >= 2 * 128
    assert between[2] >= 4 * 128
    assert between[3] >= 8 * 128
    # What is far off is not passed over for good.
    assert play(loop, 2 * between[3], _slower(1.0), sigma=0.01, rows=[0])


def _in_peace(times: int) -> Loop:
    """Row 0 has been checked so often, and is left in peace for longer than it takes to forget what was before."""
    loop = exploiting(some_keys(2))
    for i in range(times):
        by = 0.2 * (1 - i % 2)
        alarmed(loop, _slower(by), rounds=2000)
        assert [drift.anew for drift in all_turns(loop, _slower(by))] == [False]
    play(loop, 10, _slower(by), sigma=0.01, rows=[0])
    return loop


def test_checks_that_come_one_after_another_leave_a_key_in_peace_for_no_longer() -> None:
    """A network that changes twice is checked as often, and none of that says that the next alarm is false."""
    loop = exploiting(some_keys(2))
    for _ in range(4):
        loop._check(np.array([0]))
        assert [drift.anew for drift in all_turns(loop, network())] == [False]
        assert loop.checks.calm_until[0] - loop.measured[0] == 2 * 128


def test_what_is_far_off_is_learned_anew_at_once_also_by_a_key_that_is_left_in_peace() -> None:
    loop = _in_peace(4)
    until, before = loop.checks.calm_until[0], loop.measured[0]
    drifts = play(loop, 20, _slower(0.7), sigma=0.01, rows=[0])
    assert [(drift.row, drift.anew) for drift in drifts] == [(0, True)]
    assert (loop.shifts[0], loop.measured[0] - before < 100, loop.measured[0] < until) == (1, True, True)


def test_an_alarm_of_a_key_that_is_left_in_peace_waits_until_that_is_over_and_is_not_lost() -> None:
    loop = _in_peace(4)
    until = loop.checks.calm_until[0]
    loop._own_ran[0] = 10**6  # so it does not look what NCCL's own choice takes either
    crossed: Times = lambda row, action: 2.98 if action == pair(1) else 2.7  # noqa: E731
    # Longer than the detector looks back: by then this is what it takes for usual.
    assert until - loop.measured[0] > 1000
    alarmed(loop, crossed, rounds=2000)
    assert until <= loop.measured[0] <= until + 8
    assert [drift.anew for drift in all_turns(loop, crossed)] == [True]


def test_correlated_noise_costs_next_to_nothing() -> None:
    """35 keys, 2,500 collectives of each once they exploit: AR(1) 0.5 of 5 %, and the same for all keys of the job."""
    loop = exploiting(some_keys(35))
    noise = lfilter([0.05 * np.sqrt(0.75)], [1, -0.5], np.random.default_rng(1).standard_normal((35, 2600)), axis=-1)
    rows, anew = np.arange(35), 0
    for step in range(2500):
        times = np.array([network()(row, action) for row, action in zip(rows, loop.wanted, strict=True)])
        of = Measured(row=rows, action=loop.wanted.copy(), log_us=times + noise[:, 100 + step], skew=np.zeros(35))
        anew += sum(drift.anew for drift in loop.observe(of))
        due = loop.due()
        loop.decide(due.row, due.actions(np.zeros(due.draw.sum(), np.int64)))
    assert anew == 0


def test_a_check_goes_on_where_the_state_was_saved() -> None:
    one, two = exploiting(some_keys(2)), exploiting(some_keys(2))
    alarmed(one, _slower(0.2))
    play(one, 2, _slower(0.2), sigma=0.01, rows=[0])
    one.checks.most[1] = check.MOST_TURNS
    two.restore(through_a_file(one.state()))
    assert two.phase[0] == Phase.CHECK
    assert two.checks.most.tolist() == [check.TURNS, check.MOST_TURNS]
    said = [[(drift.row, drift.anew) for drift in all_turns(loop, _slower(0.2), sigma=0.0)] for loop in (one, two)]
    assert said == [[(0, False)]] * 2
    assert (one.evidence.total == two.evidence.total).all()
