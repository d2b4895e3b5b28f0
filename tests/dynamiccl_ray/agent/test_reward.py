"""Every term by hand, what none of them may do to the time, and that switching one off takes away that one alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl_ray.agent.reward import COSTS, PRIMARY, TERMS, Inputs, Reward, means, terms, tier_penalty, total
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import N_PAIRS, Algorithm, Protocol, pair_index

WEIGHTS = Reward(
    iteration=0.1, switch=0.2, congestion=0.3, probe=0.4, convergence=0.5, found=4.0, sm=0.6, tier=0.7, fault=0.8
)  # fmt: skip


def _inputs(**changes: Any) -> Inputs:
    """Two keys; every input is there, and costs something on the first key."""
    given: dict[str, Any] = {
        "log_speedup": np.array([0.5, -3.0]),
        "switched": np.array([True, False]),
        "probed": np.array([True, False]),
        "congestion": np.array([0.25, 9.0]),
        "tier": np.array([0.5, 0.0]),
        "found": np.array([0.1, -0.05]),
        "sm_share": np.array([16 / 128, np.nan]),
        "iteration": 0.3,
        "loss_change": 0.04,
        "fault": np.array([True, False]),
    }
    return Inputs(**(given | changes))


def test_each_term_by_hand() -> None:
    parts = {name: part.tolist() for name, part in terms(WEIGHTS, _inputs()).items()}
    assert parts == {
        "primary": [0.5, -2.0],
        "iteration": pytest.approx([-0.03, -0.03]),
        "switch": [-0.2, 0],
        "congestion": pytest.approx([-0.075, -0.6]),
        "probe": [-0.4, 0],
        "convergence": pytest.approx([-0.125, -0.125]),
        "found": pytest.approx([0.4, -0.2]),
        "sm": pytest.approx([-0.075, 0]),
        "tier": pytest.approx([-0.35, 0]),
        "fault": [-0.8, 0],
    }
    assert tuple(parts) == TERMS
    # 0.5 - 0.03 - 0.2 - 0.075 - 0.4 - 0.125 + 0.4 - 0.075 - 0.35 - 0.8, and -2 - 0.03 - 0.6 - 0.125 - 0.2
    assert total(terms(WEIGHTS, _inputs())).tolist() == pytest.approx([-1.155, -2.955])


def test_a_job_that_gets_faster_is_rewarded_and_a_loss_that_moves_costs_little() -> None:
    parts = terms(WEIGHTS, _inputs(iteration=-0.2, loss_change=1.0))
    assert parts["iteration"][0] == pytest.approx(0.02)
    assert parts["convergence"][0] == pytest.approx(-0.5 * 0.01 / 1.0)
    assert terms(WEIGHTS, _inputs(loss_change=0.0))["convergence"][0] == -0.5
    assert terms(WEIGHTS, _inputs(sm_share=np.array([1.5, 0.5])))["sm"].tolist() == pytest.approx([-0.6, -0.3])
    assert terms(WEIGHTS, _inputs(found=np.array([9.0, -9.0])))["found"].tolist() == [8.0, -8.0]
    assert terms(WEIGHTS, _inputs(iteration=50.0))["iteration"][0] == pytest.approx(-0.1 * 2)


def test_without_a_source_there_is_no_term_and_without_a_time_no_reward() -> None:
    parts = terms(WEIGHTS, _inputs(found=None, sm_share=None, iteration=None, loss_change=None, fault=None))
    assert not parts.keys() & {"found", "sm", "iteration", "convergence", "fault"}
    silent = terms(WEIGHTS, _inputs(log_speedup=np.array([0.5, np.nan])))
    assert np.isfinite(total(silent)).tolist() == [True, False]
    assert means(silent) == {name: pytest.approx(part[0]) for name, part in silent.items()}
    assert means(terms(WEIGHTS, _inputs(log_speedup=np.full(2, np.nan)))) == {}


@pytest.mark.parametrize("name", COSTS)
def test_switching_a_term_off_takes_away_that_one_alone(name: str) -> None:
    whole, rest = terms(WEIGHTS, _inputs()), terms(WEIGHTS.without([name]), _inputs())
    assert whole.keys() - rest.keys() == {name}
    assert all(np.array_equal(rest[other], whole[other]) for other in rest)
    assert total(rest) == pytest.approx(total(whole) - whole[name])
    assert (total(rest) != total(whole)).any()
    assert WEIGHTS.without([name]).off == [name]


def test_what_cannot_be_switched_off_is_said_with_what_can() -> None:
    assert Reward().without(COSTS).off == list(COSTS)
    with pytest.raises(ConfigError, match=r"--without speed: .* no such term; give one of iteration, .*fault"):
        Reward().without(["sm", "speed"])
    with pytest.raises(ConfigError, match=r"--without primary: the time itself cannot be left out"):
        Reward().without([PRIMARY])


@pytest.mark.parametrize("name", Reward.model_fields)
def test_every_setting_changes_the_reward(name: str) -> None:
    inputs = _inputs()
    other = WEIGHTS.model_copy(update={name: 1.5 * getattr(WEIGHTS, name)})
    assert (total(terms(other, inputs)) != total(terms(WEIGHTS, inputs))).any()


SHARE = st.floats(0, 1)
INPUTS = st.fixed_dictionaries(
    {
        "switched": st.booleans(), "probed": st.booleans(), "tier": SHARE, "sm_share": SHARE,
        "iteration": st.floats(-1, 100), "loss_change": st.floats(0, 1e6), "fault": st.booleans(),
    }
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(fixed=INPUTS, log_us=st.lists(st.floats(-5, 15), min_size=2, max_size=8), fastest=st.floats(-5, 0))
def test_faster_is_never_worse_and_no_term_leaves_its_bounds(
    fixed: dict[str, Any], log_us: list[float], fastest: float
) -> None:
    """Keys that differ in nothing but their time, under the defaults."""
    n, times, weights = len(log_us), np.sort(log_us), Reward()
    arrays = {k: np.full(n, v) for k, v in fixed.items()}
    parts = terms(weights, Inputs(log_speedup=3 - times, congestion=times - fastest, **arrays))
    reward = total(parts)
    assert (np.diff(reward) <= 1e-12).all()
    unclipped = np.abs(3 - times) < weights.limit
    apart = (np.diff(times) > 1e-6) & unclipped[1:] & unclipped[:-1]
    assert (np.diff(reward)[apart] < 0).all()
    most = {"iteration": weights.limit, "congestion": weights.limit}
    for name in COSTS:
        if name in parts:
            assert (parts[name] >= -getattr(weights, name) * most.get(name, 1) - 1e-12).all()
            assert (parts[name] <= (weights.iteration if name == "iteration" else 0)).all()
    assert (np.abs(parts[PRIMARY]) <= weights.limit).all()


def test_what_follows_from_the_action_alone_decides_only_between_equals() -> None:
    weights = Reward()
    assert max(weights.probe, weights.tier, weights.sm * 32 / 132) <= 0.005


def test_the_tier_penalty_counts_crossings_of_far_networks() -> None:
    pairs = [pair_index(a, Protocol.SIMPLE) for a in (Algorithm.RING, Algorithm.TREE, Algorithm.COLLNET_CHAIN)]
    assert tier_penalty(pairs, 4, 16).tolist() == pytest.approx([1, 4 / 15, 1 / 15])
    assert tier_penalty(pairs, 3, 16).tolist() == pytest.approx([1 / 2, 2 / 15, 1 / 30])
    assert tier_penalty(pairs, 2, 16).tolist() == tier_penalty(pairs, 4, 1).tolist() == [0, 0, 0]
    assert tier_penalty(pairs[:2], 4, 2).tolist() == [1, 1], "two nodes are one crossing apart, whatever the pattern"
    assert tier_penalty(0, 4, 16) == 0, "what NCCL chooses is not known"
    # A tree over 5 nodes is 3 deep; there is nothing beyond the farthest tier.
    assert tier_penalty(pairs[1], 4, 5) == tier_penalty(pairs[1], 9, 5) == 3 / 4
    everything = tier_penalty(np.arange(N_PAIRS)[:, None, None], np.arange(5)[:, None], np.arange(1, 300))
    assert everything.shape == (N_PAIRS, 5, 299)
    assert (everything >= 0).all()
    assert (everything <= 1).all()
