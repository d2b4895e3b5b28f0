"""What exploring may cost: the share is held over every window, and learning comes to its end all the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from looped import decided, exploiting, loop_of, observed, own_channels, pair, some_keys

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.config.control import Explore
from dynamiccl_ray.control.budget import Budget
from dynamiccl_ray.control.loop import Loop, Phase

WINDOW = 64
LIMIT = 0.05


def spend(budget: Budget, group: int, collectives: float, took_us: float, cost_us: float, keys: int = 1) -> None:
    of = (np.array([x]) for x in (collectives, took_us, cost_us))
    budget.spend(np.array([group]), *of, np.array([keys]))


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0, 10)), min_size=1, max_size=200))
def test_the_share_is_that_of_the_last_window(decisions: list[tuple[int, float]]) -> None:
    budget = Budget(Explore(window=WINDOW))
    for collectives, cost in decisions:
        spend(budget, 3, collectives, 10.0 * collectives, cost)
    counts, costs = np.array(decisions).T
    # A bin at most is counted beyond a window, and each may hold one decision more than its share.
    within = np.cumsum(counts[::-1])[::-1] <= WINDOW + WINDOW / 16 + 8
    window = 10.0 * max(WINDOW, counts.sum() if counts.sum() < WINDOW else WINDOW)
    least = costs[np.cumsum(counts[::-1])[::-1] <= WINDOW].sum() / (window + 10 * (WINDOW / 16 + 8))
    assert least - 1e-9 <= budget.share(3, 1) <= costs[within].sum() / window + 1e-9


def test_a_group_spends_for_itself_alone() -> None:
    budget = Budget(Explore(max_regret=LIMIT, window=WINDOW))
    spend(budget, 0, 1, 10.0, 40.0)
    spend(budget, 1, 1, 10.0, 10.0)
    assert budget.spent(np.array([0, 1, 2])).tolist() == [True, False, False]
    budget.keep(np.array([1]))
    assert budget.share(0, 1) == 0 < budget.share(1, 1)


def test_who_communicates_much_may_explore_much() -> None:
    budget = Budget(Explore(max_regret=LIMIT, window=WINDOW))
    groups = np.array([0, 1, 1, 2])
    budget.weigh(groups, np.full(4, 2.0, np.float32))
    assert budget.limits() == dict.fromkeys((0, 1, 2), LIMIT)
    budget.weigh(groups, np.array([4.0, 1.0, 1.0, 0.0], np.float32))
    assert budget.limits() == pytest.approx({0: LIMIT, 1: LIMIT / 4, 2: LIMIT / 10}), "a zero may be a mistake"
    for group in range(3):
        spend(budget, group, 8, 100.0, 6.0)
    assert budget.share(0, 1) == pytest.approx(0.06 / 8)
    assert budget.spent(np.array([0, 1, 2])).tolist() == [False, False, True]
    budget.keep(np.array([1, 2]))
    assert budget.limits() == pytest.approx({1: LIMIT, 2: LIMIT / 10})
    assert Budget(Explore(max_regret=1)).limits() == {}


def test_what_was_spent_survives_a_restart() -> None:
    before, after = Budget(Explore(window=WINDOW)), Budget(Explore(window=WINDOW))
    for group in (4, 4, 7):
        spend(before, group, 8, 80.0, 3.0)
    after.restore(before.state())
    assert after.cost_us == before.cost_us == 9.0
    assert [after.share(group, 2) for group in (4, 7)] == [before.share(group, 2) for group in (4, 7)] != [0, 0]


def _played(loop: Loop, us: dict[int, float], sigma: float, steps: int) -> npt.NDArray[np.float64]:
    """(steps,) us that the keys' collectives took beyond 10 each, where draws are of two pairs in turns, whatever is
    known of them."""
    rng, rows, beyond = np.random.default_rng(0), np.arange(len(loop)), []
    for step in range(steps):
        mean = np.array([us[action] for action in loop.wanted.tolist()])
        beyond.append((mean - 10.0).sum())
        observed(loop, rows, np.log(mean) + sigma * rng.standard_normal(len(rows)))
        due = loop.due()
        loop.decide(due.row, np.where(due.draw, pair(1 + step % 2), due.fixed))
    return np.array(beyond)


@pytest.mark.parametrize("sigma", [0.0, 0.1])
def test_draws_that_cost_much_are_spread_so_that_no_window_holds_more_than_its_share(sigma: float) -> None:
    us = {OWN_ACTION: 10.0, pair(1): 20.0, pair(2): 20.0}
    keys, worst = 4, []
    for explore in ({"max_regret": LIMIT, "window": WINDOW}, None):
        loop = loop_of(some_keys(keys), explore=explore, guardrail={"samples": 10**6}, draws=24, draw_samples=1)
        beyond = _played(loop, us, sigma, 640)
        assert (loop.phase == Phase.EXPLOIT).all(), "learning has come to its end"
        assert (loop.decisions >= 24).all()
        worst.append(np.convolve(beyond, np.ones(WINDOW), "valid").max())
    allowed = LIMIT * 10.0 * WINDOW * keys
    # Beyond it, one more decision of every key, and what noise hides.
    assert worst[0] <= 1.25 * allowed + keys * 10.0
    assert worst[1] > 3 * allowed


def test_noise_alone_costs_next_to_nothing() -> None:
    us = {OWN_ACTION: 10.0, pair(1): 10.0, pair(2): 10.0}
    loop = loop_of(own_channels(4), explore={"max_regret": 0.03, "window": 1000}, draws=48, draw_samples=1)
    _played(loop, us, 0.05, 80)
    assert (loop.decisions >= 48).all(), "no draw was put off"
    # The best of what was measured once is what noise made fast: every draw seems to cost a part of the noise.
    assert loop.budget.share(0, 4) < 0.005


def test_a_key_that_rests_is_not_drawn_for_and_goes_on_where_it_was() -> None:
    loop = loop_of(some_keys(1), explore={"max_regret": 0.01, "window": 100}, draws=8, draw_samples=1)
    observed(loop, [0] * 4, 3.0)
    decided(loop, pair(1))
    observed(loop, [0], 6.0)
    due = loop.due()
    assert (due.draw.tolist(), due.fixed.tolist(), due.ordinal.tolist()) == ([False], [OWN_ACTION], [1])
    loop.decide(due.row, due.actions(np.zeros(0, np.int64)))
    assert (loop.decisions.tolist(), loop.phase.tolist()) == ([1], [Phase.LEARN])
    assert loop.need.tolist() == [4], "it is measured as long as what is compared"
    loop.budget = Budget(Explore())
    observed(loop, [0] * 4, 3.0)
    assert not loop.closed.drawn.any()
    due = loop.due()
    assert (due.draw.tolist(), due.ordinal.tolist()) == ([True], [1])


def test_what_is_exploited_is_no_exploring() -> None:
    loop = exploiting(some_keys(2))
    loop.budget = Budget(Explore(window=WINDOW))
    observed(loop, [0, 1] * 4, 2.05)
    assert loop.budget.share(0, 2) == 0
