"""A network that changes while a key is checked, or right after; and what counts then of what was measured before."""

from __future__ import annotations

import numpy as np
import pytest
from checked import alarmed, all_turns, drawn_far, far
from looped import Times, exploiting, loop_of, network, own_channels, pair, play, some_keys

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
    assert [drift.anew for drift in drifts] == ([True] if after < 5 else [False, True])


def test_what_is_behind_in_some_turns_and_ahead_in_others_is_not_as_far_behind_as_it_was() -> None:
    loop, row, one = drawn_far(), np.array([0]), np.ones(1)
    loop._check(row)
    assert loop.checks.actions[0, :2].tolist() == [pair(1), OWN_ACTION]
    for behind in (0.5, 0.5, -0.4):  # 0.2 on the mean; it was 0.1
        for time in (3.0, 3.0 + behind):
            loop.checks.record(row, one, time * one, 0 * one, loop.evidence, 0.01 * one)
    assert loop.checks.takes_turns[0, 1] == check.TURNS


def test_what_one_turn_has_put_behind_is_not_as_far_behind_as_it_was() -> None:
    """The network changed between the action in force and NCCL's own choice. All later would be relative to that."""
    loop, row, one = drawn_far(), np.array([0]), np.ones(1)
    loop._check(row)
    assert loop.checks.actions[0, :2].tolist() == [pair(1), OWN_ACTION]
    for behind in (0.28, *[0.02] * (check.TURNS - 1)):  # it was 0.1
        for time in (3.0, 3.0 + behind):
            loop.checks.record(row, one, time * one, 0 * one, loop.evidence, 0.01 * one)
    assert loop.checks.level(row)[0, 1] == pytest.approx(3.02)


@pytest.mark.parametrize(("sigma", "turns"), [(0.09, 4), (0.11, 6)])
def test_where_times_vary_by_much_what_contends_has_more_turns(sigma: float, turns: int) -> None:
    loop, row, one = drawn_far(), np.array([0]), np.ones(1)
    deviation = np.array([sigma / np.sqrt(8)])
    loop.checks.off[0] = 9.0  # of a check before
    allowed = loop.allowed(row).reshape(1, -1)
    loop.checks.begin(row, loop.wanted[row], row, loop.evidence, deviation, allowed, np.zeros(1, np.bool_))
    assert loop.checks.takes_turns[0, :3].tolist() == [turns, turns, 0]
    for turn in range(turns):
        for time in (3.0 + 0.1 * turn, 3.02 + 0.1 * turn):
            assert not loop.checks.contended(row)[0]
            loop.checks.record(row, one, time * one, 0 * one, loop.evidence, deviation)
    assert loop.checks.contended(row)[0]
    assert loop.checks.level(row)[0, :2] == pytest.approx([2.95 + 0.05 * turns, 2.97 + 0.05 * turns])


@pytest.mark.parametrize(
    ("samples", "by", "own", "anew"),
    [
        # NCCL's own choice was measured in a burst, and took a third more: it is not as far behind as it seemed.
        (32, 0.0, 3.05, False),
        (32, 0.04, 3.05, False),
        # It is ahead by a little, and is taken.
        (32, 0.0, 2.83, False),
        # It is ahead by far, whatever else; or what is in force has moved; or is hardly known itself.
        (32, 0.0, 2.75, True),
        (32, 0.15, 3.05, True),
        (12, 0.0, 3.05, True),
    ],
)
def test_where_what_is_in_force_takes_what_it_took_the_network_is_as_it_was(
    samples: int, by: float, own: float, anew: bool
) -> None:
    loop, row = drawn_far(), np.array([0])
    evidence = loop.evidence
    for action, log_us, count in ((OWN_ACTION, 3.3, 8), (pair(1), 2.9, samples)):
        evidence.samples[0, action], evidence.total[0, action] = count, count * log_us
    evidence.baseline[0] = 3.3
    loop._check(row)
    times: Times = lambda row, action: own if action == OWN_ACTION else 2.9 + by  # noqa: E731
    assert [drift.anew for drift in all_turns(loop, times)] == [anew]
    # Either way what NCCL's own choice takes is known now.
    assert evidence.baseline[0] == pytest.approx(own, abs=0.1)


