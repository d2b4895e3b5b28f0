"""The control loop: each key at its own pace, from its own samples, until the network shifts."""

from __future__ import annotations

import io
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from looped import decided, loop_of, observed, pair, play, some_keys

from dynamiccl_ray.actions import N_ACTIONS, N_CHUNKS, OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.agent.observation import PAIR_FIELDS, part
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.control.loop import Due, Keys, Loop, Phase
from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS, OWN_PAIR

# Decisions of ``loop_of`` until a key has settled: those that are drawn, and those that compare.
DRAWS, COMPARES = 3, 2
SETTLED = 1 + DRAWS + COMPARES


def _due(loop: Loop) -> list[int]:
    return loop.due().row.tolist()


def _cusum(loop: Loop, at: int = 0) -> float:
    return float(part(loop.due().observation[at], "cusum")[0])


def _assert_same(one: Due, other: Due) -> None:
    for field in fields(Due):
        if field.name == "outcome":
            for name, value in vars(one.outcome).items():
                np.testing.assert_array_equal(getattr(other.outcome, name), value, err_msg=name)
        else:
            np.testing.assert_array_equal(getattr(other, field.name), getattr(one, field.name), err_msg=field.name)


# -- pace --


def test_every_key_goes_at_its_own_pace() -> None:
    loop = loop_of(some_keys(3))
    often, rare, never = range(3)
    for step in range(60):
        observed(loop, often, 3.0)
        if step % 20 == 0:
            observed(loop, rare, 3.0)
        decided(loop, pair(1))
    assert loop.phase.tolist() == [Phase.EXPLOIT, Phase.BASELINE, Phase.BASELINE]
    assert loop.wanted[[rare, never]].tolist() == [OWN_ACTION] * 2
    assert loop.need[[rare, never]].tolist() == [4 - 3, 4]
    assert loop.measured.tolist() == [60, 3, 0]
    # In observations: one of each key each time that it ran.
    assert loop.idle.tolist() == [0, 19, 63]
    observed(loop, rare, 3.0)
    assert rare in _due(loop)
    assert never not in _due(loop)


def test_a_key_goes_from_the_baseline_to_drawing_to_comparing_to_the_best_by_samples_alone() -> None:
    loop = loop_of(some_keys(1))
    took, phases, ordinals, drawn, takes = [], [], [], [], []
    samples = 0
    while len(took) < 8:
        needed = int(loop.need[0])
        assert _due(loop) == []
        observed(loop, 0, 3.0)
        samples += 1
        assert loop.need[0] == max(needed - 1, 0)
        if _due(loop):
            due = decided(loop, pair(1))
            took.append(samples)
            samples = 0
            phases.append(Phase(int(loop.phase[0])))
            ordinals.append(int(due.ordinal[0]))
            drawn.append(bool(due.draw[0]))
            takes.append(int(due.takes[0]))
    assert took == [4, 2, 2, 2, 4, 4, 4, 4]
    assert takes == [2, 2, 2, 4, 4, 4, 4, 4]
    assert ordinals == list(range(8))
    assert drawn == [True] * 3 + [False] * 5
    assert phases == [Phase.LEARN] * 5 + [Phase.EXPLOIT] * 3


def test_samples_of_many_keys_in_one_call_are_sorted_out_in_their_order() -> None:
    loop = loop_of(some_keys(3))
    # Key 1 is first slow, then as usual: the two halves are told apart by their order alone.
    alarms = observed(loop, [1, 0, 1, 2, 1, 0, 1, 0, 0], [3, 5, 3, 7, 3, 5, 3, 5, 5])
    assert alarms == []
    assert loop.evidence.baseline[:2].tolist() == [5, 3]
    assert loop.need.tolist() == [0, 0, 3]
    observed(loop, [2] * 3, 7)
    assert loop.evidence.baseline[2] == 7


def test_a_late_sample_of_an_older_action_is_counted_and_not_used() -> None:
    loop = loop_of(some_keys(2))
    observed(loop, [0, 1] * 4, 3.0)
    decided(loop, pair(1))
    observed(loop, [0, 0, 0, 1], 9.0, action=OWN_ACTION)
    assert loop.late == 4
    assert loop.need.tolist() == [2, 2]
    assert loop.evidence.samples.sum() == 8
    assert loop.evidence.baseline.tolist() == [3, 3]
    assert loop.measured.tolist() == [7, 5], "the keys have run, whatever was wanted"
    # In one call with samples that do count.
    observed(loop, [0, 0, 0], [2.0, 9.0, 2.0], action=np.array([pair(1), OWN_ACTION, pair(1)]))
    assert loop.late == 5
    assert _due(loop) == [0]
    assert loop.evidence.mean(np.array([0]), np.array([pair(1)])).tolist() == [2.0]


