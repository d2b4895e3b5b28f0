"""Jobs on the emulated NCCL: how long their collectives take."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from dummy_job import PAIR, PLAIN, MakeJob, dummy_play, run
from rig import MIB, SIZE, used_of

from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS, Algorithm, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.nccl_job import HostError
from dynamiccl_ray.plugin_bridge.program import Comm, Ops
from dynamiccl_ray.plugin_bridge.times import CHUNKS, Times


def asked_table(**cells: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    us = np.full((1, N_PAIRS, len(CHANNEL_VALUES)), 50.0)
    return us, np.zeros_like(us)


def test_times_by_what_was_asked_for(job: MakeJob) -> None:
    what = dummy_play(PAIR[:1], places=(0,), steps=5)
    us, sigma = asked_table()
    us[0, pair_index(Algorithm.TREE, Protocol.SIMPLE), CHANNEL_VALUES.index(4)] = 37.0
    what.times = Times()
    what.times.asked(0, *PAIR[0], us, sigma)
    run_ = job(what, env={"DUMMY_PAIR": "0 2 4"})
    run(run_)
    assert set(run_.log(0)["priced_ns"]) == {37_000}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"DUMMY_PAIR": "1 2 5"}, r"algorithm 1, protocol 2, \d+ channels \(5 asked for\)"),
        ({}, "no time for function 4 of 1048576 bytes on communicator 0 in phase 0.*NCCL's own choice"),
    ],
)
def test_a_time_that_is_not_known_is_named(job: MakeJob, env: dict[str, str], message: str) -> None:
    what = dummy_play(PAIR[:1], places=(0,), steps=5)
    us, sigma = asked_table()
    us[0, 0, 0] = np.nan
    what.times = Times()
    what.times.asked(0, *PAIR[0], us, sigma)
    with pytest.raises(HostError, match=message):
        run(job(what, env=env))


def test_a_pair_without_a_time_is_not_offered(job: MakeJob) -> None:
    """What was not measured must not be asked for, and NCCL itself does not choose it."""
    own = PLAIN.choose(*PAIR[0])
    us, sigma = asked_table()
    us[0, pair_index(int(own.algorithm), int(own.protocol))] = np.nan
    what = dummy_play(PAIR[:1], places=(0,), steps=2)
    what.times = Times()
    what.times.asked(0, *PAIR[0], us, sigma)
    run_ = job(what)
    run(run_)
    cost = PLAIN.cost_table_us(*PAIR[0])
    cost[own.algorithm, own.protocol] = np.inf
    cost[cost < 0] = np.inf
    assert {(int(r["algo"]), int(r["proto"])) for r in run_.log(0)} == {divmod(int(cost.argmin()), 3)}


def test_times_by_what_was_used_lie_on_lines_between_chunks(job: MakeJob) -> None:
    us = np.random.default_rng(3).uniform(20, 60, (2, 21, PLAIN.channels, len(CHUNKS)))
    what = dummy_play(PAIR[:1], places=(0,), steps=6)
    what.times = Times(n_phases=2)
    what.times.used(0, *PAIR[0], us)
    run_ = job(what, env={"DUMMY_PAIR": "1 2 5", "DUMMY_CHUNK": str(96 << 10)})
    run_.schedule_phase(1, at=3)
    run(run_)
    log = used_of(run_.log(0))
    assert set(log["chunk_bytes"]) == {96 << 10}
    assert log["phase"].tolist() == [0, 0, 0, 1, 1, 1]
    pair = pair_index(Algorithm.RING, Protocol.SIMPLE) - 1
    for row in log:
        line = us[row["phase"], pair, row["channels"] - 1].astype(np.float32)
        expected = 1e3 * np.interp(np.log2(96 << 10), np.log2(CHUNKS), line)
        assert abs(row["priced_ns"] - expected) < 1.5


def test_transfers_take_longer_between_nodes(job: MakeJob) -> None:
    def exchange(ops: Ops, comm: Comm) -> None:
        for peer in (1, SIZE - 1):
            with ops.group():
                ops.send(comm, peer, MIB)
                ops.recv(comm, peer, MIB)
            ops.sync()

    what = dummy_play(PAIR[:1], places=(0,), steps=1, per_step=exchange)
    what.times = Times()
    what.times.sent(0, MIB, [[12.0, 34.0]])
    run_ = job(what)
    run(run_)
    # To and from a rank are two operations: they are of different rounds.
    assert run_.log(0)["priced_ns"].tolist() == 2 * [12_000] + 2 * [34_000]


_U64 = np.uint64


def mix(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """splitmix64, written from its description."""
    with np.errstate(over="ignore"):
        x = x + _U64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> _U64(31)))


def mix_one(x: int) -> int:
    return int(mix(np.array([x], np.uint64))[0])


def normal(seed: int, index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Standard normal numbers of a stream: Box and Muller, two hashes each."""
    stream, counter = _U64(mix_one(seed)), index.astype(np.uint64)
    u1 = ((mix(stream ^ (counter * _U64(2))) >> _U64(11)) + _U64(1)).astype(np.float64) * 2.0**-53
    u2 = (mix(stream ^ (counter * _U64(2) + _U64(1))) >> _U64(11)).astype(np.float64) * 2.0**-53
    return np.asarray(np.sqrt(-2.0 * np.log(u1)) * np.cos(2.0 * np.pi * u2))


