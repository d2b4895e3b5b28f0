"""Jobs on the emulated NCCL: how they are steered, how they end, and what a plugin is told that only checks that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rig import (
    KIB,
    MIB,
    SIZE,
    Play,
    Rig,
    belief_of,
    collectives,
    exec_ns,
    indices,
    play,
    used_of,
    wait_for,
)

from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS, Algorithm, Collective, Protocol, pair_index
from dynamiccl_ray.plugin_bridge import native_dir
from dynamiccl_ray.plugin_bridge.constants import Constants, write_constants
from dynamiccl_ray.plugin_bridge.nccl_job import (
    FREE_RUNNING,
    HOST_NAME,
    LOG_DTYPE,
    PEER_DIED_CODE,
    HostError,
    NcclJob,
    agreement_violations,
)
from dynamiccl_ray.plugin_bridge.program import Comm, Ops, Program
from dynamiccl_ray.plugin_bridge.times import CHUNKS, Times

ROOT = Path(__file__).parents[2]
NATIVE = Path(__file__).parent / "native"
HOST = native_dir() / HOST_NAME
EMULATED = native_dir() / "libnccl-emulated.so"
PLAIN = belief_of("dgx-a100-hdr")
"""Rings and trees alone."""
PAIR = ((Collective.ALL_REDUCE, MIB), (Collective.ALL_REDUCE, 16 * MIB))


@pytest.fixture(scope="module")
def dummy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dummy") / "dummy.so"
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run(["gcc", *flags, "-o", path, NATIVE / "dummy_plugin.c", "-lpthread"], check=True)
    return path


MakeJob = Callable[..., NcclJob]


@pytest.fixture
def job(rig: Rig, dummy: Path) -> MakeJob:
    """Makes jobs whose plugin leaves a summary."""

    def make(what: Play, *, env: dict[str, str] | None = None, **options: Any) -> NcclJob:
        all_env = {"DUMMY_SUMMARY": str(rig.directory / "summary"), **(env or {})}
        return rig.job(what, plugin=options.pop("plugin", dummy), env=all_env, **options)

    return make


def dummy_play(calls: Any = PAIR, **changes: Any) -> Play:
    return play(calls, **{"belief": PLAIN, "places": (0, 5), "us": 100.0, **changes})


def run(job: NcclJob) -> None:
    job.start()
    job.wait(30)


def summary(job: NcclJob, directory: Path, process: int = 0) -> Counter[str]:
    """What the plugin counted."""
    lines = (line.split() for line in (directory / f"summary.{job.pids()[process]}").read_text().splitlines())
    return Counter({name: int(value) for name, value in lines})


def violations(count: Counter[str]) -> dict[str, int]:
    return {name: n for name, n in count.items() if name.startswith("bad_") or name == "late_profiler_init"}


# ---- every pair of interface versions that shipped together ----


@pytest.mark.parametrize(
    ("release", "tuner_abi", "profiler_abi"),
    [
        ("2.21", 2, 0),
        ("2.22", 3, 0),
        ("2.23", 3, 1),
        ("2.24", 4, 2),
        ("2.26", 4, 3),
        ("2.27", 4, 4),
        ("2.28", 5, 5),
        ("2.29", 5, 6),
        ("2.30", 6, 6),
        ("profiler only", 0, 6),
    ],
)
def test_calls_follow_the_interface(job: MakeJob, rig: Rig, release: str, tuner_abi: int, profiler_abi: int) -> None:
    env = {} if tuner_abi else {"NCCL_TUNER_PLUGIN": "none"}
    run_ = job(dummy_play(steps=25), release=release if tuner_abi else "2.30", env=env)
    run(run_)
    assert agreement_violations(run_.logs()) == 0
    for process in range(2):
        log, count = used_of(run_.log(process)), summary(run_, rig.directory, process)
        n = len(log)
        assert n == 50
        assert violations(count) == {}
        assert np.all(log["own"] == 1)
        choice = [PLAIN.choose(*PAIR[i]) for i in indices(log, PAIR)]
        assert log["algo"].tolist() == [c.algorithm for c in choice]
        assert log["proto"].tolist() == [c.protocol for c in choice]
        assert count["get_coll_info"] == (n if tuner_abi else 0)
        assert count["tables_of_6"] == (n if tuner_abi and profiler_abi == 0 else 0)
        assert count["tuner_init"] == count["tuner_end"] == (1 if tuner_abi else 0)
        assert (count["get_chunk_size"] > 0) == (tuner_abi == 6)
        check_events(count, log, profiler_abi)


def check_events(count: Counter[str], log: np.ndarray[Any, Any], profiler_abi: int) -> None:
    n, channels = len(log), int(log["channels"].sum())
    present = profiler_abi > 0
    assert count["profiler_init"] == count["profiler_end"] == present
    for kind, expected in [
        (1 << 0, n * present),
        (1 << 1, n * present),
        (1 << 6, channels * (profiler_abi >= 3)),
        (1 << 8, n * (profiler_abi >= 5)),
        (1 << 9, n * (profiler_abi >= 5)),
        (1 << 11, n * (profiler_abi >= 5)),
    ]:
        assert count[f"start_{kind}"] == count[f"stop_{kind}"] == expected
    # A rank sends on some of the channels and receives on some.
    assert count["start_8"] == count["stop_8"]
    assert (count["start_8"] > n) == present
    assert count["stopped_twice"] == 0
    assert count["state_22"] == channels * (profiler_abi >= 4)
    # Latest stop minus earliest start is the time in the log.
    assert count["exec_ns"] == int(exec_ns(log).sum()) * (profiler_abi >= 4)
    if profiler_abi >= 4:
        assert count["kernels_after_stop"] > 0
    assert count["kernels_after_stop"] + count["kernels_before_stop"] == channels * (profiler_abi >= 3)


def test_a_library_without_the_symbols_is_no_plugin(job: MakeJob, tmp_path: Path) -> None:
    source, plugin = tmp_path / "empty.c", tmp_path / "empty.so"
    source.write_text("int nothing;\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", plugin, source], check=True)
    run_ = job(dummy_play(steps=1), plugin=plugin, env={"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL"})
    run(run_)
    assert "the tuner plugin has no version that is known" in run_.stderr(0)
    assert np.all(run_.log(0)["own"] == 1)


# ---- the tuner's answer ----


def test_a_request_is_carried_out(job: MakeJob) -> None:
    what = dummy_play(steps=10, sigma=0.0)
    run_ = job(what, env={"DUMMY_PAIR": "0 2 4", "DUMMY_CHUNK": "131072"})
    run(run_)
    log = used_of(run_.log(0))
    assert set(log["algo"]) == {Algorithm.TREE}
    assert set(log["proto"]) == {Protocol.SIMPLE}
    assert set(log["asked"]) == set(log["channels"]) == {4}
    assert set(log["chunk_bytes"]) == {131072}
    assert not log["own"].any()


@pytest.mark.parametrize(
    ("collective", "nbytes", "protocol", "expected"),
    [
        # 32 KiB of traffic per channel; all-reduce moves every byte twice.
        (Collective.ALL_REDUCE, 1024, Protocol.SIMPLE, 1),
        (Collective.ALL_REDUCE, 3 * 16 * KIB, Protocol.SIMPLE, 3),
        (Collective.ALL_REDUCE, 10 * 16 * KIB, Protocol.SIMPLE, 5),
        (Collective.ALL_REDUCE, 3 * 4096, Protocol.LL, 3),
        (Collective.BROADCAST, 3 * 32 * KIB, Protocol.SIMPLE, 3),
        (Collective.ALL_GATHER, 3 * 32 * KIB, Protocol.SIMPLE, 3),
        (Collective.REDUCE_SCATTER, 3 * 32 * KIB, Protocol.SIMPLE, 3),
        (Collective.ALL_REDUCE, 64 * MIB, Protocol.SIMPLE, 8),
    ],
)
def test_small_messages_use_fewer_channels(
    job: MakeJob, collective: Collective, nbytes: int, protocol: Protocol, expected: int
) -> None:
    run_ = job(dummy_play([(collective, nbytes)], places=(0,), steps=1), env={"DUMMY_PAIR": f"1 {protocol.value} 8"})
    run(run_)
    assert run_.log(0)["channels"].tolist() == [expected]


def test_requests_are_clamped_to_the_communicator(job: MakeJob) -> None:
    what = dummy_play([(Collective.ALL_REDUCE, 64 * MIB)], places=(0,), steps=1)
    run_ = job(what, env={"DUMMY_PAIR": "1 2 32", "DUMMY_CHUNK": str(1 << 30)})
    run(run_)
    (row,) = run_.log(0)
    assert (row["asked"], row["channels"]) == (32, PLAIN.channels)
    assert PLAIN.channels < 32
    assert row["chunk_bytes"] == (4 << 20) // 2


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"DUMMY_CHUNK": "100"}, "divide by zero"),
        ({"DUMMY_PAIR": "4 2 0"}, "wrote a cost over -1: NVLS/SIMPLE"),
        ({"DUMMY_PAIR": "1 2 200"}, "signed 8-bit"),
        ({"DUMMY_ERROR_AT": "3"}, "getCollInfo returned 3"),
        ({"EMULATED_NCCL": ""}, "does not name a file of constants"),
        ({"EMULATED_NCCL_VERSION": "2.5"}, "there are 2.21 to 2.30"),
        ({"EMULATED_NCCL_FAULTS": "lag_us"}, "expected lag_us, zero_timers"),
    ],
)
def test_what_breaks_nccl_fails_the_job(job: MakeJob, env: dict[str, str], message: str) -> None:
    run_ = job(dummy_play(steps=5, places=(0,)), env=env)
    with pytest.raises(HostError, match=message):
        run(run_)


def test_v2_must_not_ask_for_what_is_not_there(job: MakeJob) -> None:
    run_ = job(dummy_play(steps=5, places=(0,)), release="2.21", env={"DUMMY_PAIR": "4 2 0"})
    with pytest.raises(HostError, match="the v2 tuner asked for algorithm 4, protocol 2, which is not available"):
        run(run_)


def test_a_count_that_nccl_does_not_clamp_fails_the_job(job: MakeJob) -> None:
    belief = belief_of("dgx-h100-ndr-sharp", channels=16)
    run_ = job(dummy_play(steps=5, places=(0,), belief=belief), env={"DUMMY_PAIR": "3 2 17"})
    with pytest.raises(HostError, match="17 channels for COLLNET_CHAIN, which NCCL does not clamp"):
        run(run_)


# ---- times ----


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


# ---- steering ----


def test_credit_is_the_number_of_steps_that_begin(job: MakeJob) -> None:
    run_ = job(dummy_play())
    run_.set_credit(10)
    run_.start()
    wait_for(lambda: run_.progress().tolist() == [10, 10] and run_.states() == ["waiting"] * 2)
    assert run_.add_credit(5) == 15
    wait_for(lambda: run_.progress().tolist() == [15, 15])
    time.sleep(0.05)
    assert run_.progress().tolist() == [15, 15]
    assert run_.stop(10) in (15, 16)
    assert len(run_.log(0)) == len(run_.log(1)) == 30
    with pytest.raises(ValueError, match="expected an unsigned 64-bit number"):
        run_.set_credit(-1)
    with pytest.raises(ValueError, match="cannot add"):
        run_.add_credit(-1)


def test_a_free_running_job_is_limited_where_it_is(job: MakeJob) -> None:
    run_ = job(dummy_play(PAIR[:1], places=(0,), syncs=False))
    run_.start()
    for _ in range(20):
        begun = int(run_.progress()[0])
        wait_for(lambda begun=begun: int(run_.progress()[0]) > begun + 20)
        credit = run_.add_credit(3)
        wait_for(lambda credit=credit: run_.states() == ["waiting"] and int(run_.progress()[0]) >= credit)
        assert int(run_.progress()[0]) == credit
        run_.set_credit(FREE_RUNNING)
    run_.stop()


def test_no_rank_runs_further_ahead_than_the_window(job: MakeJob) -> None:
    """One rank takes its time, the other does not wait for anything."""
    what = dummy_play(PAIR[:1], window=4, us=2000.0, syncs=False)
    what.program.ranks[1].step.sync()
    run_ = job(what, pace=1.0)
    run_.start()
    furthest = 0
    for _ in range(300):
        # The second may move between the two looks, so the bound holds one way only.
        first, second = int(run_.progress()[0]), int(run_.progress()[1])
        furthest = max(furthest, first - second)
        time.sleep(0.0005)
    assert 1 < furthest <= 4
    stopped = run_.stop(20)
    assert [len(run_.log(i)) for i in range(2)] == [stopped, stopped]


def test_every_rank_switches_at_the_same_step(job: MakeJob) -> None:
    run_ = job(dummy_play(PAIR[:1], places=(0, 3, 5), us=(100.0, 200.0)))
    run_.start()
    wait_for(lambda: int(run_.progress().min()) > 100)
    switches = []
    for phase in (1, 0, 1):
        switches.append(run_.schedule_phase(phase))
        wait_for(lambda at=switches[-1]: int(run_.progress().min()) > at + 50)
    with pytest.raises(ValueError, match="may have begun"):
        run_.schedule_phase(0, at=switches[-1])
    with pytest.raises(ValueError, match="phase is 2; there are 2"):
        run_.schedule_phase(2)
    run_.schedule_phase(0, at=2**40)
    with pytest.raises(ValueError, match="lies before the last switch"):
        run_.schedule_phase(1, at=2**40 - 1)
    run_.stop(20)
    assert agreement_violations(run_.logs()) == 0
    for process in range(3):
        log = used_of(run_.log(process))
        assert (np.flatnonzero(np.diff(log["phase"].astype(int))) + 1).tolist() == switches
        medians = [np.median(log["priced_ns"][log["phase"] == phase]) for phase in (0, 1)]
        assert 1.7 < medians[1] / medians[0] < 2.3


def test_rate(job: MakeJob) -> None:
    run_ = job(dummy_play(PAIR[:1], steps=100, rate_hz=200.0))
    started = time.monotonic()
    run(run_)
    assert 0.4 < time.monotonic() - started < 10


def test_equal_seeds_give_equal_logs_however_busy_the_machine_is(job: MakeJob) -> None:
    logs = []
    for lag_us, seed in ((0, 7), (300, 7), (0, 8)):
        what = dummy_play(steps=50)
        assert what.times is not None
        what.times.noise_seed = seed
        run_ = job(what, env={"EMULATED_NCCL_FAULTS": f"lag_us={lag_us}"})
        run(run_)
        logs.append([used_of(run_.log(i)).tobytes() for i in range(2)])
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


# ---- ends ----


@pytest.mark.parametrize("syncs", [True, False], ids=["on the GPU", "at the window"])
def test_a_dead_peer_ends_the_others(job: MakeJob, syncs: bool) -> None:
    """Wherever they wait for it."""
    run_ = job(dummy_play(PAIR[:1], places=(0, 3, 5), syncs=syncs))
    run_.start()
    wait_for(lambda: int(run_.progress().min()) > 20)
    run_.kill(1)
    assert run_.join(20) == [PEER_DIED_CODE, -9, PEER_DIED_CODE]
    assert "rank 1 failed or died" in run_.stderr(0)
    with pytest.raises(HostError, match="process 1 ended with -9"):
        run_.check()


def test_leaving_the_context_ends_free_running_processes(job: MakeJob) -> None:
    with job(dummy_play(PAIR[:1], places=(0,))) as run_:
        run_.start()
        run_.await_ranks()
        wait_for(lambda: int(run_.progress().min()) > 10)
    assert run_.returncodes() == [0]
    with pytest.raises(HostError, match="has been started already"):
        run_.start()


def test_a_job_that_does_not_end_is_killed_and_described(job: MakeJob) -> None:
    run_ = job(dummy_play(PAIR[:1], places=(0,)))
    run_.set_credit(3)
    run_.start()
    wait_for(lambda: run_.states() == ["waiting"])
    with pytest.raises(HostError, match=r"did not end within 0\.2 s \(states \['waiting'\], begun \[3\]\)"):
        run_.wait(0.2)
    assert None not in run_.returncodes()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


ORPHANS = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from rig import CALLS, Rig, play
rig = Rig(Path(sys.argv[2]), Path(sys.argv[3]))
job = rig.job(play(CALLS[:1], places=(0, 5)))
if sys.argv[4] == "waiting":
    job.set_credit(5)
job.start()
job.await_ranks()
print(*job.pids(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["running", "waiting"])
def test_no_process_outlives_the_one_that_started_it(rig: Rig, how: str) -> None:
    arguments = [str(Path(__file__).parent), str(rig.directory), str(rig.shm), how]
    with subprocess.Popen([sys.executable, "-c", ORPHANS, *arguments], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        try:
            assert len(pids) == 2
            assert all(map(is_running, pids))
            parent.kill()
            parent.wait()
            wait_for(lambda: not any(map(is_running, pids)), 10, what="the end of the orphans")
        finally:
            for pid in filter(is_running, pids):
                os.kill(pid, signal.SIGKILL)


def test_the_end_of_the_thread_that_started_a_job_is_not_its_end(job: MakeJob) -> None:
    run_ = job(dummy_play(PAIR[:1]))
    thread = threading.Thread(target=run_.start)
    thread.start()
    thread.join()
    run_.await_ranks()
    begun = int(run_.progress().min())
    wait_for(lambda: int(run_.progress().min()) > begun + 100)
    assert run_.returncodes() == [None, None]
    run_.stop()


# ---- what makes it realistic ----


def test_aggregates_transfers_foreign_operations_and_bad_timers(job: MakeJob, rig: Rig) -> None:
    steps = 100

    def per_step(ops: Ops, comm: Comm) -> None:
        collectives(PAIR)(ops, comm)
        with ops.group():
            for _ in range(2):
                ops.collective(comm, *PAIR[1])
        ops.send(comm, 5, 4096)

    what = dummy_play(PAIR, places=(0,), steps=steps, per_step=per_step)
    run_ = job(what, env={"EMULATED_NCCL_FAULTS": "foreign_ops=100,zero_timers=20"})
    run(run_)
    log, count = used_of(run_.log(0)), summary(run_, rig.directory)
    assert len(log) == 4 * steps
    assert 0 < count.pop("bad_timers") < count["state_22"] / 20
    assert violations(count) == {}
    assert count["get_coll_info"] == 3 * steps
    assert count["start_2"] == count["start_512"] == 4 * steps
    assert count["start_4"] == count["stop_4"] == count["start_1024"] == steps
    assert 0 < count["foreign"] < count["start_8"] / 5
    # The second of an aggregate does not start at channel 0.
    assert count["high_channels"] > 0


def test_a_mask_that_goes_off_leaves_nccls_stale_stop(job: MakeJob, rig: Rig) -> None:
    run_ = job(dummy_play(PAIR[:1], places=(0,), steps=20), env={"DUMMY_MASK_OFF_AT": "5"})
    run(run_)
    count = summary(run_, rig.directory)
    assert violations(count) == {}
    # The mask is read at the call, so the collective that turned it off is still reported.
    assert count["start_2"] == count["stop_2"] == count["start_512"] == 5
    assert count["stop_512"] == 20
    assert count["stopped_twice"] == 15


def test_several_communicators(job: MakeJob, rig: Rig) -> None:
    run_ = job(dummy_play(comms=3, steps=5))
    run(run_)
    count = summary(run_, rig.directory)
    assert count["profiler_init"] == count["tuner_end"] == 3
    assert violations(count) == {}
    assert agreement_violations(run_.logs()) == 0
    times = [[used_of(run_.log(process), comm)["priced_ns"].tolist() for process in range(2)] for comm in range(3)]
    assert [len(one) for both in times for one in both] == [10] * 6
    assert times[0] != times[1]


@pytest.mark.parametrize(("level", "shown"), [("WARN", False), ("INFO", True)])
def test_the_plugin_writes_to_nccls_log(job: MakeJob, level: str, shown: bool) -> None:
    run_ = job(dummy_play(PAIR[:1], places=(3,), steps=1), env={"NCCL_DEBUG": level})
    run(run_)
    assert "NCCL WARN" in run_.stderr(0)
    assert "TUNER/Dummy: warning of comm" in run_.stderr(0)
    assert ("TUNER/Dummy: information" in run_.stderr(0)) == shown


# ---- Python alone ----


def test_agreement_violations() -> None:
    one = np.zeros(10, LOG_DTYPE)
    one["ordinal"], one["func"] = np.arange(10), Collective.ALL_REDUCE
    other = one.copy()
    other["rank"] = 1
    assert agreement_violations(one) == 0
    assert agreement_violations(np.concatenate([one, other])) == 0
    other["stop_ns"] = 5
    assert agreement_violations(np.concatenate([one, other[:7]])) == 0
    other["proto"][3] = 1
    other["chunk_bytes"][3] = 1
    other["channels"][8] = 1
    assert agreement_violations(np.concatenate([one, one, other])) == 2
    assert agreement_violations(np.concatenate([one, other[:5]])) == 1
    other["comm"] = 1
    assert agreement_violations(np.concatenate([one, other])) == 0


def test_a_torn_log_record_is_left_out(job: MakeJob) -> None:
    run_ = job(dummy_play(PAIR[:1], places=(0,), steps=3))
    run(run_)
    path = run_._processes[0].log
    path.write_bytes(path.read_bytes()[:-1])
    assert len(run_.log(0)) == 2
    path.unlink()
    assert len(run_.log(0)) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Program(nodes=9, ranks_per_node=8), "72 ranks; a job here has 1 to 64"),
        (lambda: Program(ranks_per_node=2).comm("x" * 64), "63 bytes"),
        (lambda: Program(ranks_per_node=2).comm("x", size=4, nodes=[0, 1]), "4 ranks on 2 places"),
        (lambda: dummy_play([(Collective.ALL_GATHER, 100)]), "no whole number of elements of FLOAT32 for 8 ranks"),
        (lambda: Times().asked(0, 4, 1, np.zeros((2, N_PAIRS, 9)), np.zeros((1, N_PAIRS, 9))), r"have shape \(2, 22"),
        (lambda: Times(n_phases=2).sent(0, 1, [[1.0, 2.0]]), r"expected \(2, 2\)"),
        (
            lambda: Constants.of(Program(ranks_per_node=4).comm("world"), PLAIN),
            "has 4 ranks on 1 nodes, the belief of it 8 on 2",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_jobs_are_checked(rig: Rig, tmp_path: Path) -> None:
    program = Program(nodes=2, ranks_per_node=1)
    with pytest.raises(ValueError, match="one would have ranks of two nodes"):
        NcclJob(program, library=EMULATED, directory=tmp_path / "a", ranks_per_process=2)
    with pytest.raises(ValueError, match=r"none\.so does not exist; build it with"):
        NcclJob(program, library=tmp_path / "none.so", directory=tmp_path / "b")


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-8] if how == "short" else b"X" + data[1:])


@pytest.mark.parametrize("how", ["short", "magic"])
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("program.bin", r"program .*: (not a program of this version|its size is not what its header says)"),
        ("job.page", r"job page .*: wrong magic, version or size"),
        ("times.bin", r"times .*: (not a file of times of this version|its size is not what its header says)"),
        ("constants", r"(not a file of constants of this version|its size is not what its header says)"),
        ("meeting", r"meeting: not a meeting file of version 1, or too short"),
    ],
)
def test_a_damaged_file_is_refused(job: MakeJob, rig: Rig, file: str, message: str, how: str) -> None:
    run_ = job(dummy_play(PAIR[:1], places=(0,), steps=1))
    damage(rig.directory / rig.job_id / file, how)
    with pytest.raises(HostError, match=message):
        run(run_)


def test_a_job_needs_constants_of_its_communicators(job: MakeJob, rig: Rig) -> None:
    what = dummy_play(PAIR[:1], places=(0,), comms=2, steps=1)
    run_ = job(what)
    write_constants(rig.directory / rig.job_id / "constants", {0: what.constants()[0]})
    with pytest.raises(HostError, match="says nothing of communicator 1"):
        run(run_)


def test_usage_errors(tmp_path: Path) -> None:
    for arguments in ([], ["stray"], ["--ranks", "3-1"], ["--what"], ["--parent", "x"]):
        done = subprocess.run([HOST, *arguments], capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 2
        assert "usage: dynamiccl-nccl-job" in done.stderr
    program = Program(ranks_per_node=2)
    program.comm("world")
    program.write(tmp_path / "p")
    common = [HOST, "--program", tmp_path / "p", "--page", tmp_path / "none", "--ranks"]
    for ranks, library, message in [("0-2", EMULATED, "has 2 ranks"), ("0", EMULATED, "cannot map the job page")]:
        done = subprocess.run([*common, ranks, "--nccl", library], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert message in done.stderr


def test_a_process_whose_parent_is_gone_does_nothing(job: MakeJob) -> None:
    run_ = job(dummy_play(PAIR[:1], places=(0,), steps=1))
    done = subprocess.run([*run_._command, "--ranks", "0", "--parent", "1"], env=run_._env, timeout=20, check=False)
    assert done.returncode == 0
    assert run_.states() == ["absent"]