def test_what_runs_on_after_a_decision_is_over_does_not_count_for_the_next_one() -> None:
    loop = loop_of(some_keys(1))
    observed(loop, [0] * 4, 3.0)
    # Nobody has decided yet, and NCCL's own choice is still in force.
    observed(loop, [0], 3.4)
    assert loop.need[0] == 0
    decided(loop, pair(1))
    assert loop.need[0] == 2
    observed(loop, [0], 2.0)
    assert _due(loop) == []
    observed(loop, [0], 2.0)
    assert loop.evidence.samples[0, [OWN_ACTION, pair(1)]].tolist() == [5, 2]
    assert loop.evidence.mean(np.array([0]), np.array([pair(1)])).tolist() == [2.0]
    assert loop.evidence.baseline[0] == pytest.approx(3 + 0.4 / 5)


def test_a_decision_may_bring_more_samples_than_it_takes() -> None:
    loop = loop_of(some_keys(1))
    observed(loop, [0] * 9, 3.0)
    assert loop.evidence.samples[0, OWN_ACTION] == 9
    decided(loop, pair(1))
    assert loop.need[0] == 2


# -- noise --


def test_one_slow_collective_says_little() -> None:
    loop = loop_of(some_keys(2))
    observed(loop, [0] * 4, [3, 3, 3, 9])
    # No more than four of the usual standard deviations above the median.
    assert loop.evidence.baseline[0] == pytest.approx(3 + 4 * 0.02 / 4)
    # Of two the lesser counts; one that is fast is believed.
    observed(loop, [1] * 4, [3, 3, 3, 1])
    assert loop.evidence.baseline[1] == pytest.approx(2.5)
    decided(loop, pair(1), pair(1))
    observed(loop, [0, 0], [9, 2])
    noise = loop.evidence.noise[0]
    assert 2 < loop.evidence.last[0] < 2 + 4 * noise


def test_however_many_samples_a_decision_brings_their_mean_is_not_biased() -> None:
    """Where the limit lies must not depend on how many there are: the least of 2,000 is far below their mean."""
    loop = loop_of(some_keys(1))
    rng = np.random.default_rng(0)
    for batch in (4, 2, 2, 2, 4, 4, 50, 50, 2000, 2000, 2000):
        assert observed(loop, [0] * batch, 3 + 0.05 * rng.standard_normal(batch)) == []
        decided(loop, OWN_ACTION)
    assert loop.evidence.baseline[0] == pytest.approx(3, abs=5 * 0.05 / np.sqrt(6000))
    assert loop.evidence.noise[0] == pytest.approx(0.05, rel=0.03)


# -- drift --