@pytest.mark.parametrize("turns", [4, 6])
@pytest.mark.parametrize(("deviation", "differs"), [(0.005, True), (0.025, False)])
def test_what_is_in_force_takes_what_it_took_also_where_noise_says_otherwise(
    turns: int, deviation: float, differs: bool
) -> None:
    """It seems 8 % slower, and NCCL's own choice is not as far behind as it was."""
    loop, row = drawn_far(), np.array([0])
    for action, log_us in ((OWN_ACTION, 3.3), (pair(1), 2.9)):
        loop.evidence.samples[0, action], loop.evidence.total[0, action] = 1000, 1000 * log_us
    loop._check(row)
    assert loop.checks.actions[0, :3].tolist() == [pair(1), OWN_ACTION, -1]
    loop.checks.most[0] = loop.checks.turns[0, :2] = turns
    loop.checks.off[0, 0], loop.checks.off[0, 1] = 2.98, 0.15
    assert loop.checks.differs(row, loop.evidence, np.array([deviation]), np.array([False])).tolist() == [differs]


@pytest.mark.parametrize(("turns", "before"), [(4, 1), (4, 2), (4, 3), (4, 4), (6, 2), (6, 3), (6, 4), (6, 6)])
def test_a_check_begins_anew_once(turns: int, before: int) -> None:
    loop, row = drawn_far(), np.array([0])
    loop._check(row)
    loop.checks.most[0] = turns
    loop.checks.off[0] = 9.0  # of a check before
    for again in (before < turns, False):
        loop.checks.off[0, 0, :turns] = np.where(np.arange(turns) < before, 3.0, 4.0)
        loop.checks.turns[0, 0] = turns
        assert not loop.checks.moved(row, np.array([0.5])).any(), "that may be noise"
        assert loop.checks.moved(row, np.array([0.01])).tolist() == [again]
        assert loop.checks.turns[0, 0] == (0 if again else turns)


