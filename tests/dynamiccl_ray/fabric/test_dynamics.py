"""What happens to a fabric on its own: stationary distributions, fair shares, tails, determinism."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dynamiccl_ray.fabric.dynamics import (
    Bursts,
    Degraded,
    Dynamics,
    Failures,
    Flows,
    Lossy,
    OtherJob,
    Shifts,
    SlowRanks,
    Tail,
    Wander,
    noise,
)
from dynamiccl_ray.fabric.load import IDLE
from dynamiccl_ray.fabric.load_streams import LoadStreams, Spell, fair_share

STREAMS = 400
EVERYTHING = Dynamics(
    network_flows=Flows(mean_gap=60, mean_length=20, count=3),
    node_flows=Flows(mean_gap=100, mean_length=10),
    other_job=OtherJob(period=17.5),
    shifts=Shifts(mean_gap=50),
    slow_ranks=SlowRanks(mean_gap=40, mean_length=10),
    degraded=Degraded(mean_gap=200, mean_length=40),
    lossy=Lossy(mean_gap=100, mean_length=5),
    failures=Failures(mean_gap=300, mean_length=30),
)


def _streams(dynamics: Dynamics, seed: int = 0, **changes: int) -> LoadStreams:
    return LoadStreams(dynamics, **({"streams": STREAMS, "ranks": 16, "devices": 8} | changes), seed=seed)


def _fields(spell: Spell) -> dict[str, Any]:
    return {**vars(spell.load), "slow_rank": spell.slow_rank}


def test_nothing_happens_by_default() -> None:
    assert Dynamics().still
    assert not EVERYTHING.still
    spell = _streams(Dynamics()).advance(50)
    for name, value in vars(spell.load).items():
        assert value.shape == (50, STREAMS)
        assert (value == getattr(IDLE, name)).all()
    assert (spell.slow_rank == -1).all()


def test_the_same_seed_gives_the_same_loads_however_they_are_asked_for() -> None:
    whole = _fields(_streams(EVERYTHING, 3).advance(300))
    pieces = _streams(EVERYTHING, 3)
    parts = [_fields(pieces.advance(steps)) for steps in (1, 0, 99, 200)]
    other = _fields(_streams(EVERYTHING, 4).advance(300))
    for name, value in whole.items():
        assert np.array_equal(value, np.concatenate([part[name] for part in parts])), name
        assert not np.array_equal(value, other[name]), name


def test_switching_one_process_on_leaves_the_others_as_they_were() -> None:
    alone = Dynamics(lossy=EVERYTHING.lossy)
    losses = [_streams(d).advance(100).load.loss for d in (alone, EVERYTHING)]
    assert np.array_equal(*losses)


@pytest.mark.parametrize(("gap", "length"), [(30.0, 10.0), (8.0, 24.0), (2.0, 2.0)])
def test_on_and_off_flows_are_binomial_and_stay_as_long_as_they_should(gap: float, length: float) -> None:
    flows = Flows(mean_gap=gap, mean_length=length, count=4, share=0.2, queueing=0)
    streams = _streams(Dynamics(network_flows=flows))
    share = np.asarray(streams.advance(1).load.inter_bandwidth)[0]
    first = _counts(share)
    later = _counts(np.asarray(streams.advance(400).load.inter_bandwidth)[-1])
    on = length / (gap + length)
    expected = STREAMS * stats.binom.pmf(range(5), 4, on)
    enough = expected > 5
    for counts in (first, later):
        chi2 = ((counts - expected)[enough] ** 2 / expected[enough]).sum()
        assert stats.chi2.sf(chi2, enough.sum() - 1) > 1e-4


def _counts(share: Any) -> Any:
    """How many streams have 0, 1, ... 4 flows of 0.2 each, from what they leave."""
    left = [fair_share(1.0, k, 0.2, 0, 1.0) for k in range(5)]
    return np.array([np.isclose(share, value).sum() for value in left])


def test_stays_are_as_long_as_they_should_be() -> None:
    loss = np.asarray(_streams(Dynamics(lossy=Lossy(mean_gap=40, mean_length=8))).advance(4000).load.loss) > 0
    starts = (loss[1:] & ~loss[:-1]).sum()
    ends = (~loss[1:] & loss[:-1]).sum()
    assert loss.sum() / starts == pytest.approx(8, rel=0.02)
    assert (~loss).sum() / ends == pytest.approx(40, rel=0.02)


@given(st.floats(0.05, 1), st.integers(0, 12), st.floats(0.01, 1), st.integers(0, 3), st.floats(0.01, 1))
def test_the_fair_share_is_the_water_level(
    capacity: float, flows: int, share: float, others: int, other_share: float
) -> None:
    level = float(fair_share(capacity, flows, share, others, other_share))
    taken = level + flows * min(share, level) + others * min(other_share, level)
    assert taken == pytest.approx(capacity)
    assert level >= capacity / (1 + flows + others) - 1e-12


def test_fair_shares_by_hand() -> None:
    assert fair_share(1.0, 2, 0.2, 0, 1.0) == pytest.approx(0.6)
    assert fair_share(1.0, 9, 0.5, 0, 1.0) == pytest.approx(0.1)
    # A small flow has its fill, a large one and we share the rest.
    assert fair_share(1.0, 1, 0.2, 1, 0.9) == pytest.approx(0.4)


def test_another_job_bursts_with_its_period_and_duty() -> None:
    job = OtherJob(period=20, duty=0.25, share=0.5)
    share = np.asarray(_streams(Dynamics(other_job=job)).advance(200).load.inter_bandwidth)
    assert set(np.unique(share)) == {0.5, 1.0}
    busy = share < 1
    assert (busy.reshape(10, 20, -1).sum(1) == 5).all()
    assert np.array_equal(busy[:-20], busy[20:])
    # Streams are out of phase.
    assert busy.mean(1).std() < 0.1


def test_a_failed_device_leaves_its_traffic_to_the_others() -> None:
    dynamics = Dynamics(failures=Failures(mean_gap=20, mean_length=20))
    share = np.asarray(_streams(dynamics, devices=4).advance(100).load.inter_bandwidth)
    assert set(np.unique(share)) == {0.75, 1.0}
    with pytest.raises(ValueError, match=r"dynamics.failures: 1 device per node"):
        _streams(dynamics, devices=1)


def test_slow_ranks_are_any_rank_for_a_while() -> None:
    spell = _streams(Dynamics(slow_ranks=SlowRanks(mean_gap=10, mean_length=10, most=3.0))).advance(200)
    straggler, rank = np.asarray(spell.load.straggler), spell.slow_rank
    slow = rank >= 0
    assert np.array_equal(slow, straggler > 1)
    assert set(np.unique(rank)) == {-1, *range(16)}
    assert straggler[slow].mean() == pytest.approx(2, rel=0.02)
    # The same rank, as slow as it was, until it recovers.
    stays = slow[1:] & slow[:-1]
    same = (straggler[1:] == straggler[:-1]) & (rank[1:] == rank[:-1])
    assert same[stays].mean() > 0.99


def test_shifts_last_until_the_next() -> None:
    share = np.asarray(_streams(Dynamics(shifts=Shifts(mean_gap=50, least=0.25))).advance(1000).load.inter_bandwidth)
    assert share.min() >= 0.25
    assert (share[1:] != share[:-1]).mean() == pytest.approx(1 / 50, rel=0.05)
    assert np.median(share[-1]) == pytest.approx(0.5, rel=0.1)


def test_degraded_links_and_flows_combine() -> None:
    dynamics = Dynamics(
        degraded=Degraded(mean_gap=2, mean_length=1e9, bandwidth=0.5),
        network_flows=Flows(mean_gap=2, mean_length=1e9, count=1, share=0.1, queueing=0.5),
    )
    load = _streams(dynamics).advance(50).load
    assert np.asarray(load.inter_bandwidth)[-1] == pytest.approx(0.4)
    # Half a hop's wait for each packet ahead, of which a link in use by a fifth has a quarter.
    assert np.asarray(load.inter_latency)[-1] == pytest.approx(1 + 0.5 * 0.25)
    assert (np.asarray(load.intra_latency) == 1).all()


@pytest.mark.parametrize("probability", [0.0, 0.02, 0.3])
def test_noise_keeps_its_median_and_has_its_tail(probability: float) -> None:
    sigma, tail = 0.05, Tail(probability=probability, index=1.5)
    factors = noise(np.random.default_rng(0), (400, 1000), tail).factors(sigma)
    assert (factors > 0).all()
    assert np.median(factors) == pytest.approx(1, abs=5e-4)
    assert np.std(np.log(factors[factors < 1])) == pytest.approx(sigma * np.sqrt(1 - 2 / np.pi), rel=0.02)
    far = (factors > 4).mean()
    assert far == pytest.approx(probability * 4**-1.5, rel=0.1, abs=1e-9)
    assert np.array_equal(factors, noise(np.random.default_rng(0), (400, 1000), tail).factors(sigma))


def _log_noise(wander: Wander, sigma: float = 0.05, steps: int = 20_000) -> np.ndarray:
    return np.log(noise(np.random.default_rng(5), (steps, 8), Tail(), wander).factors(sigma))


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_noise_is_as_correlated_as_asked_and_varies_as_much(correlation: float) -> None:
    drawn = _log_noise(Wander(correlation=correlation))
    assert drawn.std() == pytest.approx(0.05, rel=0.05)
    assert np.corrcoef(drawn[1:, 0], drawn[:-1, 0])[0, 1] == pytest.approx(correlation, abs=0.05)
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.1, "each key's is its own"


def test_bursts_and_drift_are_of_all_keys_at_once_and_modes_of_each() -> None:
    bursts = _log_noise(Wander(bursts=Bursts(mean_gap=500, mean_length=100, factor=1.3)), sigma=0.001)
    on = bursts > 0.13
    assert (on == on[:, :1]).all()
    assert on.mean() == pytest.approx(100 / 600, abs=0.06)
    assert bursts[on].mean() == pytest.approx(np.log(1.3), abs=0.001)
    drift = _log_noise(Wander(drift=0.1), sigma=0.0)
    assert (drift == drift[:, :1]).all()
    assert np.diff(drift[::1000, 0]).std() == pytest.approx(0.1, rel=0.5)
    modes = _log_noise(Wander(slow=0.3, slow_factor=1.2), sigma=0.001) > 0.09
    assert modes.mean() == pytest.approx(0.3, abs=0.02)
    assert abs(np.corrcoef(modes[:, 0], modes[:, 1])[0, 1]) < 0.05