def _settled(*parts: Keys, rows: list[int] | None = None, **settings: Any) -> Loop:
    """All keys, or some rows, have settled on pair 1, which takes exp(2.9) us to NCCL's own exp(3)."""
    loop = loop_of(*parts, **settings)
    play(loop, SETTLED + 6, _times(), sigma=0.01, rows=rows, drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert (loop.phase[rows or slice(None)] == Phase.EXPLOIT).all()
    assert (loop.wanted[rows or slice(None)] == pair(1)).all()
    return loop


def _times(*slow: int) -> Any:
    """Everything takes half as long again on some rows."""
    return lambda row, action: (2.9 if action == pair(1) else 3.0) + 0.4 * (row in slow)


def _shift(loop: Loop, *rows: int) -> list[int]:
    """The network of these rows has shifted; the rows that alarm."""
    return sorted(a.row for a in play(loop, 8, _times(*rows), sigma=0.01, rows=rows, seed=1))


def test_an_alarm_begins_its_key_anew_and_no_other() -> None:
    loop = _settled(some_keys(8))
    noise, shift = np.random.default_rng(1).standard_normal(16), np.repeat([0.0, 0.4], 8)
    alarms = observed(loop, [2] * 16, 2.9 + shift + 0.01 * noise)
    assert [alarm.row for alarm in alarms] == [2]
    assert 8 <= alarms[0].sample < 16, "a collective after the shift"
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
    play(loop, SETTLED, _times(2), sigma=0.01, rows=[2], drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert (loop.phase[2], loop.wanted[2]) == (Phase.EXPLOIT, pair(1))


def test_what_raised_an_alarm_is_of_neither_network_and_not_learned_from() -> None:
    loop = _settled(some_keys(8))
    before = (loop.evidence.freedom[0], loop.evidence.square[0], loop.evidence.last[0])
    assert len(observed(loop, [0] * 16, 3.3)) == 1
    assert (loop.evidence.freedom[0], loop.evidence.square[0], loop.evidence.last[0]) == before
    observed(loop, [0] * 4, 3.4)
    assert loop.evidence.samples[0].sum() == 4
    assert loop.evidence.ratio(np.array([0]))[0, 1, 0] == pytest.approx(-0.1, abs=0.01), "the hint has none of it"


def test_an_alarm_says_which_collective_raised_it() -> None:
    """Also where it was observed in an earlier call, or among those of other keys and late ones."""
    for earlier, later, sample in (([2.9, 2.9, 2.9], [2.9, 9.0, 2.9], 1), ([2.9, 2.9, 9.0], [2.9, 9.0, 9.0], -1)):
        loop = _settled(some_keys(8))
        # One collective that is far off is enough.
        loop.cusum.h = 1.0
        assert observed(loop, [1] * 3, earlier) == []
        (alarm,) = observed(loop, [0, 1, 0], later, action=np.array([OWN_ACTION, pair(1), pair(1)]))
        assert (alarm.row, alarm.sample) == (1, sample)
        assert loop.late == 1


def test_a_network_has_shifted_for_all_keys_of_a_communicator_when_a_quarter_say_so() -> None:
    # Key 7 has never run, and key 6 still draws.
    loop = _settled(some_keys(8), some_keys(8, group=1), rows=[*range(6), *range(8, 16)])
    play(loop, 2, _times(), sigma=0.01, rows=[6])
    other = loop.evidence.samples[8:].copy()
    assert _shift(loop, 0) == [0]
    assert loop.shifts.tolist() == [1] + [0] * 15
    # The second of seven that run.
    observed(loop, [6], 3.0)
    observed(loop, [3] * 8, 3.3)
    assert loop.shifts.tolist() == [1] * 7 + [0] * 9, "the first has begun anew once, and what never ran has not"
    assert (loop.phase[1:8] == Phase.BASELINE).all()
    assert (loop.wanted[1:8] == OWN_ACTION).all()
    assert loop.need[1:8].tolist() == [4] * 7, "what had been measured of open decisions is gone"
    assert (loop.phase[8:] == Phase.EXPLOIT).all()
    assert (loop.evidence.samples[8:] == other).all()


def test_alarms_that_are_far_apart_do_not_agree() -> None:
    loop = _settled(some_keys(8))
    assert _shift(loop, 0) == [0]
    observed(loop, np.zeros(70, np.int64), 3.4, action=N_ACTIONS - 1)
    assert loop.late >= 70
    observed(loop, [3] * 8, 3.3)
    assert loop.shifts.tolist() == [1, 0, 0, 1, 0, 0, 0, 0]


def test_no_key_of_another_communicator_begins_anew_whatever_happened_there() -> None:
    """The last alarm there is recent, and half of its keys have been forgotten since."""
    loop = _settled(some_keys(8), some_keys(8, group=1))
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
    loop = _settled(some_keys(8))
    observed(loop, [0] * 4, 2.9)
    assert _due(loop) == [0]
    assert _cusum(loop) == 0, "once it has settled, nobody is asked"
    decided(loop)
    fresh = loop_of(some_keys(1))
    observed(fresh, [0] * 4, 3.0)
    assert _cusum(fresh) == 0, "the first baseline is no shift"
    play(loop, 1, _times(*range(8)), sigma=0.01, rows=range(8))
    assert (loop.phase == Phase.BASELINE).all()
    observed(loop, [0] * 4, 3.4)
    assert _due(loop) == [0]
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


# -- decisions --


def test_what_is_due_stays_the_same_until_it_is_decided_or_more_is_observed() -> None:
    loop = loop_of(some_keys(3))
    observed(loop, [0, 2] * 4, 3.0)
    decided(loop, pair(1), pair(2))
    observed(loop, [0, 2] * 2, 3.1)
    first = loop.due()
    _assert_same(first, loop.due())
    # It is a copy: nothing that happens later changes it.
    kept = loop.due()
    loop.decide(first.row[:1], np.array([pair(3)]))
    assert _due(loop) == [2]
    _assert_same(first, kept)
    _assert_same(first.part(np.array([1])), loop.due())


def _contested() -> Loop:
    """Three keys that draw: on the first pair 2 is behind pair 1, on the third pair 1 is behind pair 2."""
    loop = loop_of(some_keys(3), draws=8)
    best = {0: pair(1), 1: OWN_ACTION, 2: pair(2)}
    for drawn in (OWN_ACTION, pair(1), pair(2), pair(1)):
        play(loop, 1, lambda row, action: 2.5 if action == best[row] else 3.0, drawn=lambda _, a=drawn: np.full(3, a))
    observed(loop, [0, 1, 2] * 2, [2.5, 3.0, 3.0] * 2)
    return loop


def test_what_is_behind_with_confidence_gives_way_to_the_best() -> None:
    due = _contested().due()
    assert due.draw.all()
    assert due.fixed.tolist() == [pair(1), OWN_ACTION, pair(2)]
    assert due.actions(np.full(3, pair(1))).tolist() == [pair(1), OWN_ACTION, pair(2)]
    assert due.actions(np.full(3, pair(2))).tolist() == [pair(1), OWN_ACTION, pair(2)]
    assert due.actions(np.full(3, pair(3))).tolist() == [pair(3)] * 3, "what was never measured is not behind"
    drawn = np.full(3, pair(2))
    due.actions(drawn)
    assert drawn.tolist() == [pair(2)] * 3, "what was drawn is left alone"


def test_a_part_of_what_is_due_is_that_part_in_the_order_asked_for() -> None:
    due = _contested().due()
    for chosen in ([2, 0], [1], [], [0, 1, 2]):
        of = due.part(np.array(chosen, np.int64))
        assert of.row.tolist() == chosen
        np.testing.assert_array_equal(of.observation, due.observation[chosen])
        np.testing.assert_array_equal(of.outcome.log_speedup, due.outcome.log_speedup[chosen])
        for drawn in (pair(1), pair(2), pair(3)):
            whole = due.actions(np.full(3, drawn))
            assert of.actions(np.full(len(chosen), drawn)).tolist() == whole[chosen].tolist()
        assert of.part(np.arange(len(chosen))).behind.tolist() == of.behind.tolist()
    # A part of a part, and one without the keys that have something behind.
    twice = due.part(np.array([2, 0, 1])).part(np.array([1]))
    assert (twice.row.tolist(), twice.actions(np.array([pair(2)])).tolist()) == ([0], [pair(1)])
    assert due.part(np.array([1])).behind[:, 0].tolist() == [0] * len(due.part(np.array([1])).behind)


def test_keys_that_draw_and_keys_that_do_not_are_decided_together() -> None:
    loop = loop_of(some_keys(2))
    play(loop, SETTLED, lambda row, action: 3.0, rows=[0])
    observed(loop, [0, 0, 0, 0, 1, 1, 1, 1], 3.0)
    due = loop.due()
    assert due.draw.tolist() == [False, True]
    assert due.actions(np.array([pair(7)])).tolist() == [OWN_ACTION, pair(7)]
    assert not due.observation[0].any(), "nobody looks at it"
    assert due.observation[1].any()


def test_what_may_be_the_best_is_compared_by_what_was_measured_least() -> None:
    loop = loop_of(some_keys(1), draws=3, compares=4)
    observed(loop, [0] * 4, 3.0)
    for action, time in ((pair(1), 2.9), (pair(2), 2.9), (pair(3), 3.5)):
        decided(loop, action)
        observed(loop, [0] * 2, time)
    compared = []
    for _ in range(4):
        decided(loop)
        compared.append(int(loop.wanted[0]))
        observed(loop, [0] * 4, 2.9)
    # In turn, of two collectives each at first; NCCL's own choice and pair 3 are behind.
    assert compared == [pair(1), pair(2), pair(1), pair(2)]
    decided(loop)
    assert loop.phase[0] == Phase.EXPLOIT
    assert loop.wanted[0] == pair(1)


def test_the_guardrail_holds_while_drawing_comparing_and_exploiting() -> None:
    """Pair 1 is slower by 5 %, and still it is drawn whenever it may be."""
    loop = loop_of(some_keys(1), draws=12, compares=3, guardrail={"samples": 8, "margin": 0.02})

    def stubborn(due: Due) -> Int64:
        allowed = part(due.observation[due.draw], "valid_channels")[:, 1, 0] > 0
        return np.where(allowed, pair(1), pair(2))

    wanted = []
    for _ in range(40):
        play(loop, 1, lambda row, action: 3.05 if action == pair(1) else 3.0, drawn=stubborn)
        wanted.append(int(loop.wanted[0]))
    # Two samples each: after four decisions there are eight, and what is behind may be left before that.
    assert 1 <= wanted.count(pair(1)) <= 4
    assert wanted[:5].count(pair(1)) == wanted.count(pair(1))
    assert loop.phase[0] == Phase.EXPLOIT

    # Even where it looks best by what it was once: it is NCCL's own choice that has become better.
    loop = loop_of(some_keys(1), guardrail={"samples": 4, "margin": 0.02})
    observed(loop, [0] * 4, 3.0)
    decided(loop, pair(1))
    observed(loop, [0] * 6, 2.95)
    loop.evidence.baseline[0] = 2.8
    for _ in range(10):
        assert not loop.allowed(np.array([0]))[0, 1, 0, 0]
        assert loop.due().fixed.tolist() == [OWN_ACTION]
        decided(loop, OWN_ACTION)
        observed(loop, [0] * 4, 3.0)
        loop.evidence.baseline[0] = 2.8


def test_a_draw_that_would_repeat_what_is_known_goes_to_a_pair_that_nobody_has_tried() -> None:
    loop = loop_of(some_keys(2), draws=20)
    # NCCL believes in pairs 2 and 3, in 3 more; 4 is far behind, and 5 is not offered.
    loop.keys.cost[0, [2, 3, 4]] = 0.8, 0.3, 1.5
    loop.keys.cost[0, 5], loop.forbidden[0, 5] = 0.0, True
    wanted: list[list[int]] = []
    observed(loop, np.repeat([0, 1], 4), 3.0)
    for _ in range(12):
        due = loop.due()
        loop.decide(due.row, due.actions(np.full(due.draw.sum(), pair(1))))
        wanted.append(loop.wanted.tolist())
        observed(loop, np.repeat([0, 1], 2), np.repeat(np.where(loop.wanted == pair(1), 2.9, 3.2), 2))
    of_first, of_second = zip(*wanted, strict=True)
    # Four draws of two samples say enough.
    assert of_first[:6] == (pair(1),) * 4 + (pair(3), pair(2))
    assert set(of_first[6:]) == {pair(1)}, "each is tried once"
    assert set(of_second) == {pair(1)}
    # Of part of the keys the same.
    part_of = loop.due().part(np.array([1]))
    assert part_of.known.tolist() == [[0, OWN_ACTION], [0, pair(1)]] or part_of.known.tolist() == [[0, pair(1)]]
    assert part_of.untried.tolist() == [-1]
    # After a shift nothing has been tried.
    loop.shift(np.array([0]))
    observed(loop, [0] * 4, 3.0)
    assert loop.due().untried[0] == pair(3)


def test_the_guardrail_is_for_one_chunk_and_masks_a_value_once_all_that_it_is_part_of_is_worse() -> None:
    loop = loop_of(some_keys(1), draws=8 * N_CHUNKS)
    rows, slow = np.array([0]), [int(flat_action(5, 2, chunk)) for chunk in range(N_CHUNKS)]
    observed(loop, [0] * 4, 3.0)
    for n, action in enumerate(slow, 1):
        decided(loop, action)
        observed(loop, [0] * 8, 3.5)
        # What was drawn all the same gives way to the best.
        due = loop.due()
        assert due.actions(np.array([action])).tolist() == [OWN_ACTION]
        allowed, seen = loop.allowed(rows)[0], part(due.observation[0], "valid_channels")
        assert allowed[5, 2].sum() == N_CHUNKS - n
        assert allowed.sum() == loop.keys.channels.sum() * N_CHUNKS - (N_PAIRS > 0) * (N_CHUNKS - 1) - n
        assert (seen[5, 2] > 0) == (n < N_CHUNKS)
        assert seen[5].sum() >= len(CHANNEL_VALUES) - 1
        assert (part(due.observation[0], "valid_chunks")[5] > 0).all(), "with other channels"
    # Of NCCL's own choice too it is known, and that is always allowed.
    assert allowed[OWN_PAIR, 0, 0]


def test_a_hint_alone_never_makes_the_guardrail_forbid() -> None:
    """However noisy: what was slower before a shift may be faster after it."""
    loop = loop_of(some_keys(1), guardrail={"samples": 1, "margin": 0.0})
    rows = np.array([0])
    observed(loop, [0] * 4, 3.0)
    decided(loop, pair(1))
    observed(loop, [0] * 400, 9 + np.random.default_rng(0).standard_normal(400))
    assert loop.evidence.noise[0] > 0.5
    assert not loop.allowed(rows)[0, 1, 0, 0]
    loop.shift(rows)
    observed(loop, [0] * 4, 3.0)
    assert loop.allowed(rows)[0, 1, 0, 0]


# -- what may be chosen --


def test_what_nccl_does_not_offer_is_not_chosen_and_its_costs_are_seen() -> None:
    loop = loop_of(some_keys(2))
    cost = np.full(N_PAIRS - 1, -1.0, np.float32)
    cost[[3, 5]] = 20.0, 20.0 * np.e
    loop.offer(1, cost)
    allowed = loop.allowed(np.array([0, 1])).any(-1)
    assert np.flatnonzero(allowed[1].any(-1)).tolist() == [OWN_PAIR, 4, 6]
    assert allowed[0].any(-1).all(), "the other key's are its own"
    assert loop.keys.cost[1].tolist() == pytest.approx(np.eye(N_PAIRS)[6].tolist())
    observed(loop, [1] * 4, 3.0)
    pairs = part(loop.due().observation[0], "pairs")
    assert pairs[:, PAIR_FIELDS.index("available")].tolist() == np.isin(np.arange(N_PAIRS), [0, 4, 6]).tolist()
    assert pairs[6, PAIR_FIELDS.index("cost")] == pytest.approx(1 / 4)
    # A lone rank's costs are 0; and where nothing is offered, NCCL is left alone.
    loop.offer(0, np.zeros(N_PAIRS - 1, np.float32))
    assert loop.keys.cost[0].tolist() == [0] * N_PAIRS
    loop.offer(0, np.full(N_PAIRS - 1, -1.0, np.float32))
    assert np.argwhere(loop.allowed(np.array([0]))[0]).tolist() == [[OWN_PAIR, 0, 0]]


def test_what_nccl_did_not_take_is_never_asked_for_again_even_if_it_is_offered() -> None:
    loop = loop_of(some_keys(1))
    loop.keys.channels[0, OWN_PAIR] = True
    loop.forbid(0, int(flat_action(4, 2, 1)))
    loop.forbid(0, int(flat_action(OWN_PAIR, 3, 0)))
    loop.forbid(0, OWN_ACTION)
    loop.offer(0, np.ones(N_PAIRS - 1, np.float32))
    allowed = loop.allowed(np.array([0])).any(-1)[0]
    assert not allowed[4].any()
    assert np.flatnonzero(~allowed[OWN_PAIR]).tolist() == [3]
    assert allowed[[1, 2, 3, 5]].all()


def test_no_more_channels_are_asked_for_than_the_communicator_has() -> None:
    loop = loop_of(some_keys(2))
    loop.most_channels[1] = 4
    allowed = loop.allowed(np.array([0, 1])).any(-1)
    assert allowed[0, 1].all()
    assert np.array(CHANNEL_VALUES)[allowed[1, 1]].tolist() == [0, 1, 2, 4]


def test_the_best_of_what_was_measured_is_not_chosen_once_it_is_forbidden() -> None:
    loop = _settled(some_keys(1))
    loop.forbid(0, pair(1))
    observed(loop, [0] * 4, 2.9)
    decided(loop)
    assert loop.wanted[0] == OWN_ACTION


# -- outcomes --


def test_what_came_of_a_decision() -> None:
    loop = loop_of(some_keys(1), draws=8)

    def outcome(action: int, time: float) -> tuple[bool, float, bool, bool, float]:
        decided(loop, action)
        observed(loop, [0] * 2, time)
        found = loop.due().outcome
        return tuple(getattr(found, f.name)[0] for f in fields(found))

    observed(loop, [0] * 4, 3.0)
    assert not loop.due().outcome.known[0], "a baseline is nobody's decision"
    # Known, log of the speedup, switched, probed, log over the fastest.
    assert outcome(pair(1), 2.9) == (True, pytest.approx(0.1), True, True, pytest.approx(0))
    assert outcome(pair(1), 2.9) == (True, pytest.approx(0.1), False, False, pytest.approx(0))
    # Noise of 0.02 at two samples: 3.0 is within two standard errors of what 2.9 is known by, or it gives way.
    loop.evidence.square[0] = 1.0
    assert outcome(OWN_ACTION, 3.0) == (True, pytest.approx(0), True, False, pytest.approx(0.1))
    assert outcome(int(flat_action(1, 2, 0)), 3.2) == (True, pytest.approx(-0.2), True, True, pytest.approx(0.3))


def test_the_outcome_is_judged_by_the_baseline_that_was_known_before_it() -> None:
    loop = loop_of(some_keys(1))
    observed(loop, [0] * 4, 3.0)
    decided(loop, OWN_ACTION)
    observed(loop, [0] * 2, 3.06)
    assert loop.due().outcome.log_speedup[0] == pytest.approx(-0.06)
    assert loop.evidence.baseline[0] == pytest.approx(3.02)


def test_nothing_came_of_a_decision_that_a_shift_cut_short() -> None:
    loop = _settled(some_keys(4))
    # Key 1 is over and waits; key 0 then alarms, for all four.
    observed(loop, [1] * 4, 2.9)
    assert loop.due().outcome.known.tolist() == [True]
    observed(loop, [0] * 8, 3.3)
    assert loop.shifts.tolist() == [1] * 4
    observed(loop, np.repeat(np.arange(4), 4), 3.4)
    due = loop.due()
    assert due.row.tolist() == [0, 1, 2, 3]
    assert not due.outcome.known.any()
    # An action that was tried before the shift is no probe after it, and congestion starts anew.
    decided(loop, pair(1))
    observed(loop, np.repeat(np.arange(4), 2), 3.3)
    outcome = loop.due().outcome
    assert outcome.known.all()
    assert outcome.switched.all()
    assert not outcome.probed.any()
    assert outcome.congestion.tolist() == pytest.approx([0] * 4)


# -- keys that come and go --


def _random_play(loop: Loop, rng: np.random.Generator, rows: Int64, rounds: int) -> None:
    """Any number of samples of each row; what is due is decided by the row and its ordinal alone."""
    for _ in range(rounds):
        row = np.repeat(rows, rng.integers(0, 5, len(rows)))
        observed(loop, row, 3 - 0.01 * action_parts(loop.wanted[row])[0] + 0.01 * rng.standard_normal(len(row)))
        due = loop.due()
        drawn = pair(1) * (1 + (due.row + due.ordinal) % 6)
        loop.decide(due.row, due.actions(drawn[due.draw]))


def test_a_key_that_comes_later_changes_nothing_for_the_others() -> None:
    loops = [loop_of(some_keys(4), some_keys(2, group=1)) for _ in range(2)]
    rngs = [np.random.default_rng(0) for _ in loops]
    rows = np.arange(6)
    for step in range(12):
        for loop, rng in zip(loops, rngs, strict=True):
            _random_play(loop, rng, rows, 1)
        if step == 4:
            # One between the others, and one of a communicator that is new.
            loops[1].grow(some_keys(1, first=9))
            loops[1].grow(some_keys(1, group=2))
        for name in ("phase", "wanted", "decisions", "need", "measured", "idle"):
            np.testing.assert_array_equal(getattr(loops[1], name)[:6], getattr(loops[0], name), err_msg=name)
        # Sums over more keys are rounded elsewhere.
        views = [vars(loop.view(rows, loop.allowed(rows))) for loop in loops]
        for name, value in views[0].items():
            np.testing.assert_allclose(views[1][name], value, atol=1e-6, err_msg=name)
    assert loops[0].phase.max() > Phase.BASELINE
    assert (loops[1].phase[6:], loops[1].need[6:]) == (pytest.approx([0, 0]), pytest.approx([4, 4]))


def test_what_is_kept_goes_on_as_if_nothing_had_happened() -> None:
    """With samples of open decisions, and decisions that wait."""
    loops = [loop_of(some_keys(4), some_keys(2, group=1), draws=20) for _ in range(2)]
    kept = np.array([False, False, True, True, False, True])
    for loop in loops:
        _random_play(loop, np.random.default_rng(1), np.arange(6), 10)
        # Open decisions of all, and some that are over: of one key that stays and one that does not.
        observed(loop, np.arange(6), 3.1)
        observed(loop, np.repeat([1, 3], 4), 3.1)
    whole, part_of = loops
    assert len(_due(whole)) >= 2
    assert ((whole.need > 0) & kept).any()
    part_of.keep(kept)
    assert len(part_of) == 3
    assert part_of.need.tolist() == whole.need[kept].tolist()
    before, after = whole.due(), part_of.due()
    mine = np.flatnonzero(kept[before.row])
    moved = np.cumsum(kept) - 1
    expected = before.part(mine)
    assert after.row.tolist() == moved[expected.row].tolist()
    for name in ("identity", "ordinal", "shifts", "draw", "fixed", "takes", "behind"):
        np.testing.assert_array_equal(getattr(after, name), getattr(expected, name), err_msg=name)
    for name, value in vars(expected.outcome).items():
        np.testing.assert_array_equal(getattr(after.outcome, name), value, err_msg=name)
    assert after.outcome.known.any()
    assert len(after.behind)
    # Alone on its communicator, the last key has lost nobody that lent to it.
    for loop, rows in ((whole, np.flatnonzero(kept)), (part_of, np.arange(3))):
        for _ in range(4):
            observed(loop, np.repeat(rows, 2), 3.0)
            due = loop.due()
            loop.decide(due.row, due.fixed)
    assert part_of.wanted.tolist() == whole.wanted[kept].tolist()
    assert part_of.decisions.tolist() == whole.decisions[kept].tolist()
    np.testing.assert_array_equal(part_of.evidence.samples, whole.evidence.samples[kept])


def test_keys_can_be_joined_and_taken_apart() -> None:
    whole = Keys.join([some_keys(2), some_keys(3, group=1)])
    assert len(whole) == 5
    assert len(Keys.join([])) == 0
    part_of = whole.part(np.array([4, 0]))
    assert part_of.group.tolist() == [1, 0]
    assert part_of.identity.tolist() == whole.identity[[4, 0]].tolist()
    assert part_of.channels.dtype == np.bool_


# -- durability --


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return dict(np.load(file, allow_pickle=False))


def test_a_successor_goes_on_where_the_state_was_saved() -> None:
    first = loop_of(some_keys(4), some_keys(2, group=1), draws=8)
    _random_play(first, np.random.default_rng(2), np.arange(6), 12)
    play(first, 20, _times(0), sigma=0.01, rows=[1, 2])
    first.forbid(3, pair(5))
    first.most_channels[:4] = 8
    observed(first, np.repeat(np.arange(6), 4), 3.0)
    waiting = _due(first)
    assert waiting
    second = loop_of(some_keys(4), some_keys(2, group=1), draws=8)
    second.restore(_through_a_file(first.state()))
    assert _due(second) == waiting
    one, other = first.due(), second.due()
    assert not other.outcome.known.any(), "what came of them has been told, or never will be"
    for field in fields(Due):
        if field.name != "outcome":
            np.testing.assert_array_equal(getattr(other, field.name), getattr(one, field.name), err_msg=field.name)
    for loop in (first, second):
        due = loop.due()
        loop.decide(due.row, due.fixed)
        _random_play(loop, np.random.default_rng(3), np.arange(6), 12)
    for name in ("phase", "wanted", "decisions", "shifts", "measured", "idle", "need"):
        np.testing.assert_array_equal(getattr(second, name), getattr(first, name), err_msg=name)
    np.testing.assert_array_equal(second.evidence.samples, first.evidence.samples)
    np.testing.assert_array_equal(second.cusum.score, first.cusum.score)


def test_what_had_been_measured_of_an_open_decision_is_measured_anew() -> None:
    first, second = loop_of(some_keys(1)), loop_of(some_keys(1))
    observed(first, [0] * 4, 3.0)
    decided(first, pair(1))
    observed(first, [0], 2.0)
    assert first.need.tolist() == [1]
    second.restore(_through_a_file(first.state()))
    assert second.need.tolist() == [2]
    assert (second.wanted[0], second.phase[0]) == (pair(1), Phase.LEARN)


@pytest.mark.parametrize("mask", ["channels", "chunks"])
def test_a_key_whose_action_is_no_longer_allowed_begins_anew(mask: str) -> None:
    first = loop_of(some_keys(3), draws=8)
    observed(first, np.repeat(np.arange(3), 4), 3.0)
    action = int(flat_action(5, 2, 3))
    decided(first, action, pair(5), OWN_ACTION)
    observed(first, np.repeat(np.arange(3), 2), 2.5)
    keys = some_keys(3)
    if mask == "channels":
        keys.channels[:, 5, 2] = False
    else:
        keys.chunks[:, 5, 3] = False
    second = loop_of(keys, draws=8)
    second.restore(_through_a_file(first.state()))
    assert second.phase.tolist() == [Phase.BASELINE, Phase.LEARN, Phase.LEARN]
    assert second.wanted.tolist() == [OWN_ACTION, pair(5), OWN_ACTION]
    assert second.shifts.tolist() == [1, 0, 0]
    assert _due(second) == [1, 2]


def test_the_best_of_before_is_not_chosen_where_the_settings_no_longer_allow_its_chunk() -> None:
    """The action in force is another one, so that the key does not begin anew."""
    small = int(flat_action(5, 0, 3))
    first = loop_of(some_keys(1), draws=8)
    observed(first, [0] * 4, 3.0)
    for action, time in ((small, 2.0), (pair(5), 2.9)):
        decided(first, action)
        # Both may be chosen: of so few samples, nothing is behind.
        first.wanted[0] = action
        observed(first, [0] * 2, time)
    assert first.due().fixed.tolist() == [small]
    keys = some_keys(1)
    keys.chunks[0, 5, 3] = False
    second = loop_of(keys, draws=8)
    second.restore(_through_a_file(first.state()))
    assert second.due().fixed.tolist() == [pair(5)]
    assert second.due().actions(np.array([OWN_ACTION])).tolist() == [pair(5)], "the baseline is behind"


# -- nothing --


def test_a_loop_without_keys_has_nothing_to_do() -> None:
    loop = Loop(Control())
    assert observed(loop, np.zeros(0, np.int64), np.zeros(0)) == []
    assert _due(loop) == []
    loop.decide(np.zeros(0, np.int64), np.zeros(0, np.int64))
    loop.grow(some_keys(0))
    loop.shift(np.zeros(0, np.int64))
    assert len(loop) == 0
    again = Loop(Control())
    again.restore(_through_a_file(loop.state()))
    assert len(again) == 0
