"""A key that exploits something else measures NCCL's own choice once in a while: it may have become faster."""

from __future__ import annotations

import numpy as np
import pytest
from looped import Times, exploiting, network, observed, own_channels, pair, play, some_keys, through_a_file

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.control.loop import Loop, Phase

KEY = np.array([0])
# NCCL's own choice takes exp(0.1) times as long as what these keys exploit, and a look takes 2 collectives of it.
_WAIT = 2 * np.expm1(0.1) / 2e-4


def _own(takes: float) -> Times:
    return lambda row, action: takes if action == OWN_ACTION else network()(row, action)


def _looking(loop: Loop, rounds: int = 2000, *, doubted: bool = True) -> int:
    """Plays until row 0, whose network may have changed, measures NCCL's own choice; returns its samples until then."""
    before = int(loop.measured[0])
    loop._doubted[0] |= doubted
    for i in range(rounds):
        play(loop, 1, network(), sigma=0.01, seed=i, rows=[0])
        if loop.wanted[0] == OWN_ACTION:
            assert loop.phase[0] == Phase.EXPLOIT
            return int(loop.measured[0]) - before
    raise AssertionError("it never looks")


def _looked(loop: Loop, *samples: float) -> None:
    """What row 0 measures then."""
    observed(loop, [0] * len(samples), list(samples))


def test_nccls_own_choice_that_alone_became_faster_is_found_where_another_key_was_checked() -> None:
    loop = exploiting(own_channels(2))
    play(loop, 30, network(), sigma=0.01)
    loop._check(np.array([1]))
    play(loop, 1200, _own(2.7), sigma=0.01, rows=[0])
    assert (loop.wanted[0], loop.shifts[0]) == (OWN_ACTION, 1)


def test_as_long_as_nothing_says_that_the_network_has_changed_a_key_looks_ten_times_less_often() -> None:
    loop = exploiting(own_channels(1))
    _looking(loop)
    play(loop, 1, network(), sigma=0.01)
    assert not loop._doubted[0]
    loop._own_at[0] -= int(9 * _WAIT)
    assert _looking(loop, doubted=False) == pytest.approx(_WAIT, rel=0.2)


def test_a_check_is_a_doubt_for_keys_of_its_communicator_that_have_not_measured_it_lately() -> None:
    loop = exploiting(some_keys(4), some_keys(1, group=1))
    play(loop, 30, network(), sigma=0.01)
    loop._own_at[2] = loop.measured[2] - 64
    loop._check(KEY)
    assert loop._doubted.tolist() == [1, 1, 0, 1, 0]
    play(loop, 3, network(), sigma=0.01, rows=[0])  # until it has measured that, too
    assert loop._doubted.tolist() == [0, 1, 0, 1, 0]
    loop._own_at[2] -= 1
    loop.shift(np.array([3]))
    assert loop._doubted.tolist() == [0, 1, 1, 1, 0]


def test_looking_takes_as_small_a_share_of_a_keys_time_as_is_said() -> None:
    loop = exploiting(own_channels(1))
    _looking(loop)
    before = int(loop.measured[0])
    for _ in range(3):
        play(loop, 1, network(), sigma=0.01)
        assert _looking(loop) + 2 == pytest.approx(_WAIT, rel=0.1)
    share = 6 * np.expm1(0.1) / (loop.measured[0] - before)
    assert share == pytest.approx(2e-4, rel=0.1)
    assert loop.shifts[0] == 0


def test_what_ran_in_a_look_counts_not_what_it_takes() -> None:
    """Of a fast job many times as many collectives run before the next decision is in force."""
    loop = exploiting(own_channels(1))
    _looking(loop)
    rng = np.random.default_rng(0)
    _looked(loop, *(3.0 + 0.01 * rng.standard_normal(20)))
    play(loop, 1, network(), sigma=0.01)
    loop._own_at[0] -= int(9 * _WAIT)
    assert _looking(loop) == pytest.approx(_WAIT, rel=0.1)


def test_what_is_hardly_behind_is_not_looked_at_all_the_time() -> None:
    loop = exploiting(own_channels(1))
    near: Times = lambda row, action: 2.999 if action == pair(1) else 3.0  # noqa: E731
    loop.evidence.move(KEY, np.array([0.1]))
    loop.evidence.baseline[0] = 3.0
    loop.evidence.total[0, OWN_ACTION] = 3.0 * loop.evidence.samples[0, OWN_ACTION]
    loop._best[0] = loop.evidence.mean(KEY, np.array([pair(1)]))[0]
    looks = 0
    for _ in range(500):
        play(loop, 1, near, sigma=0.0001)
        looks += int(loop.wanted[0] == OWN_ACTION and loop._found[0] != OWN_ACTION)
    assert looks <= 1 + loop.measured[0] // 500


def test_that_nccls_own_choice_alone_is_slower_now_is_no_alarm_and_is_known() -> None:
    loop = exploiting(own_channels(1))
    _looking(loop)
    seen = {name: of.copy() for name, of in loop.cusum.state().items()}
    _looked(loop, 3.6, 3.6)
    assert all((of == seen[name]).all() for name, of in loop.cusum.state().items()), "its detector has not seen that"
    loop.decide(loop.due().row, loop.due().fixed)
    assert (loop.phase[0], loop.wanted[0], loop.shifts[0]) == (Phase.EXPLOIT, pair(1), 0)
    assert loop.evidence.baseline[0] > 3.1


