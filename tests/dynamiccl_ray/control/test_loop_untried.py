"""What the control loop tries where a draw would only repeat what is known: what nobody has tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from looped import decided, loop_of, observed, own_channels, pair, play, some_keys

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, OWN_ACTION, flat_action
from dynamiccl_ray.control.columns import nothing_expected
from dynamiccl_ray.control.due import untried
from dynamiccl_ray.knobs import N_PAIRS


def test_where_nccl_was_wrong_about_one_pair_the_others_are_tried_once_by_one_key_of_each_size() -> None:
    """NCCL takes pair 2 for e times as slow as its own choice, and pair 3 for four times; pair 2 is faster."""
    loop = loop_of(some_keys(6), draws=60)
    loop.keys.cost[:, 1:] = 9.0
    loop.keys.cost[:, [1, 2, 3]] = 0.0, 1.0, 1.4
    fast = {pair(2): 2.6, OWN_ACTION: 3.0}
    tried = np.zeros(6, np.int64)
    for _ in range(50):
        play(loop, 1, lambda row, action: fast.get(action, 3.3), drawn=lambda due: np.full(due.draw.sum(), pair(2)))
        tried += loop.wanted == pair(3)
    # Sizes are an octave apart; those within two octaves of one that has tried need not.
    assert tried.max() == 1
    assert 1 <= tried.sum() <= 3
    # Where an earlier run has tried, nobody does.
    keys = some_keys(6)
    keys.earlier[:, 3] = 0.3
    loop = loop_of(keys, draws=60)
    loop.keys.cost[:] = 9.0
    loop.keys.cost[:, [1, 2, 3]] = 0.0, 1.0, 1.4
    for _ in range(50):
        play(loop, 1, lambda row, action: fast.get(action, 3.3), drawn=lambda due: np.full(due.draw.sum(), pair(2)))
        assert not (loop.wanted == pair(3)).any()


@pytest.mark.parametrize(("cost", "earlier", "times"), [(0.1, np.nan, 1), (0.5, np.nan, 0), (0.1, 1.5, 0)])
def test_what_nccl_takes_for_nearly_the_best_is_tried_once_whatever_a_model_says(
    cost: float, earlier: float, times: int
) -> None:
    """But not what it takes for half as slow again, nor where an earlier run has measured the pair."""
    keys = some_keys(1)
    keys.prior[0, 2:5] = 1.5
    keys.earlier[0, 3] = earlier
    loop = loop_of(keys, draws=60)
    loop.keys.cost[0, 1:] = 9.0
    loop.keys.cost[0, [1, 3]] = 0.0, cost
    tried = 0
    for _ in range(40):
        of = {pair(1): 2.9, OWN_ACTION: 3.0}
        play(
            loop, 1, lambda row, action, of=of: of.get(action, 3.3), drawn=lambda due: np.full(due.draw.sum(), pair(1))
        )
        tried += int(loop.wanted[0] == pair(3))
    assert tried == times


@pytest.mark.parametrize(
    ("chunk", "forbidden", "action"),
    [
        (0, (), flat_action(1, 0, 0)),
        (2, (), flat_action(1, 0, 2)),
        (2, (0, 2), flat_action(1, 1, 2)),
        (2, (slice(None), 2), flat_action(1, 0, 0)),
        (0, (0, 0), flat_action(1, 1, 0)),
        (0, (slice(None), 0), flat_action(1, 0, 1)),
    ],
)
def test_a_pair_is_tried_with_a_chunk_of_its_own(chunk: int, forbidden: Any, action: int) -> None:
    pairs, none = np.zeros((2, 1, N_PAIRS), np.bool_)
    pairs[0, 1] = True
    allowed = np.ones((1, N_PAIRS, N_CHANNELS, N_CHUNKS), np.bool_)
    if forbidden:
        allowed[(0, 1, *forbidden)] = False
    cost, wrong = np.zeros((1, N_PAIRS), np.float32), np.zeros(1, np.float32)
    chunks = np.zeros((1, N_PAIRS), np.int64)
    chunks[0, 1] = chunk
    assert untried(cost, pairs, none, wrong, allowed, chunks).tolist() == [action]


@pytest.mark.parametrize(("with_the_chunk", "action"), [(-0.3, flat_action(3, 0, 1)), (0.7, -1)])
def test_a_pair_that_a_model_rules_out_but_for_one_chunk_is_tried_with_that(with_the_chunk: float, action: int) -> None:
    keys, prior = some_keys(1), nothing_expected(1)
    keys.cost[0, 3] = 0.5
    prior[0, 3], prior[0, 3, N_CHANNELS + 1] = 0.7, with_the_chunk
    loop = loop_of(replace(keys, prior=prior), draws=20)
    observed(loop, [0] * 4, 3.0)
    assert loop.due().untried.tolist() == [action]


@pytest.mark.parametrize("model", ["none", "wrong", "right"])
def test_where_nobody_knows_one_of_those_that_are_near_tries_a_small_chunk(model: str) -> None:
    keys, small = own_channels(2, small_chunk=True), int(flat_action(1, 0, 2))
    keys.channels[:, 6:] = False
    if model != "none":
        keys.prior[:, 1], keys.prior[:, 2:6] = -0.2, 0.5 if model == "right" else 1.6
    loop = loop_of(keys, draws=20, sequence=6)
    observed(loop, np.repeat([0, 1], 4), 3.0)
    untried = []
    for draw in range(14):
        untried.append(decided(loop, pair(1 + draw if draw < 5 else 1)).untried)
        observed(loop, np.repeat([0, 1], 2), np.repeat(np.where(loop.wanted == pair(1), 2.8, 3.5), 2))
    asked = np.array(untried) == small
    assert not asked[:7].any(), "as in training"
    if model == "right":
        assert not asked.any()
    else:
        first = int(np.flatnonzero(asked.any(1))[0])
        assert asked[first].sum() == 1, "it is one's turn"
        assert loop.evidence.tried[:, small].sum() == 1, "one has tried for both"
        assert flat_action(2, 0, 2) in np.ravel(untried), "also of what takes twice as long"


def test_after_a_shift_one_of_those_that_are_near_tries_what_a_model_rules_out() -> None:
    keys, prior = some_keys(2), nothing_expected(2)
    keys.cost[:, [1, 3, 4]] = 0.1, 0.5, 0.4  # the fourth pair comes first, but is too far behind
    prior[:, 1], prior[:, 3], prior[:, 4] = -0.2, 0.5, 0.9
    loop = loop_of(replace(keys, prior=prior), draws=20, sequence=2)

    def drawn(times: int) -> list[list[int]]:
        found = []
        for _ in range(times):
            found.append(decided(loop, pair(1)).untried.tolist())
            observed(loop, np.repeat([0, 1], 2), np.repeat(np.where(loop.wanted == pair(1), 2.8, 3.5), 2))
        return found

    observed(loop, np.repeat([0, 1], 4), 3.0)
    assert pair(3) not in np.ravel(drawn(8))
    loop.shift(np.array([0, 1]))
    observed(loop, np.repeat([0, 1], 4), 3.0)
    assert pair(3) not in np.ravel(drawn(3)), "as in training"
    asked = drawn(1)[0]
    assert asked[0] != pair(3) == asked[1], "the second key's turn"
    assert not loop.evidence.tried[:, pair(3)].any(), "what was drawn is not known yet"
    asked = drawn(1)[0]
    assert asked[0] == pair(3) != asked[1], "the first key's"
    assert loop.evidence.tried[:, pair(3)].tolist() == [True, False]


@pytest.mark.parametrize(
    ("said", "octaves", "tries"),
    [
        # A model that was wrong about the pair that was drawn may be as wrong about another.
        ((0.5, 0.4), 1, [1, 0]),
        ((0.5, 0.4), 3, [1, 1]),
        # One that was right is not, and what is too slow to be worth it is left alone.
        ((-0.1, 0.4), 1, [0, 0]),
        ((0.5, 1.5), 1, [0, 0]),
        ((0.5, np.nan), 1, [0, 0]),
    ],
)
def test_while_keys_compare_one_of_those_near_tries_what_a_wrong_model_makes_worth_a_collective(
    said: tuple[float, float], octaves: int, tries: list[int]
) -> None:
    keys = own_channels(2)
    keys.nbytes[1] = keys.nbytes[0] << octaves
    keys.prior[:, 1, 0], keys.prior[:, 3, 0] = said
    loop, times = loop_of(keys, draws=4, compares=12), {OWN_ACTION: 3.0, pair(1): 2.9}
    asked = np.zeros(2, np.int64)
    for _ in range(16):
        play(loop, 1, lambda _, action: times.get(action, 3.3), drawn=lambda due: np.full(due.draw.sum(), pair(1)))
        asked += loop.wanted == pair(3)
    assert asked.tolist() == tries
    assert not np.any(loop.wanted == pair(3)), "it is slow"


def test_what_was_tried_before_a_shift_is_tried_again_where_it_may_be_the_best_now() -> None:
    keys = own_channels(1)
    keys.prior[:, 1, 0], keys.prior[:, 3, 0] = 0.5, 0.4
    loop, times = loop_of(keys, draws=4, compares=12), {OWN_ACTION: 3.0, pair(1): 2.9, pair(3): 3.05}
    for tries in (1, 2):
        asked = 0
        for _ in range(16):
            play(loop, 1, lambda _, action: times.get(action, 3.3), drawn=lambda due: np.full(due.draw.sum(), pair(1)))
            asked += int(loop.wanted[0] == pair(3) and loop.evidence.samples[0, pair(3)] == 0)
        assert asked == 1, f"in learning phase {tries}"
        loop.shift(np.arange(1))


@pytest.mark.parametrize("says", ["prior", "earlier"])
@pytest.mark.parametrize("noise", [0.02, 1.0])
def test_one_noisy_collective_of_what_is_far_behind_is_worth_nothing(says: str, noise: float) -> None:
    keys = own_channels(1)
    getattr(keys, says)[:, [1, 3], 0] = 0.5, 0.2
    loop = loop_of(keys, draws=4, compares=12)
    play(loop, 2, lambda _, action: 2.9 if action else 3.0, drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    rows = np.arange(1)
    said = loop.evidence.estimates(rows)
    loop.evidence.square[:] = loop.evidence.freedom + 4
    loop.evidence.square *= noise**2
    action = loop._untried_near(rows, loop.allowed(rows).reshape(1, -1), said)
    assert action.tolist() == [pair(3) if noise < 0.1 else -1]


@pytest.mark.parametrize(
    ("chunk", "forbidden", "action"),
    [
        (0.4, (), flat_action(3, 2, 0)),
        (0.1, (), flat_action(3, 2, 4)),
        (0.1, (slice(None), 4), flat_action(3, 2, 0)),
        (0.1, (2, 4), flat_action(3, 2, 0)),
        (0.1, (2, slice(None)), flat_action(3, 1, 4)),
    ],
)
def test_what_is_tried_while_keys_compare_has_the_channels_and_the_chunk_of_which_most_is_expected(
    chunk: float, forbidden: Any, action: int
) -> None:
    keys = some_keys(1)
    keys.prior[0, 1, 0], keys.prior[0, 3, :3], keys.prior[0, 3, N_CHANNELS:] = 0.5, (0.5, 0.45, 0.4), 0.4
    keys.prior[0, 3, N_CHANNELS + 4] = chunk
    loop = loop_of(keys, draws=4, compares=12)
    play(loop, 4, lambda _, action: 2.9 if action else 3.0, drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    rows = np.arange(1)
    allowed = np.ones((1, N_PAIRS, N_CHANNELS, N_CHUNKS), np.bool_)
    if forbidden:
        allowed[(0, 3, *forbidden)] = False
    said = loop.evidence.estimates(rows)
    assert loop._untried_near(rows, allowed.reshape(1, -1), said).tolist() == [action]


@pytest.mark.parametrize(
    ("model", "log_us", "times"),
    [("none", 2.81, 1), ("wrong", 2.81, 1), ("right", 2.81, 0), ("earlier", 2.81, 0), ("none", 3.2, 0)],
)
def test_where_nobody_knows_a_small_chunk_is_tried_while_keys_compare_of_what_is_near_the_best(
    model: str, log_us: float, times: int
) -> None:
    """What was drawn last was not tried with one: no draw was left for it."""
    keys, small = own_channels(2, small_chunk=True), int(flat_action(2, 0, 2))
    keys.channels[:, 6:] = False
    if model != "none":
        says = keys.earlier if model == "earlier" else keys.prior
        says[:, 1:3], says[:, 3:6] = -0.2, 1.6 if model == "wrong" else 0.5
    loop = loop_of(keys, draws=5, compares=16)
    of = {OWN_ACTION: 3.0, pair(1): 2.8, pair(2): log_us}
    asked = np.zeros(2, np.int64)
    for draw in (3, 4, 5, 1, 2, *[2] * 19):
        drawn = lambda due, draw=draw: np.full(due.draw.sum(), pair(draw))  # noqa: E731
        play(loop, 1, lambda _, action: of.get(action, 3.5), drawn=drawn)
        asked += loop.wanted == small
    assert asked.sum() == times
