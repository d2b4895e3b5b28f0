"""What the control loop lets a key choose, and what it chooses instead of what was drawn."""

from __future__ import annotations

from dataclasses import fields, replace

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
    pair,
    play,
    some_keys,
)

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.agent.observation import PAIR_FIELDS, part
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.control import exploration
from dynamiccl_ray.control import loop as loop_module
from dynamiccl_ray.control.columns import nothing_expected
from dynamiccl_ray.control.loop import Due, Loop, Phase
from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS, OWN_PAIR


def _assert_same(one: Due, other: Due) -> None:
    for field in fields(Due):
        if field.name == "outcome":
            for name, value in vars(one.outcome).items():
                np.testing.assert_array_equal(getattr(other.outcome, name), value, err_msg=name)
        else:
            np.testing.assert_array_equal(getattr(other, field.name), getattr(one, field.name), err_msg=field.name)


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
    assert due_rows(loop) == [2]
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


def test_after_the_first_sequence_a_draw_of_what_is_known_goes_to_what_promises_most() -> None:
    """The model of the cluster expects channels of pair 1 to be as good as those that were drawn, and right it is."""
    keys = some_keys(1)
    keys.prior[:, 1], keys.cost[:, 1] = -0.1, 0
    loop, asked = loop_of(keys, draws=40, draw_samples=1, sequence=16), []
    for _ in range(30):
        play(loop, 1, lambda _, action: 3.0 if action == OWN_ACTION else 2.9, drawn=lambda due: np.full(1, pair(1)))
        asked.append(int(loop.wanted[0]))
    drawn = asked[:17]
    assert set(drawn) == {pair(1)}, "the policy's own draws"
    assert len(set(asked[17:]) - {pair(1)}) >= 5
    assert {int(action_parts(action)[0]) for action in asked[17:]} == {1}


@pytest.mark.parametrize("off", [None, 0.9, 0.0])
def test_a_pair_that_was_drawn_with_the_wrong_chunk_only_is_found_unless_a_model_is_right(off: float | None) -> None:
    keys = some_keys(1, small_chunk=True)
    if off is not None:
        keys.prior[:, 1], keys.prior[:, 4] = off - 0.1, 0.2
    loop = loop_of(keys, draws=40, draw_samples=1, sequence=16)
    wrong = int(flat_action(4, 0, 2))
    times = {OWN_ACTION: 3.0, pair(1): 2.9, wrong: 3.2, pair(4): 2.5}
    for i in range(60):
        drawn = wrong if i == 3 else pair(1)
        play(loop, 1, lambda _, action: times.get(action, 3.5), drawn=lambda due, a=drawn: np.full(due.draw.sum(), a))
    assert (loop.phase[0], loop.wanted[0]) == (Phase.EXPLOIT, pair(1) if off == 0.0 else pair(4))


@pytest.mark.parametrize("told", [None, "wrong", "right"])
@pytest.mark.parametrize("draws", [8, 40])
def test_channels_that_nobody_drew_are_found_where_no_model_speaks(told: str | None, draws: int) -> None:
    """While a key compares, and with draws that would repeat what is known. A model that is right says not to try."""
    keys = some_keys(1)
    if told:
        keys.prior[:, 1], keys.prior[:, 2:8] = -0.1, 0.1 if told == "right" else 1.5
        keys.prior[:, 1, 1:N_CHANNELS] = 2.0
    loop, ran = loop_of(keys, draws=draws, draw_samples=1, sequence=16, compares=16), set()
    few, some = int(flat_action(1, 3, 0)), int(flat_action(1, 4, 0))
    for i in range(80):
        drawn = lambda due, of=1 + i % 7: np.full(due.draw.sum(), pair(of))  # noqa: E731
        times = lambda _, action: {OWN_ACTION: 3.0, pair(1): 2.9, some: 2.8, few: 2.6}.get(action, 3.1)  # noqa: E731
        play(loop, 1, times, sigma=0.01, seed=i, drawn=drawn)
        ran.add(int(loop.wanted[0]))
    assert loop.phase[0] == Phase.EXPLOIT
    assert loop.wanted[0] == (pair(1) if told == "right" else few)
    assert (few in ran) == (told != "right")


