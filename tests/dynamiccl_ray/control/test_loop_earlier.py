"""What earlier runs measured, in the control loop: what a key is spared, and what it does if they were wrong."""

from __future__ import annotations

import numpy as np
import pytest
from looped import exploiting, loop_of, pair, play, some_keys

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.control.loop import Keys, Phase


def test_where_an_earlier_run_says_something_of_a_key_it_draws_less_often() -> None:
    keys = some_keys(2)
    keys.earlier[0, 2] = 0.1
    loop = loop_of(keys, draws=30, earlier_share=0.5, adapt_share=0.2)
    assert loop.draws().tolist() == [15, 30]
    loop.shift(np.array([0, 1]))
    assert loop.draws().tolist() == [6, 6]


@pytest.mark.parametrize(
    ("off", "noise", "draws"), [(0.0, np.nan, 9), (0.02, np.nan, 9), (0.2, np.nan, 27), (0.2, 0.02, 27), (0.2, 0.4, 9)]
)
def test_a_key_draws_three_times_as_often_where_an_earlier_run_turns_out_to_be_wrong(
    off: float, noise: float, draws: int
) -> None:
    """Not where what it is off by may be the noise that it knew."""
    keys = some_keys(3)
    keys.noise[:] = noise
    keys.earlier[:2, 1:4] = 0.1
    loop = loop_of(keys, draws=30, earlier_share=0.3)
    tried = 3.1 + off
    play(
        loop,
        8,
        lambda _, action: 3.0 if action == OWN_ACTION else tried,
        drawn=lambda due: np.full(due.draw.sum(), pair(2)),
    )
    assert loop.draws().tolist() == [draws, draws, 30]
    again = loop_of(keys, draws=30, earlier_share=0.3)
    again.restore(loop.state())
    assert again.draws().tolist() == [draws, draws, 30]


@pytest.mark.parametrize("off", [0.0, 0.5])
def test_what_was_hopeless_in_an_earlier_run_is_measured_once_unless_that_run_was_wrong(off: float) -> None:
    keys = some_keys(2)
    keys.earlier[0, 1:4] = -1.0
    keys.lead[0] = 1.0
    loop, asked = loop_of(keys, draws=8, draw_samples=1, earlier_share=1.0), []
    assert loop.need.tolist() == [1, 4]
    for _ in range(12):
        asked.append(np.repeat(loop.wanted[0], loop.need[0]))
        play(
            loop,
            1,
            lambda _, action: {OWN_ACTION: 4.0, pair(1): 3.0 + off, pair(2): 3.1 + off}.get(action, 3.6),
            drawn=lambda due: np.full(due.draw.sum(), pair(1 + len(asked) % 2)),
        )
    own = np.count_nonzero(np.concatenate(asked) == OWN_ACTION)
    # Where it was wrong: what the baseline was spared, and the last draw.
    assert own == (1 if off == 0 else 5)
    if off == 0:
        assert asked[8].tolist() == [pair(1)], "the last draw, of the best"


def _hopeless() -> Keys:
    """Two keys; of the first an earlier run knows something that was far ahead of NCCL's own choice, but not what."""
    keys = some_keys(2)
    keys.lead[0] = 1.0
    return keys


def test_what_earlier_runs_got_wrong_is_not_held_against_a_model_that_says_nothing_yet() -> None:
    keys = some_keys(2)
    keys.earlier[:, 1:6] = 1.5
    loop = loop_of(keys, draws=30)
    for i in range(1, 6):
        play(loop, 1, lambda _, action: 3.0, drawn=lambda due, of=i: np.full(due.draw.sum(), pair(of)))
    assert loop.misled.tolist() == [1, 1]
    assert loop.mistaken.tolist() == [0, 0]


def test_what_was_hopeless_in_an_earlier_run_does_not_contend_however_lucky_it_was_once() -> None:
    loop = exploiting(_hopeless())
    loop._check(np.array([0, 1]))
    assert (loop.checks.actions == OWN_ACTION).any(1).tolist() == [False, True]


@pytest.mark.parametrize("change", [0.0, 0.5])
def test_a_network_that_changes_while_a_key_learns_is_noticed_where_the_last_draw_is_of_the_best(change: float) -> None:
    loop = loop_of(_hopeless(), draws=8, draw_samples=1)
    times = lambda action, more: {OWN_ACTION: 4.0, pair(1): 3.0, pair(2): 3.1}.get(action, 3.6) + more  # noqa: E731
    for rounds, drawn, by in ((5, pair(1), 0.0), (3, pair(2), change)):
        play(
            loop,
            rounds,
            lambda _, action, more=by: times(action, more),
            drawn=lambda due, of=drawn: np.full(due.draw.sum(), of),
            rows=[0],
        )
    assert (loop.decisions[0], loop.wanted[0]) == (8, pair(1)), "the last draw"
    play(loop, 1, lambda _, action: times(action, change), rows=[0])
    assert (loop.phase[0] == Phase.CHECK) == (change > 0)
