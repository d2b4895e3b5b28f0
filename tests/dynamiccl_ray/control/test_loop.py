"""The control loop: each key at its own pace, from its own samples, and what came of its decisions."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from looped import decided, due_rows, exploiting, loop_of, observed, pair, some_keys, through_a_file

from dynamiccl_ray.actions import OWN_ACTION, flat_action
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.control.loop import Loop, Phase
from dynamiccl_ray.control.trigger import BATCH

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
    assert rare in due_rows(loop)
    assert never not in due_rows(loop)


def test_a_key_goes_from_the_baseline_to_drawing_to_comparing_to_the_best_by_samples_alone() -> None:
    loop = loop_of(some_keys(1))
    took, phases, ordinals, drawn, takes = [], [], [], [], []
    samples = 0
    while len(took) < 8:
        needed = int(loop.need[0])
        assert due_rows(loop) == []
        observed(loop, 0, 3.0)
        samples += 1
        assert loop.need[0] == max(needed - 1, 0)
        if due_rows(loop):
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
    assert due_rows(loop) == [0]
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
    assert due_rows(loop) == []
    observed(loop, [0], 2.0)
    assert loop.evidence.samples[0, [OWN_ACTION, pair(1)]].tolist() == [5, 2]
    assert loop.evidence.mean(np.array([0]), np.array([pair(1)])).tolist() == [2.0]
    assert loop.evidence.baseline[0] == pytest.approx(3 + 0.4 / 5)


def test_a_decision_may_bring_more_samples_than_it_takes() -> None:
    loop = loop_of(some_keys(1))
    # What the other keys do meanwhile, all of them have in common: they count as a batch.
    observed(loop, [0] * 90, 3.0 + 0.01 * np.tile([-1, 1], 45))
    assert loop.evidence.samples[0, OWN_ACTION] == BATCH
    assert loop.evidence.baseline[0] == pytest.approx(3.0)
    decided(loop, pair(1))
    assert loop.need[0] == 2
    # Where nothing changes, they say what they say.
    loop = exploiting(some_keys(1))
    known = loop.evidence.samples[0, pair(1)]
    observed(loop, [0] * 90, 2.9 + 0.01 * np.tile([-1, 1], 45))
    assert loop.evidence.samples[0, pair(1)] == known + 90


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
    loop = exploiting(some_keys(4))
    # Key 1 is over and waits.
    observed(loop, [1] * 4, 2.9)
    assert loop.due().outcome.known.tolist() == [True]
    loop.shift(np.arange(4))
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


# -- nothing --


def test_a_loop_without_keys_has_nothing_to_do() -> None:
    loop = Loop(Control())
    assert observed(loop, np.zeros(0, np.int64), np.zeros(0)) == []
    assert due_rows(loop) == []
    loop.decide(np.zeros(0, np.int64), np.zeros(0, np.int64))
    loop.grow(some_keys(0))
    loop.shift(np.zeros(0, np.int64))
    assert len(loop) == 0
    again = Loop(Control())
    again.restore(through_a_file(loop.state()))
    assert len(again) == 0