@pytest.mark.parametrize("told", [True, False])
def test_where_a_model_speaks_what_is_known_is_compared(told: bool) -> None:
    """The model takes other channels for as good as NCCL's own: to try them all says nothing new."""
    keys, asked = some_keys(1), set()
    if told:
        keys.prior[:, 1], keys.prior[:, 2:7] = -0.1, 0.1
    loop = loop_of(keys, draws=8, draw_samples=1, compares=16)
    for i in range(40):
        drawn = lambda due, of=1 + i % 5: np.full(due.draw.sum(), pair(of))  # noqa: E731
        if loop.phase[0] == Phase.LEARN and loop.decisions[0] > 8:
            asked.add(int(loop.wanted[0]))
        times = lambda _, action: {OWN_ACTION: 3.0, pair(1): 2.9}.get(action, 3.1)  # noqa: E731
        play(loop, 1, times, sigma=0.01, seed=i, drawn=drawn)
    assert (asked <= {OWN_ACTION, *(pair(i) for i in range(1, 8))}) == told


def test_what_others_have_found_since_a_key_has_drawn_is_compared_as_well() -> None:
    """Key 0 has drawn pair 1; then key 1, which is next to it in size, finds out that pair 2 is as good."""
    loop = loop_of(some_keys(2), draws=4, compares=20)
    times = lambda _, action: 3.0 if action == OWN_ACTION else 2.9  # noqa: E731
    play(loop, 6, times, rows=[0], drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    asked: list[int] = []
    for drawn in (pair(1), pair(2)):
        for _ in range(4):
            play(loop, 1, times, rows=[0])
            asked.append(int(loop.wanted[0]))
        play(loop, 2, times, rows=[1], drawn=lambda due, a=drawn: np.full(due.draw.sum(), a))
    assert pair(2) not in asked
    play(loop, 1, times, rows=[0])
    assert loop.wanted[0] == pair(2)


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
    play(loop, UNTIL_EXPLOIT, lambda row, action: 3.0, rows=[0])
    observed(loop, [0, 0, 0, 0, 1, 1, 1, 1], 3.0)
    due = loop.due()
    assert due.draw.tolist() == [False, True]
    assert due.actions(np.array([pair(7)])).tolist() == [OWN_ACTION, pair(7)]
    assert not due.observation[0].any(), "nobody looks at it"
    assert due.observation[1].any()


def test_what_may_be_the_best_is_compared() -> None:
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
    # One as often as the other; NCCL's own choice and pair 3 are behind.
    assert sorted(compared) == [pair(1), pair(1), pair(2), pair(2)]
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
    loop.keys.cost[:, 1] = 0.35
    loop.keys.cost[0, [2, 3, 4]] = 0.6, 0.3, 1.5
    loop.keys.cost[0, 5], loop.offers.forbidden[0, 5] = 0.0, True
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
    # A pair that may only run with channels of ours is tried with these.
    loop.keys.channels[0, 3, :2] = False
    assert loop.due().untried[0] == flat_action(3, 2, 0)


def test_the_guardrail_is_for_one_chunk_and_masks_a_value_once_all_that_it_is_part_of_is_worse() -> None:
    loop = loop_of(some_keys(1, small_chunk=True), draws=8 * N_CHUNKS)
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
    observed(loop, [0] * 400, 9 + 2 * np.random.default_rng(0).standard_normal(400))
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


def test_a_decision_that_nccl_does_not_take_is_over_and_judges_nothing() -> None:
    """It would never have its samples: the key would ask for it for ever."""
    loop = loop_of(some_keys(2))
    observed(loop, [0] * 4 + [1] * 4, 3.0)
    decided(loop, pair(4), pair(7))
    observed(loop, [0], 2.0)
    loop.forbid(0, pair(4))
    due = loop.due()
    assert due.row.tolist() == [0]
    assert not due.outcome.known.any()
    decided(loop, pair(5))
    observed(loop, [0], 2.0, action=pair(4))
    assert loop.late == 1
    observed(loop, [0, 0], 2.0)
    assert loop.evidence.samples[0, [pair(4), pair(5)]].tolist() == [0, 2]


def test_a_decision_from_before_nccl_said_what_it_offers_is_over_if_it_is_not_offered() -> None:
    loop = loop_of(some_keys(1))
    observed(loop, [0] * 4, 3.0)
    decided(loop, pair(4))
    cost = np.ones(N_PAIRS - 1, np.float32)
    loop.offer(0, cost)
    assert not len(loop.due().row), "it is offered"
    cost[3] = -1
    loop.offer(0, cost)
    assert loop.due().row.tolist() == [0]


def test_no_more_channels_are_asked_for_than_the_communicator_has() -> None:
    loop = loop_of(some_keys(2))
    loop.offers.most_channels[1] = 4
    allowed = loop.allowed(np.array([0, 1])).any(-1)
    assert allowed[0, 1].all()
    assert np.array(CHANNEL_VALUES)[allowed[1, 1]].tolist() == [0, 1, 2, 4]


def test_the_best_of_what_was_measured_is_not_chosen_once_it_is_forbidden() -> None:
    loop = exploiting(some_keys(1))
    loop.forbid(0, pair(1))
    observed(loop, [0] * 4, 2.9)
    decided(loop)
    assert loop.wanted[0] == OWN_ACTION


@pytest.mark.parametrize(("of", "off", "free"), [("prior", 0.0, True), ("earlier", 0.0, False), ("earlier", 0.5, True)])
def test_what_a_prior_rules_out_is_not_drawn_before_the_last_quarter(of: str, off: float, free: bool) -> None:
    """And what an earlier run has measured not even then, where that run is right about what is drawn."""
    expected = nothing_expected(2)
    expected[0, 2], expected[1, 3] = 1.0, 0.0
    expected[0, 1] = off
    loop = loop_of(replace(some_keys(2), **{of: expected}), draws=8, draw_samples=1, earlier_share=1)
    observed(loop, [0, 1] * 4, 3.0)
    drawable = []
    for _ in range(8):
        due = loop.due()
        drawable.append(part(due.observation, "valid_channels")[:, 2].any(-1).tolist())
        loop.decide(due.row, np.full(2, pair(1)))
        observed(loop, [0, 1], 3.0)
    assert drawable == [[False, True]] * 6 + [[free, True]] * 2


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_that_was_wrong_before_the_network_ever_changed_is_not_believed_about_actions_that_nobody_tried(
    wrong: bool,
) -> None:
    """After a shift every model is off. One that was right until then still is about the channels of a pair."""
    keys = some_keys(2)
    keys.prior[:, 1], keys.prior[:, 2:7] = -0.1, 1.0 if wrong else 0.0
    loop = loop_of(keys, draws=12, draw_samples=1)
    for seed in range(40):
        drawn = lambda due, of=1 + seed % 6: np.full(due.draw.sum(), pair(of))  # noqa: E731
        times = network() if seed < 20 else (lambda row, action: network()(row, action) + 1.5 * (action == OWN_ACTION))
        if seed == 20:
            assert (loop._modelled(np.array([0, 1])).any(-1) == (not wrong)).all()
            loop.shift(np.array([0]))
        play(loop, 1, times, sigma=0.01, seed=seed, rows=[0, 1] if seed < 20 else [0], drawn=drawn)
    assert loop.decisions[0] > 12
    assert loop.evidence.estimates(np.array([0])).model.error > 0.25, "all differ from NCCL's own choice by more"
    assert loop._modelled(np.array([0])).any() == (not wrong)


def test_what_promises_and_what_is_compared_know_what_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    for module, name, place in ((exploration, "promising", 3), (loop_module, "compared", 2)):
        of = getattr(module, name)
        spied = lambda *given, of=of, name=name, place=place: heard.append((name, given[place].any())) or of(*given)  # noqa: E731
        monkeypatch.setattr(module, name, spied)
    keys = some_keys(1)
    keys.prior[:, 1] = -0.1
    loop = loop_of(keys, draws=40, draw_samples=1)
    play(loop, 46, network(), sigma=0.01, drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert {("promising", True), ("compared", True)} == {(name, bool(any_)) for name, any_ in heard}
