"""The control loop after the network has shifted: which keys begin anew, and what they remember."""

from __future__ import annotations

import numpy as np
import pytest
from looped import (
    UNTIL_EXPLOIT,
    decided,
    due_rows,
    exploiting,
    loop_of,
    network,
    observed,
    own_channels,
    pair,
    play,
    some_keys,
)

from dynamiccl_ray.actions import N_ACTIONS, OWN_ACTION
from dynamiccl_ray.agent.observation import PAIR_FIELDS, part
from dynamiccl_ray.control.loop import Loop, Phase
from dynamiccl_ray.knobs import OWN_PAIR


def _cusum(loop: Loop, at: int = 0) -> float:
    return float(part(loop.due().observation[at], "cusum")[0])


def _shift(loop: Loop, *rows: int) -> list[int]:
    """The network of these rows has shifted; the rows that alarm."""
    return sorted(a.row for a in play(loop, 8, network(*rows), sigma=0.01, rows=rows, seed=1))


def test_an_alarm_begins_its_key_anew_and_no_other() -> None:
    loop = exploiting(some_keys(8))
    noise, shift = np.random.default_rng(1).standard_normal(32), np.repeat([0.0, 0.4], [8, 24])
    alarms = observed(loop, [2] * 32, 2.9 + shift + 0.01 * noise)
    assert [(alarm.row, alarm.anew) for alarm in alarms] == [(2, True)]
    assert 8 <= alarms[0].sample < 24, "a collective soon after the shift"
    assert np.flatnonzero(loop.phase == Phase.BASELINE).tolist() == [2]
    assert (loop.wanted[2], loop.decisions[2], loop.shifts[2], loop.need[2]) == (OWN_ACTION, 0, 1, 4)
    assert not loop.evidence.samples[2].any()
    assert loop.shifts.sum() == 1
    # What follows is late, and then the key learns once more.
    observed(loop, [2] * 3, 3.3, action=pair(1))
    assert loop.late == 3
    observed(loop, [2] * 4, 3.4)
    assert loop.evidence.baseline[2] == pytest.approx(3.4)
    due = decided(loop, pair(1))
    assert (due.row.tolist(), due.ordinal.tolist(), due.shifts.tolist()) == ([2], [0], [1])
    assert loop.phase[2] == Phase.ADAPT
    play(loop, UNTIL_EXPLOIT, network(2), sigma=0.01, rows=[2], drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert (loop.phase[2], loop.wanted[2]) == (Phase.EXPLOIT, pair(1))


@pytest.mark.parametrize(("takes", "allowed"), [(3.3, True), (3.9, True), (3.3, False)])
def test_what_was_in_force_before_a_shift_is_measured_after_it_whatever_the_policy_draws(
    takes: float, allowed: bool
) -> None:
    """Learning anew never leaves a key with what is slower than what it had, and may still have."""
    sequence = 8
    loop = loop_of(own_channels(1), draws=30, sequence=sequence)
    play(loop, 60, network(), sigma=0.01, drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert (loop.shifts[0], loop.phase[0], loop.wanted[0]) == (0, Phase.EXPLOIT, pair(1))
    times, asked = {OWN_ACTION: 3.5, pair(1): takes, pair(2): 3.35}, []
    for _ in range(40):
        play(loop, 1, lambda _, action: times.get(action, 4.5), sigma=0.01, drawn=lambda due: np.full(1, pair(2)))
        if loop.phase[0] == Phase.ADAPT and loop.decisions[0] <= loop.draws()[0]:
            asked.append(int(loop.wanted[0]))
            loop.keys.channels[0, 1] &= allowed
    assert loop.shifts[0] == 1
    assert pair(1) not in asked[:sequence], "the policy's own draws"
    best = allowed and takes < times[pair(2)]
    assert asked.count(pair(1)) > 1 if best else asked.count(pair(1)) == allowed, "once is enough to know"
    assert loop.wanted[0] == pair(1 if best else 2)


def test_what_raised_an_alarm_is_of_neither_network_and_not_learned_from() -> None:
    loop = exploiting(some_keys(8))
    before = (loop.evidence.freedom[0], loop.evidence.square[0], loop.evidence.last[0])
    assert len(observed(loop, [0] * 24, 3.3)) == 1
    assert (loop.evidence.freedom[0], loop.evidence.square[0], loop.evidence.last[0]) == before
    observed(loop, [0] * 4, 3.4)
    assert loop.evidence.samples[0].sum() == 4
    assert loop.evidence.ratio(np.array([0]))[0, 1, 0] == pytest.approx(-0.1, abs=0.01), "the hint has none of it"


def test_an_alarm_says_which_collective_raised_it() -> None:
    """Also where it was observed in an earlier call, or among those of other keys and late ones."""
    for before, earlier, later, sample in ((4, [3.3] * 3, [3.0, 3.3, 3.3], 1), (5, [3.3] * 3, [3.0, 3.3, 3.3], -1)):
        loop = exploiting(some_keys(8))
        loop.cusum.reset(np.array([1]))
        observed(loop, [1] * 24, 2.9 + 0.01 * np.random.default_rng(1).standard_normal(24))
        decided(loop)
        observed(loop, [1] * before, 3.3)
        decided(loop)
        assert observed(loop, [1] * 3, earlier) == []
        (alarm,) = observed(loop, [0, 1, 0], later, action=np.array([OWN_ACTION, pair(1), pair(1)]))
        assert (alarm.row, alarm.sample) == (1, sample)
        assert loop.late == 1


def test_where_a_quarter_of_a_communicators_keys_begin_anew_the_others_are_checked() -> None:
    # Key 7 has never run, and key 6 still draws.
    loop = exploiting(some_keys(8), some_keys(8, group=1), rows=[*range(6), *range(8, 16)])
    play(loop, 2, network(), sigma=0.01, rows=[6])
    other = loop.evidence.samples[8:].copy()
    assert _shift(loop, 0) == [0]
    assert loop.shifts.tolist() == [1] + [0] * 15
    # The second of seven that run.
    observed(loop, [6], 3.0)
    observed(loop, [3] * 24, 3.3)
    assert loop.shifts.tolist() == [1, 0, 0, 1, 0, 0, 1] + [0] * 9, "what learned begins anew; what never ran has not"
    assert (loop.phase[[3, 6]] == Phase.BASELINE).all()
    assert loop.need[[3, 6]].tolist() == [4, 4], "what had been measured of open decisions is gone"
    checked = [1, 2, 4, 5]
    assert (loop.phase[checked] == Phase.CHECK).all()
    assert (loop.phase[8:] == Phase.EXPLOIT).all()
    assert (loop.evidence.samples[8:] == other).all()
    drifts = play(loop, 12, network(), sigma=0.01, rows=checked)
    assert sorted((drift.row, drift.anew) for drift in drifts) == [(row, False) for row in checked]
    assert (loop.phase[checked] == Phase.EXPLOIT).all()
    assert (loop.wanted[checked] == pair(1)).all()


def test_what_is_left_in_peace_is_checked_soon_where_others_begin_anew() -> None:
    """What others learn then may be all that says that NCCL's own choice is ahead now."""
    loop = exploiting(some_keys(8))
    loop._check(np.array([1, 2]))
    play(loop, 12, network(), sigma=0.01, rows=[1, 2])
    loop.checks.calm_until[1], before = loop.measured[1] + 1000, loop.measured[1]
    assert (loop.phase == Phase.EXPLOIT).all()
    assert _shift(loop, 0) + _shift(loop, 3) == [0, 3]
    checked = (loop.phase == Phase.CHECK).tolist()
    assert checked == [False, False, False, False, True, True, True, True], "these were not left in peace"
    changed = lambda row, action: network()(row, action) - 0.3 * (action == OWN_ACTION)  # noqa: E731
    drifts, rounds = [], 0
    while not drifts:
        drifts, rounds = play(loop, 1, changed, sigma=0.01, rows=[1]), rounds + 1
        assert rounds < 40
    assert [(drift.row, drift.anew) for drift in drifts] == [(1, True)]
    assert loop.measured[1] - before >= 64, "its own alarms come first"


def test_what_is_left_in_peace_for_less_is_checked_no_later_for_that() -> None:
    loop = exploiting(some_keys(8))
    loop.checks.calm_until[1] = loop.measured[1] + 20
    until = loop.checks.calm_until[1]
    assert _shift(loop, 0) + _shift(loop, 3) == [0, 3]
    assert (loop.checks.calm_until[1], loop.checks.asked[1]) == (until, 1)


def test_alarms_that_are_far_apart_do_not_agree() -> None:
    loop = exploiting(some_keys(8))
    assert _shift(loop, 0) == [0]
    observed(loop, np.zeros(70, np.int64), 3.4, action=N_ACTIONS - 1)
    assert loop.late >= 70
    observed(loop, [3] * 24, 3.3)
    assert loop.shifts.tolist() == [1, 0, 0, 1, 0, 0, 0, 0]
    assert not (loop.phase == Phase.CHECK).any()


def test_no_key_of_another_communicator_begins_anew_whatever_happened_there() -> None:
    """The last alarm there is recent, and half of its keys have been forgotten since."""
    loop = exploiting(some_keys(8), some_keys(8, group=1))
    assert _shift(loop, 8) == [8]
    kept = np.ones(16, np.bool_)
    kept[12:] = False
    loop.keep(kept)
    assert loop.shifts.tolist() == [0] * 8 + [1] + [0] * 3
    assert _shift(loop, 0) == [0]
    assert loop.shifts.tolist() == [1] + [0] * 7 + [1] + [0] * 3


def test_an_action_with_another_time_or_other_noise_is_no_drift() -> None:
    """Drawn in turns of ten, so that each is known when it comes into force again."""
    loop = loop_of(some_keys(20), draws=80, compares=1)
    rng = np.random.default_rng(0)
    mean, sigma = {OWN_ACTION: 3.0, pair(1): 2.0, pair(2): 2.98}, {OWN_ACTION: 0.01, pair(1): 0.01, pair(2): 0.2}
    switches = 0
    for turn in range(80):
        row = np.repeat(np.arange(20), loop.need)
        times = np.array([mean[a] + sigma[a] * rng.standard_normal() for a in loop.wanted[row].tolist()])
        assert observed(loop, row, times) == []
        due = loop.due()
        wanted = (OWN_ACTION, pair(1), OWN_ACTION, pair(2))[turn // 10 % 4]
        switches += int(wanted != loop.wanted[0])
        # Whatever is behind: what matters is that it comes into force.
        loop.decide(due.row, np.full(20, wanted))
    assert switches == 7
    assert (loop.evidence.samples[:, pair(2)] >= 20).all()


def test_after_a_shift_the_policy_is_told_and_sees_hints_against_the_new_baseline() -> None:
    loop = exploiting(own_channels(8))
    observed(loop, [0] * 4, 2.9)
    assert due_rows(loop) == [0]
    assert _cusum(loop) == 0, "once it exploits, nobody is asked"
    decided(loop)
    fresh = loop_of(some_keys(1))
    observed(fresh, [0] * 4, 3.0)
    assert _cusum(fresh) == 0, "the first baseline is no shift"
    observed(loop, np.repeat(np.arange(8), 24), 3.3)
    assert (loop.phase == Phase.BASELINE).all()
    observed(loop, [0] * 4, 3.4)
    assert due_rows(loop) == [0]
    assert _cusum(loop) == 1
    (observation,) = loop.due().observation
    pairs = part(observation, "pairs")[1]
    assert pairs[PAIR_FIELDS.index("best")] == pytest.approx(-0.1, abs=0.02)
    # A hint: less than one collective, but more than nothing.
    assert 0 < pairs[PAIR_FIELDS.index("samples")] < np.log1p(1) / 4
    view = loop.view(np.array([0]), loop.allowed(np.array([0])))
    assert view.samples[0, OWN_PAIR, 0] == 4
    decided(loop, pair(1))
    observed(loop, [0] * 2, 3.5)
    assert _cusum(loop) < 1, "only the first decision after a shift"
    assert part(loop.due().observation[0], "pairs")[1, PAIR_FIELDS.index("best")] > 0, "it is slower now"
