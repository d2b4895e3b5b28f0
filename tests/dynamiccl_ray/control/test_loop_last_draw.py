"""The last draw is of NCCL's own choice, and so is the last decision that compares: whether the network has changed
while a key learned."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from looped import Times, loop_of, network, observed, own_channels, pair, play, some_keys

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.control import check
from dynamiccl_ray.control.loop import Drift, Loop, Phase


def _learned(change: float, outlier: float = 0.0) -> tuple[Loop, list[Drift]]:
    """A key that has drawn in a network whose times change by a factor, as a log, while it draws; one time of the last
    draw may be odd."""
    loop, draws = loop_of(some_keys(2), draws=8, draw_samples=1, compares=20), 0

    def times(row: int, action: int) -> float:
        odd = outlier if draws == 8 and row == 0 else 0.0
        return {OWN_ACTION: 3.0, pair(1): 3.2}.get(action, 3.4) + odd + (change if row == 0 and draws > 4 else 0.0)

    drifts: list[Drift] = []
    # What is drawn before the change is NCCL's own choice, and after it another, which looks the better one.
    while draws < 40:
        drawn = OWN_ACTION if draws < 4 else pair(1)
        drifts += play(loop, 1, times, sigma=0.005, seed=draws, drawn=lambda due, a=drawn: np.full(due.draw.sum(), a))
        draws += 1
    return loop, drifts


def test_a_network_that_changes_while_a_key_learns_does_not_leave_it_worse_off_than_nccl() -> None:
    loop, drifts = _learned(-0.5)
    assert [(drift.row, drift.anew) for drift in drifts] == [(0, True)]
    assert (loop.wanted == OWN_ACTION).all()
    assert loop.evidence.baseline[0] == pytest.approx(2.5, abs=0.02)


def test_one_odd_time_of_nccls_own_choice_costs_a_check_and_what_was_drawn_is_compared_after_it() -> None:
    loop, drifts = _learned(0.0, outlier=0.5)
    assert [(drift.row, drift.anew) for drift in drifts] == [(0, False)]
    assert loop.shifts[0] == 0
    assert loop.checks.calm_until[0] == 0, "an alarm is looked into at once"


def test_a_network_that_becomes_faster_while_a_key_compares_does_not_leave_it_worse_off_than_nccl() -> None:
    """What is measured first from then on is ahead of all that was measured before."""
    loop, row = loop_of(own_channels(2), draws=8, draw_samples=1, compares=12), np.array([0])
    before, after = {OWN_ACTION: 3.0, pair(1): 2.9, pair(2): 2.95}, {OWN_ACTION: 2.8, pair(1): 2.75, pair(2): 2.85}
    changed = False
    for i in range(60):
        if loop.decisions[0] == 8 + 6 and not changed:
            loop.evidence.record(row, np.array([pair(2)]), np.array([8.0]), np.array([after[pair(2)]]), np.zeros(1))
            changed = True
        now = after if changed else before
        times: Times = lambda _, action, now=now: now.get(action, 3.5)  # noqa: E731
        play(loop, 1, times, sigma=0.005, seed=i, rows=[0], drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert changed
    assert loop.phase[0] == Phase.EXPLOIT
    assert loop.wanted[0] != pair(2)


def _compared(times: Callable[[int], Times], seeds: int = 40) -> tuple[Loop, list[Drift]]:
    """Until it exploits. ``times`` are of the decisions that it has had."""
    loop, drifts = loop_of(own_channels(2), draws=8, draw_samples=1, compares=12), []
    for i in range(seeds):
        now = times(int(loop.decisions[0]))
        drawn = lambda due, of=1 + i % 2: np.full(due.draw.sum(), pair(of))  # noqa: E731
        drifts += play(loop, 1, now, sigma=0.005, seed=i, rows=[0], drawn=drawn)
        if loop.phase[0] == Phase.EXPLOIT:
            break
    return loop, drifts


def test_where_nccls_own_choice_alone_has_moved_nothing_is_learned_anew() -> None:
    """What is checked at the end of comparing is the best: it stays ahead."""

    def times(decisions: int) -> Times:
        return lambda _, action: {OWN_ACTION: 3.0 + 0.1 * (decisions > 10), pair(1): 2.7, pair(2): 2.75}.get(action, 4)

    loop, drifts = _compared(times)
    assert [drift.anew for drift in drifts] == [False]
    assert (loop.phase[0], loop.wanted[0], loop.shifts[0]) == (Phase.EXPLOIT, pair(1), 0)
    assert loop.checks.calm_until[0] == 0, "there was no alarm"


def test_the_last_decision_that_compares_shows_that_the_network_changed_also_where_nccls_own_choice_is_hopeless() -> (
    None
):
    def times(decisions: int) -> Times:
        by = -0.15 * (decisions > 18)
        return lambda _, action: {OWN_ACTION: 3.9 + by, pair(1): 2.9 + by, pair(2): 3.0 + by}.get(action, 4.5)

    _, drifts = _compared(times)
    assert [drift.anew for drift in drifts] == [False]


def test_what_was_exploited_before_the_last_shift_is_not_forgotten_by_a_check_of_what_was_compared() -> None:
    loop, _ = _compared(lambda _: lambda _, action: 2.9 if action == pair(1) else 3.0)
    loop.shift(np.array([0]))
    assert loop.settled[0] == pair(1)
    while loop.decisions[0] < loop.draws()[0] + 12:
        play(loop, 1, lambda _, action: {OWN_ACTION: 3.0, pair(2): 2.8}.get(action, 3.5), sigma=0.005, rows=[0])
    loop._check(np.array([0]))
    for _ in range(4):
        play(loop, 1, lambda _, action: {OWN_ACTION: 3.0, pair(2): 2.8}.get(action, 3.5), sigma=0.005, rows=[0])
    assert (loop.phase[0], loop.exploited()[0]) == (Phase.CHECK, -1)
    loop.shift(np.array([0]))
    assert loop.settled[0] == pair(1)


@pytest.mark.parametrize(("own", "looks"), [(0.5, True), (0.9, False)])
def test_the_last_decision_that_compares_is_one_time_of_nccls_own_choice_unless_that_is_hopeless(
    own: float, looks: bool
) -> None:
    loop, asked = loop_of(own_channels(2), draws=8, draw_samples=1, compares=12), []
    times: Times = lambda row, action: {OWN_ACTION: 3.0 + own, pair(1): 3.0}.get(action, 3.1)  # noqa: E731
    for i in range(40):
        if loop.decisions[0] == 8 + 12:
            asked.append((int(loop.wanted[0]), int(loop.need[0])))
        play(loop, 1, times, sigma=0.005, seed=i, rows=[0], drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert asked[0] == ((OWN_ACTION, 1) if looks else (pair(1), 1))
    assert (loop.phase[0], loop.wanted[0]) == (Phase.EXPLOIT, pair(1))


@pytest.mark.parametrize(
    ("noise", "behind", "takes"), [(0.04, 0.1, 1), (0.1, 0.1, 4), (0.1, 0.3, 4), (0.1, 0.5, 1), (0.1, 0.9, 4)]
)
def test_where_one_time_of_nccls_own_choice_says_next_to_nothing_the_last_decision_that_compares_takes_more(
    noise: float, behind: float, takes: int
) -> None:
    """All became a third faster while a noisy key compared: it ended with the first action that it measured then."""
    loop, asked = loop_of(own_channels(2), draws=8, draw_samples=1, compares=12), []
    times: Times = lambda row, action: {OWN_ACTION: 3.0 + behind, pair(1): 3.0}.get(action, 3.2)  # noqa: E731
    for i in range(80):
        loop.evidence.square[:], loop.evidence.freedom[:] = 1e6 * noise**2, 1e6
        if loop.decisions[0] == 8 + 12:
            asked.append((int(loop.wanted[0]), int(loop.need[0])))
        play(loop, 1, times, sigma=0.005, seed=i, rows=[0], drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    # Where NCCL's own choice is hopeless it is the best, which costs nothing.
    assert asked == [(OWN_ACTION if behind < check.HOPELESS else pair(1), takes)]


def test_where_nccls_own_choice_alone_is_far_slower_than_it_was_a_noisy_key_checks_it() -> None:
    """Eight times of it were an alarm that nothing is checked after."""
    loop = loop_of(own_channels(1), draws=8, draw_samples=1, compares=12, compare_samples=8)
    times: Times = lambda row, action: {OWN_ACTION: 3.1, pair(1): 3.0}.get(action, 3.2)  # noqa: E731
    seed = 0
    while loop.decisions[0] < 8 + 12:
        play(loop, 1, times, sigma=0.01, seed=seed, drawn=lambda due: np.full(due.draw.sum(), pair(1)))
        loop.evidence.square[:], loop.evidence.freedom[:], seed = 1e6 * 0.06**2, 1e6, seed + 1
    assert (loop.wanted[0], loop.need[0]) == (OWN_ACTION, 8)
    observed(loop, [0] * 8, 3.7)
    assert (loop.phase[0], loop.shifts[0]) == (Phase.CHECK, 0)


@pytest.mark.parametrize(
    ("noise", "rests", "takes"), [(0.04, True, 4), (0.1, True, 4), (0.04, False, 1), (0.1, False, 4)]
)
def test_what_is_said_that_the_last_decision_takes_is_what_it_takes_also_where_the_key_rests(
    noise: float, rests: bool, takes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loop_of(own_channels(1), draws=8, draw_samples=1, compares=12)
    times: Times = lambda row, action: {OWN_ACTION: 3.1, pair(1): 3.0}.get(action, 3.2)  # noqa: E731
    while loop.decisions[0] < 8 + 12 - 1:
        play(loop, 1, times, drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    loop.evidence.square[:], loop.evidence.freedom[:] = 1e6 * noise**2, 1e6
    monkeypatch.setattr(loop.budget, "spent", lambda group: np.full(len(group), rests))
    observed(loop, [0] * int(loop.need[0]), times(0, int(loop.wanted[0])))
    due = loop.due()
    loop.decide(due.row, due.actions(np.zeros(0, np.int64)))
    assert loop.resting[0] == rests
    assert due.takes.tolist() == loop.need.tolist() == [takes]


@pytest.mark.parametrize(
    ("first", "last", "asked", "anew"),
    [
        (1.0, 1.5, 2, False),
        (0.5, 1.5, 2, False),
        (1.0, 0.5, 2 + check.TURNS, True),
        (1.0, -0.3, 2 + check.TURNS, True),
    ],
)
def test_after_an_odd_last_draw_nccls_own_choice_is_checked_unless_it_is_hopeless_and_then_the_best(
    first: float, last: float, asked: int, anew: bool
) -> None:
    loop, wanted = loop_of(some_keys(2), draws=8, draw_samples=1), []  # type: ignore[var-annotated]

    def times(row: int, action: int) -> float:
        own = 3.0 + (last if loop.decisions[0] >= 8 else first)
        return {OWN_ACTION: own, pair(1): 3.0, pair(2): 3.1}.get(action, 4.5)

    drifts: list[Drift] = []
    while not drifts:
        wanted.append(int(loop.wanted[0]))
        drawn = lambda due: np.full(due.draw.sum(), pair(1 + len(wanted) % 2))  # noqa: E731
        drifts = play(loop, 1, times, sigma=0.01, seed=len(wanted), rows=[0], drawn=drawn)
    assert loop.checks.actions[0, :2].tolist() == ([pair(1), pair(2)] if last > 1 else [OWN_ACTION, pair(1)])
    assert (wanted.count(OWN_ACTION), [drift.anew for drift in drifts]) == (asked, [anew])


def test_a_key_is_checked_by_what_it_measured_also_where_others_begin_anew_at_that_moment() -> None:
    loop = loop_of(some_keys(2), draws=8, draw_samples=1)
    drawn = lambda due: np.full(due.draw.sum(), pair(1))  # noqa: E731
    crossed: Times = lambda row, action: 3.1 if action == pair(1) else 3.0  # noqa: E731
    play(loop, 30, network(), sigma=0.01, rows=[0], drawn=drawn)
    # What comes next of key 1 is its last draw, of NCCL's own choice.
    play(loop, 8, network(), sigma=0.01, rows=[1], drawn=drawn)
    assert (loop.decisions[1], loop.wanted[1]) == (8, OWN_ACTION)
    while loop.phase[0] != Phase.CHECK:
        play(loop, 1, crossed, sigma=0.01, rows=[0])
    while (loop.checks.takes_turns[0] - loop.checks.turns[0]).sum() > 1:
        play(loop, 1, crossed, sigma=0.01, rows=[0])
    drifts = observed(loop, [0, 0, 1], [crossed(0, loop.wanted[0])] * 2 + [3.5])
    assert [(drift.row, drift.anew) for drift in drifts] == [(0, True)]
    assert loop.phase.tolist() == [Phase.ADAPT, Phase.CHECK]
    assert loop.evidence.samples[1, OWN_ACTION] > 0
    assert loop.shifts[1] == 0