def test_noise_is_what_it_is_said_to_be(job: MakeJob) -> None:
    """Shared by a communicator's ranks but for a share of each rank's own; and of any distribution on top."""
    seed, sigma, jitter, steps = 7, 0.1, 0.02, 200
    what = dummy_play(PAIR[:1], comms=2, steps=steps, us=1000.0, sigma=sigma)
    assert what.times is not None
    what.times.noise_seed, what.times.rank_jitter = seed, jitter
    what.times.noise = np.random.default_rng(1).laplace(0, 0.05, 37)
    run_ = job(what)
    run(run_)
    ordinal = np.arange(steps)
    factors = []
    for number in range(2):
        shared = seed ^ mix_one(number)
        drawn = what.times.noise.astype(np.float32)[(ordinal + mix_one(shared)) % 37]
        for process, place in enumerate((0, 5)):
            used = used_of(run_.log(process), number)
            own = shared ^ mix_one(place + 0x52414E4B00000000)
            expected = np.float32(sigma) * normal(shared, ordinal) + drawn + jitter * normal(own, ordinal)
            factors.append(np.log(used["priced_ns"] / 1e6))
            np.testing.assert_allclose(factors[-1], expected, atol=2e-6)
    assert np.corrcoef(factors[0], factors[1])[0, 1] > 0.9
    assert abs(np.corrcoef(factors[0], factors[2])[0, 1]) < 0.3


def test_noise_is_standard_normal() -> None:
    z = normal(3, np.arange(200_000))
    assert abs(z.mean()) < 0.01
    assert abs(z.std() - 1) < 0.01
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.01
    assert not np.array_equal(z[:10], normal(4, np.arange(10)))


def test_real_time_passes_only_where_it_is_told_to(job: MakeJob) -> None:
    virtual_s = 40 * 0.02
    elapsed = {}
    for pace in (0.0, 1.0):
        run_ = job(dummy_play(PAIR[:1], places=(0,), steps=40, us=20_000.0, sigma=0.0), pace=pace)
        started = time.monotonic()
        run(run_)
        elapsed[pace] = time.monotonic() - started
        assert run_.log(0)["stop_ns"].max() >= virtual_s * 1e9
        assert run_.iteration_us()[0] == pytest.approx(20_003, rel=1e-3)
    assert elapsed[1.0] > virtual_s
    assert elapsed[0.0] < elapsed[1.0]