def test_what_moves_in_every_check_does_not_keep_a_key_there() -> None:
    loop, turns = drawn_far(), 0
    alarmed(loop, far(0.3))
    while loop.phase[0] == Phase.CHECK:
        play(loop, 1, far(0.4 * (turns // 6 % 2)), sigma=0.01, seed=turns, rows=[0])
        turns += 1
        assert turns < 60


@pytest.mark.parametrize(("by", "decisions"), [(0.2, 3), (0.02, 10)])
def test_what_a_check_has_not_shown_to_be_slower_gives_way_soon_once_it_is(by: float, decisions: int) -> None:
    """A check saw it once, and did not see it for sure; hundreds of times from before the change say it is the best."""
    loop = exploiting(some_keys(2))
    first, other = pair(1), pair(2)
    alike: Times = lambda row, action: {first: 2.9, other: 2.93}.get(action, 3.0)  # noqa: E731
    for of in np.array([[first], [other]]):
        loop.evidence.samples[0, of] = loop.evidence.total[0, of] = 0
        known = np.array([alike(0, int(of[0]))])
        loop.evidence.record(np.array([0]), of, np.array([500.0]), known, np.array([0.05]))
    alarmed(loop, lambda row, action: alike(row, action) + by)
    assert [drift.anew for drift in all_turns(loop, lambda row, action: alike(row, action) + by)] == [False]
    first = int(loop.exploited()[0])
    ran = 0
    while loop.wanted[0] == first and ran < 400:
        play(
            loop,
            1,
            lambda row, action: alike(row, action) + by + 0.15 * (action == first),
            sigma=0.01,
            seed=ran,
            rows=[0],
        )
        ran += 1
    assert ran <= decisions
    assert loop.shifts[0] == 0


def test_what_takes_longer_gives_way_also_while_its_key_is_left_in_peace() -> None:
    """Its alarm waits, for thousands of collectives where the choice has often stood."""
    loop = drawn_far()
    loop.checks.stood[0], loop.checks.calm_until[0] = 6, 1 << 20
    other = pair(2)
    for column, value in ((loop.evidence.samples, 200.0), (loop.evidence.total, 200 * 2.92)):
        column[0, other] = value
    slower: Times = lambda row, action: {pair(1): 2.97, other: 2.92}.get(action, 3.0)  # noqa: E731
    for decision in range(100):
        play(loop, 1, slower, sigma=0.02, seed=decision, rows=[0])
        if loop.wanted[0] == other:
            break
    assert loop.wanted[0] == other
    assert (loop.phase[0], loop.shifts[0]) == (Phase.EXPLOIT, 0)


def test_a_network_that_changes_while_what_is_hardly_known_is_in_force_does_not_make_it_the_best() -> None:
    """Recorded, the times of the faster network would put all else so far behind that nothing contends."""
    loop = exploiting(own_channels(2))
    loop.evidence.samples[0, pair(1)], loop.evidence.total[0, pair(1)] = 1.0, 2.9
    faster: Times = lambda row, action: 1.9 if action == pair(1) else 2.0  # noqa: E731
    play(loop, 1, faster, sigma=0.01, rows=[0])
    assert loop.phase[0] == Phase.CHECK
    assert loop.checks.actions[0, :2].tolist() == [pair(1), OWN_ACTION]
    assert [drift.anew for drift in all_turns(loop, faster)] == [False]
    assert loop.evidence.baseline[0] == pytest.approx(2.0, abs=0.02)


def test_what_is_slower_than_it_seemed_gives_way_without_a_check() -> None:
    """Nothing else has moved: there is nothing to learn."""
    loop = exploiting(own_channels(2))
    loop.evidence.samples[0, pair(1)], loop.evidence.total[0, pair(1)] = 1.0, 2.6
    slower: Times = lambda row, action: 3.1 if action == pair(1) else 3.0  # noqa: E731
    play(loop, 4, slower, sigma=0.01, rows=[0])
    assert (loop.phase[0], loop.wanted[0], loop.shifts[0]) == (Phase.EXPLOIT, OWN_ACTION, 0)


@pytest.mark.parametrize(("own", "next_to"), [(3.0, OWN_ACTION), (3.4, pair(2))])
def test_a_check_compares_what_is_in_force_with_something_however_far_behind(own: float, next_to: int) -> None:
    loop, row = drawn_far(), np.array([0])
    loop.evidence.total[0, pair(1)] = 1.5 * loop.evidence.samples[0, pair(1)]
    loop.evidence.baseline[0] = own
    loop._check(row)
    assert loop.checks.actions[0, :3].tolist() == [pair(1), next_to, -1]


@pytest.mark.parametrize(("in_force", "samples", "back"), [(2, 8, 1), (2, 500, 2), (1, 1000, 1)])
def test_a_key_goes_back_to_what_it_knew_in_force_and_not_to_what_a_fault_has_put_there(
    in_force: int, samples: int, back: int
) -> None:
    """Pair 1 was in force a thousand times. Pair 2 came after it, for long, or when the fault had begun."""
    loop, row = exploiting(own_channels(2)), np.array([0])
    for of, times in ((1, 1000), (in_force, samples)):
        loop.evidence.samples[0, pair(of)], loop.evidence.total[0, pair(of)] = times, times * 2.9
    loop.decide(row, np.array([pair(in_force)]))
    loop.shift(row)
    assert loop.settled[0] == pair(back)


def test_what_stands_a_little_otherwise_than_before_takes_what_the_check_has_measured() -> None:
    """NCCL's own choice comes nearer, and many times from before the change say that it has not."""
    loop, row = drawn_far(), np.array([0])
    loop.evidence.record(row, row, np.array([100.0]), np.array([3.0]), np.array([0.01]))  # NCCL's own choice
    nearer: Times = lambda row, action: 3.24 if action == OWN_ACTION else far(0.3)(row, action)  # noqa: E731
    alarmed(loop, nearer)
    assert [drift.anew for drift in all_turns(loop, nearer)] == [False]
    assert loop.evidence.mean(row, np.array([OWN_ACTION])) == pytest.approx([3.24], abs=0.015)
    assert loop.evidence.baseline[0] == pytest.approx(3.24, abs=0.015)
    assert loop.evidence.ratio(row)[0, 1, 0] == pytest.approx(-0.04, abs=0.02)


def test_what_was_measured_once_and_by_luck_takes_what_the_check_has_measured() -> None:
    """One time of what is in force was far too fast. A check of a noisy key does not prove that NCCL's own choice is
    faster now, but it has measured both."""
    loop, row = exploiting(own_channels(1)), np.array([0])
    loop.evidence.samples[0, [pair(1), OWN_ACTION]] = 1, 100
    loop.evidence.total[0, [pair(1), OWN_ACTION]] = 2.65, 300
    loop.evidence.square[0] = loop.evidence.freedom[0] * 0.15**2
    loop._check(row)
    checks, evidence = loop.checks, loop.evidence
    assert checks.actions[0, :3].tolist() == [pair(1), OWN_ACTION, -1]
    checks.off[0, 0], checks.off[0, 1] = 2.8, -0.1
    checks.turns[0, :2] = checks.most[0] = check.MOST_TURNS
    deviation = np.array([0.15 / np.sqrt(8)])
    assert not checks.differs(row, evidence, deviation, np.zeros(len(row), np.bool_)).any()
    by, of_each = checks.moved_by(row, evidence, deviation)
    now = evidence.mean(np.zeros(2, np.int64), checks.actions[0, :2]) + by + of_each[0, :2]
    assert now == pytest.approx([2.8, 2.7], abs=0.08)


def _seems_slower(deviation: float, other: float = 0.3) -> tuple[float, list[float]]:
    """By how much all have moved, and each action that contends beyond that, where turns say 0.36 of the one in force
    and ``other`` of NCCL's own choice. ``deviation`` is of a batch of 8 times."""
    loop, row = drawn_far(), np.array([0])
    loop._check(row)
    checks, evidence = loop.checks, loop.evidence
    assert checks.actions[0, :3].tolist() == [pair(1), OWN_ACTION, -1]
    known = evidence.mean(np.zeros(2, np.int64), checks.actions[0, :2])
    for column in (evidence.samples, evidence.total):
        column[0, [pair(1), OWN_ACTION]] *= 100
    checks.off[0, 0], checks.off[0, 1] = known[0] + 0.36, known[1] + other - (known[0] + 0.36)
    checks.turns[0, :2] = checks.most[0] = check.MOST_TURNS
    by, of_each = checks.moved_by(row, evidence, np.array([deviation]))
    assert of_each[0, 2:].tolist() == [0, 0, 0]
    return float(by[0]), of_each[0, :2].tolist()


def test_chance_in_the_turns_of_the_action_in_force_moves_all_others_by_a_share_of_it() -> None:
    """Where times vary by much: what was not measured would stand to it in another way than before."""
    by, of_each = _seems_slower(0.05)
    assert by == pytest.approx(0.33, abs=0.005)
    assert of_each == pytest.approx([0.015, -0.015], abs=0.01)


def test_what_is_no_further_off_than_turns_err_is_believed_no_more_for_being_far() -> None:
    by, of_each = _seems_slower(0.1, 0.16)
    assert by == pytest.approx(0.26, abs=0.01)
    assert of_each == pytest.approx([0.013, -0.013], abs=0.005)


def test_where_times_hardly_vary_what_was_measured_has_moved_by_what_was_measured() -> None:
    by, of_each = _seems_slower(0.0001)
    assert by == pytest.approx(0.36, abs=0.001), "the other has changed, and says nothing of what all have in common"
    assert [by + of for of in of_each] == pytest.approx([0.36, 0.3], abs=0.001)


def _other(by: float = 0.0, of_own: float = 0.0) -> Times:
    return lambda row, action: (2.9 if action == pair(1) else 3.0 + of_own) + by


@pytest.mark.parametrize("by", [0.26, -0.26])
def test_times_that_go_back_to_what_they_were_before_a_check_take_all_that_is_known_with_them(by: float) -> None:
    """A burst: otherwise what is not in force looks as slow as it was in it, and the next check finds that it has
    changed."""
    loop = exploiting(own_channels(2))
    alarmed(loop, _other(by))
    assert [drift.anew for drift in all_turns(loop, _other(by))] == [False]
    for back in (0.0, by, 0.0):
        assert play(loop, 8, _other(back), sigma=0.01, rows=[0]) == []
        # What it was in between is of both networks: the alarm was not yet there.
        assert loop.evidence.baseline[0] == pytest.approx(3.0 + back, abs=0.1)
        assert loop.evidence.mean(np.array([0]), np.array([pair(1)]))[0] == pytest.approx(2.9 + back, abs=0.05)
    # Whether all have gone back is checked once the key is not left in peace any more.
    alarmed(loop, _other(), rounds=100)
    assert [drift.anew for drift in all_turns(loop, _other())] == [False]
    assert loop.shifts[0] == 0


@pytest.mark.parametrize(
    ("by", "back", "goes"), [(0.26, 0.0, True), (0.26, 0.1, False), (0.08, 0.0, False), (0.4, 0.0, False)]
)
def test_only_what_goes_all_the_way_back_takes_what_is_known_with_it_and_only_from_not_too_far(
    by: float, back: float, goes: bool
) -> None:
    loop = exploiting(own_channels(2))
    loop._check(np.array([0]))
    assert [drift.anew for drift in all_turns(loop, _other(by))] == [False]
    known = loop.evidence.mean(np.array([0]), np.array([OWN_ACTION]))[0]
    play(loop, 1, _other(back), sigma=0.001, rows=[0])
    moved = loop.evidence.mean(np.array([0]), np.array([OWN_ACTION]))[0] - known
    assert moved == (pytest.approx(-by, abs=0.03) if goes else 0)
    assert (loop.checks.asked[0] > 0) == goes, "whether all went back is checked"
    loop.shift(np.array([0]))
    assert loop.checks.way_back[0] == 0


def test_a_step_that_noise_explains_is_no_way_back() -> None:
    loop = exploiting(own_channels(2))
    loop.checks.may_go_back(np.array([0, 1]), np.array([0.15, 0.15]), np.array([0.05, 0.03]))
    assert loop.checks.way_back.tolist() == [0, -0.15]


def test_nothing_goes_back_while_a_key_learns() -> None:
    loop = loop_of(own_channels(1), draws=20)
    play(loop, 4, network(), drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    loop.checks.way_back[0] = 0.2
    play(loop, 1, lambda row, action: network()(row, action) + 0.2)
    assert (loop.checks.way_back[0], loop.evidence.baseline[0]) == (0.2, 3.0)


def test_what_was_ahead_of_nccls_own_choice_when_a_key_learned_and_is_so_by_more_is_no_difference() -> None:
    loop, drifts = loop_of(own_channels(2), draws=12, draw_samples=1), []
    for i in range(40):
        own = 3.12 if i > 11 else 3.0
        times = lambda row, action, own=own: {OWN_ACTION: own, pair(1): 2.9}.get(action, 3.5)  # noqa: E731
        drifts += play(loop, 1, times, sigma=0.01, seed=i, drawn=lambda due: np.full(due.draw.sum(), pair(1)), rows=[0])
    assert [drift.anew for drift in drifts] == [False], "the last draw shows that NCCL's own choice is slower"


def test_what_has_not_gone_back_with_the_action_in_force_is_found_by_a_check() -> None:
    loop = exploiting(own_channels(2))
    alarmed(loop, _other(0.26))
    assert [drift.anew for drift in all_turns(loop, _other(0.26))] == [False]
    # Back, but for NCCL's own choice, which is the best by far from here on.
    crossed = _other(of_own=-0.3)
    alarmed(loop, crossed, rounds=100)
    assert [drift.anew for drift in all_turns(loop, crossed)] == [True]


@pytest.mark.parametrize(("own", "anew"), [(2.97, False), (2.92, True)])
def test_what_is_ahead_by_little_is_taken_and_nothing_is_learned_for_it(own: float, anew: bool) -> None:
    loop = exploiting(own_channels(2))
    crossed: Times = lambda row, action: own if action == OWN_ACTION else 3.0  # noqa: E731
    loop._check(np.array([0]))
    assert [drift.anew for drift in all_turns(loop, crossed)] == [anew]
    play(loop, 1, crossed, sigma=0.001, rows=[0])
    assert loop.wanted[0] == OWN_ACTION
