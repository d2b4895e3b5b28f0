"""Keys of the control loop that come, stay, go, and come back from a checkpoint."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from looped import decided, due_rows, loop_of, network, observed, pair, play, some_keys, through_a_file

from dynamiccl_ray.actions import OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.control.loop import Due, Keys, Loop, Phase


def _random_play(loop: Loop, rng: np.random.Generator, rows: Int64, rounds: int) -> None:
    """Any number of samples of each row; what is due is decided by the row and its ordinal alone."""
    for _ in range(rounds):
        row = np.repeat(rows, rng.integers(0, 5, len(rows)))
        observed(loop, row, 3 - 0.01 * action_parts(loop.wanted[row])[0] + 0.01 * rng.standard_normal(len(row)))
        due = loop.due()
        drawn = pair(1) * (1 + (due.row + due.ordinal) % 6)
        loop.decide(due.row, due.actions(drawn[due.draw]))


# -- keys that come and go --


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
    assert len(due_rows(whole)) >= 2
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


def test_a_successor_goes_on_where_the_state_was_saved() -> None:
    first = loop_of(some_keys(4), some_keys(2, group=1), draws=8)
    _random_play(first, np.random.default_rng(2), np.arange(6), 12)
    play(first, 20, network(0), sigma=0.01, rows=[1, 2])
    first.forbid(3, pair(5))
    first.offers.most_channels[:4] = 8
    observed(first, np.repeat(np.arange(6), 4), 3.0)
    waiting = due_rows(first)
    assert waiting
    second = loop_of(some_keys(4), some_keys(2, group=1), draws=8)
    second.restore(through_a_file(first.state()))
    assert due_rows(second) == waiting
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
    second.restore(through_a_file(first.state()))
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
    second.restore(through_a_file(first.state()))
    assert second.phase.tolist() == [Phase.BASELINE, Phase.LEARN, Phase.LEARN]
    assert second.wanted.tolist() == [OWN_ACTION, pair(5), OWN_ACTION]
    assert second.shifts.tolist() == [1, 0, 0]
    assert due_rows(second) == [1, 2]


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
    second.restore(through_a_file(first.state()))
    assert second.due().fixed.tolist() == [pair(5)]
    assert second.due().actions(np.array([OWN_ACTION])).tolist() == [pair(5)], "the baseline is behind"