@pytest.mark.parametrize(
    ("own", "noise", "checked"),
    [(2.8, 0.01, True), (2.89, 0.01, True), (2.91, 0.01, False), (2.89, 0.05, False), (2.8, 0.05, True)],
)
def test_it_is_checked_where_it_is_faster_than_noise_explains_and_ahead(
    own: float, noise: float, checked: bool
) -> None:
    loop = exploiting(own_channels(1))
    _looking(loop)
    loop.evidence.square[0], loop.evidence.freedom[0] = noise**2 * 1000, 1000
    known = loop.evidence.samples[0, OWN_ACTION]
    _looked(loop, own, own)
    assert (loop.phase[0] == Phase.CHECK) == checked
    if checked:
        assert loop.checks.actions[0, :2].tolist() == [pair(1), OWN_ACTION], "what is in force is what it exploits"
    # What shows that it has moved is what it takes now: the check is against what it took.
    assert loop.evidence.samples[0, OWN_ACTION] == known + 2 * (not checked)


def test_one_fast_collective_is_no_proof() -> None:
    loop = exploiting(own_channels(1))
    _looking(loop)
    _looked(loop, 2.7, 2.7)
    assert loop.phase[0] == Phase.CHECK
    drifts = play(loop, 40, network(), sigma=0.01)
    assert [drift.anew for drift in drifts] == [False]
    assert (loop.phase[0], loop.wanted[0], loop.shifts[0]) == (Phase.EXPLOIT, pair(1), 0)


def test_what_a_key_exploits_is_still_what_it_exploits() -> None:
    loop = exploiting(own_channels(1))
    _looking(loop)
    assert loop.exploited().tolist() == [pair(1)]
    loop.shift(KEY)
    assert loop.settled[0] == pair(1)


def test_looks_are_paid_for_out_of_what_exploring_may_cost() -> None:
    loop = exploiting(own_channels(1))
    _looking(loop)
    before = loop.budget.cost_us
    _looked(loop, 3.0, 3.0)
    assert loop.budget.cost_us - before == pytest.approx(2 * (np.exp(3.0) - np.exp(2.9)), rel=0.05)
    # Where that is spent nobody looks.
    loop = exploiting(own_channels(1), explore={"max_regret": 1e-9, "window": 1_000_000})
    loop._doubted[0] = 1
    play(loop, 400, network(), sigma=0.01)
    assert loop.phase[0] == Phase.EXPLOIT
    assert loop.measured[0] - loop._own_at[0] > 1.1 * _WAIT


def test_without_a_trigger_nobody_looks() -> None:
    loop = exploiting(own_channels(1), trigger=1e50)
    with pytest.raises(AssertionError, match="never looks"):
        _looking(loop, rounds=1000)


@pytest.mark.parametrize(("noise", "takes"), [(0.01, 2), (0.2, 4)])
def test_a_look_takes_as_many_as_a_comparison_where_times_vary_by_much(noise: float, takes: int) -> None:
    loop = exploiting(own_channels(1))
    loop.evidence.square[0], loop.evidence.freedom[0] = noise**2 * 1000, 1000
    loop._doubted[0], loop._own_at[0] = 1, -100_000
    observed(loop, [0] * int(loop.need[0]), 2.9)
    due = loop.due()
    assert (due.fixed.tolist(), due.takes.tolist()) == ([OWN_ACTION], [takes])
    loop.decide(due.row, due.fixed)
    assert loop.need[0] == takes


def test_what_exploits_nccls_own_choice_does_not_look() -> None:
    loop = exploiting(own_channels(1))
    play(loop, 60, _own(2.0), sigma=0.01)
    loop.shift(KEY)
    play(loop, 60, _own(2.0), sigma=0.01)
    assert (loop.phase[0], loop.wanted[0]) == (Phase.EXPLOIT, OWN_ACTION)
    loop._doubted[0], loop._own_at[0] = 1, -100_000
    observed(loop, [0] * int(loop.need[0]), 2.0)
    assert loop.due().takes.tolist() == [4]


def test_however_far_behind_it_was_it_is_checked_where_it_is_ahead_now() -> None:
    loop = exploiting(own_channels(1))
    # Something else contends, so nobody falls back on NCCL's own choice.
    loop.evidence.record(KEY, np.array([pair(2)]), np.array([4.0]), np.array([3.0]), np.array([1e-3]))
    loop.evidence.correct(KEY, np.array([OWN_ACTION]), np.array([1.0]))
    loop.evidence.baseline[0] += 1.0
    loop._own_at[0] = -100_000
    _looking(loop)
    _looked(loop, 2.7, 2.7)
    assert loop.phase[0] == Phase.CHECK
    assert OWN_ACTION in loop.checks.actions[0]


def test_when_it_was_last_measured_is_kept() -> None:
    loop = exploiting(own_channels(2))
    _looking(loop)
    _looked(loop, 3.0, 3.0)
    other = Loop(loop.control)
    other.grow(loop.keys)
    other.restore(through_a_file(loop.state()))
    assert other._own_at.tolist() == loop._own_at.tolist()
    assert other._own_ran.tolist() == loop._own_ran.tolist() == [2, 4]
