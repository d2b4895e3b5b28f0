"""The emulated NCCL host, against a plugin that only checks how it is called."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS, Algorithm, Collective, Protocol, pair_index
from plugin_bridge.emulation import (
    PEER_DIED_CODE,
    USED_DTYPE,
    EmulatedJob,
    HostError,
    HostKey,
    HostProgram,
    agreement_violations,
    expected_ns,
    noise,
    read_used,
)

ROOT = Path(__file__).parents[2]
NATIVE = Path(__file__).parent / "native"
GCC = ["gcc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror"]
MIB = 1 << 20

StartJob = Callable[..., EmulatedJob]


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host") / "dynamiccl-nccl-host"
    sources = [str(source) for source in sorted((ROOT / "plugin_bridge" / "host").glob("*.c"))]
    subprocess.run([*GCC, "-o", str(path), *sources, "-ldl", "-lpthread", "-lm"], check=True)
    return path


@pytest.fixture(scope="session")
def dummy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dummy") / "dummy.so"
    source = str(NATIVE / "dummy_plugin.c")
    subprocess.run([*GCC, "-fPIC", "-shared", "-o", str(path), source, "-lpthread"], check=True)
    return path


def make_key(n_bytes: int = MIB, collective: Collective = Collective.ALL_REDUCE, channels: int = 8) -> HostKey:
    cost = np.full((7, 3), -1.0, np.float32)
    cost[Algorithm.TREE] = 40, 35, 50
    cost[Algorithm.RING] = 60, 30, 45
    return HostKey(
        collective=collective,
        n_bytes=n_bytes,
        cost_us=cost,
        own_channels=np.full((7, 3), channels, np.uint8),
        own_warps=np.full((7, 3), 16, np.uint8),
        own_chunk_bytes=np.tile(np.array([32768, 30720, 65536], np.uint32), (7, 1)),
    )


def make_program(**changes: Any) -> HostProgram:
    keys = changes.pop("keys", [make_key(), make_key(16 * MIB)])
    phases = changes.pop("phases", (100.0, 200.0))
    shape = (len(phases), len(keys), N_PAIRS, len(CHANNEL_VALUES))
    time_us = np.broadcast_to(np.reshape(phases, (-1, 1, 1, 1)), shape).copy()
    defaults: dict[str, Any] = {
        "comm_id": 0x1234,
        "comm_name": "world",
        "n_ranks": 8,
        "n_nodes": 2,
        "max_channels": 16,
        "order": np.arange(len(keys), dtype=np.uint32),
        "sigma": np.full(shape, 0.1),
        "noise_seed": 7,
        "rank_jitter": 0.01,
        "window": 8,
    }
    return HostProgram(keys=keys, time_us=time_us, **{**defaults, **changes})


@pytest.fixture
def job(host: Path, dummy: Path, tmp_path: Path) -> StartJob:
    """Makes jobs of two processes whose plugin leaves a summary."""

    def make(program: HostProgram, *, ranks: tuple[int, ...] = (0, 5), **options: Any) -> EmulatedJob:
        directory = tmp_path / f"job{len(list(tmp_path.iterdir()))}"
        env = {"DUMMY_SUMMARY": str(directory / "summary"), **options.pop("env", {})}
        return EmulatedJob(
            program,
            ranks=ranks,
            job_id="test",
            plugin=dummy,
            directory=directory,
            host=host,
            env=env,
            **options,
        )

    return make


def summaries(job: EmulatedJob, directory: Path) -> list[Counter[str]]:
    """What the plugin counted, per process."""
    found = []
    for pid in job.pids():
        (path,) = directory.glob(f"*/summary.{pid}")
        lines = (line.split() for line in path.read_text().splitlines())
        found.append(Counter({name: int(value) for name, value in lines}))
    return found


def violations(summary: Counter[str]) -> dict[str, int]:
    return {name: n for name, n in summary.items() if name.startswith("bad_") or name == "late_profiler_init"}


# ---- every pair of ABI versions that shipped together ----


@pytest.mark.parametrize(
    ("tuner_abi", "profiler_abi"),
    [(2, 0), (3, 0), (3, 1), (4, 2), (4, 3), (4, 4), (5, 5), (5, 6), (6, 6), (0, 6)],
    ids=["2.21", "2.22", "2.23", "2.24", "2.26", "2.27", "2.28", "2.29", "2.30", "profiler-only"],
)
def test_calls_follow_the_abi(job: StartJob, tmp_path: Path, tuner_abi: int, profiler_abi: int) -> None:
    n, ranks = 50, (0, 5)
    program = make_program(total=n)
    with job(program, ranks=ranks, tuner_abi=tuner_abi, profiler_abi=profiler_abi) as run:
        run.start()
        run.wait(20)
        logs = [run.used(i) for i in range(len(ranks))]
        counts = summaries(run, tmp_path)
    assert agreement_violations(logs) == 0
    for rank, log, count in zip(ranks, logs, counts, strict=True):
        assert violations(count) == {}
        assert len(log) == n
        np.testing.assert_allclose(log["exec_ns"], expected_ns(program, log, rank=rank), atol=0.51)
        assert np.all(log["untouched"] == 1)
        # The cheapest entry of the table.
        assert set(log["algorithm"]) == {Algorithm.RING}
        assert set(log["protocol"]) == {Protocol.LL128}
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
        (1 << 3, channels * present),
        (1 << 6, channels * (profiler_abi >= 3)),
        (1 << 8, n * (profiler_abi >= 5)),
        (1 << 9, n * (profiler_abi >= 5)),
        (1 << 11, n * (profiler_abi >= 5)),
    ]:
        assert count[f"start_{kind}"] == count[f"stop_{kind}"] == expected
    assert count["stopped_twice"] == 0
    assert count["state_22"] == channels * (profiler_abi >= 4)
    # Latest stop minus earliest start is the priced time, to the nanosecond.
    assert count["exec_ns"] == int(log["exec_ns"].sum()) * (profiler_abi >= 4)
    if profiler_abi >= 4:
        assert count["kernels_after_stop"] > 0
    assert count["kernels_after_stop"] + count["kernels_before_stop"] == channels * (profiler_abi >= 3)


@pytest.mark.parametrize("profiler_abi", [1, 2, 3])
def test_before_v4_the_cost_is_host_time(job: StartJob, profiler_abi: int) -> None:
    """The processes cannot be faster than the sum of the priced times."""
    program = make_program(total=40, phases=(2000.0,))
    with job(program, tuner_abi=3, profiler_abi=profiler_abi) as run:
        started = time.monotonic()
        run.start()
        run.wait(20)
        elapsed = time.monotonic() - started
        assert elapsed > run.used(0)["exec_ns"].sum() * 1e-9


# ---- the tuner's answer ----


def test_a_request_is_carried_out(job: StartJob) -> None:
    program = make_program(total=20)
    asked = pair_index(Algorithm.TREE, Protocol.SIMPLE)
    program.time_us[:, :, asked, CHANNEL_VALUES.index(4)] = 37.0
    with job(program, env={"DUMMY_PAIR": "0 2 4", "DUMMY_CHUNK": "131072"}) as run:
        run.start()
        run.wait(20)
        log = run.used(0)
    assert set(log["algorithm"]) == {Algorithm.TREE}
    assert set(log["protocol"]) == {Protocol.SIMPLE}
    assert set(log["requested_channels"]) == set(log["channels"]) == {4}
    assert set(log["chunk_bytes"]) == {131072}
    assert not log["untouched"].any()
    np.testing.assert_allclose(log["exec_ns"], expected_ns(program, log, rank=0), atol=0.51)
    assert 30_000 < np.median(log["exec_ns"]) < 45_000


@pytest.mark.parametrize(
    ("collective", "n_bytes", "protocol", "expected"),
    [
        # 32 KiB of traffic per channel; all-reduce moves every byte twice.
        (Collective.ALL_REDUCE, 1024, Protocol.SIMPLE, 1),
        (Collective.ALL_REDUCE, 3 * 16384, Protocol.SIMPLE, 3),
        (Collective.ALL_REDUCE, 10 * 16384, Protocol.SIMPLE, 5),
        (Collective.ALL_REDUCE, 3 * 4096, Protocol.LL, 3),
        (Collective.BROADCAST, 3 * 32768, Protocol.SIMPLE, 3),
        (Collective.ALL_GATHER, 3 * 32768, Protocol.SIMPLE, 3),
        (Collective.REDUCE_SCATTER, 3 * 32768, Protocol.SIMPLE, 3),
        (Collective.ALL_REDUCE, 64 * MIB, Protocol.SIMPLE, 8),
    ],
)
def test_small_messages_use_fewer_channels(
    job: StartJob, collective: Collective, n_bytes: int, protocol: Protocol, expected: int
) -> None:
    program = make_program(total=1, keys=[make_key(n_bytes, collective)])
    with job(program, ranks=(0,), env={"DUMMY_PAIR": f"1 {protocol.value} 8"}) as run:
        run.start()
        run.wait(20)
        assert run.used(0)["channels"].tolist() == [expected]


def test_requests_are_clamped_to_the_communicator(job: StartJob) -> None:
    program = make_program(total=1, keys=[make_key(64 * MIB)])
    with job(program, ranks=(0,), env={"DUMMY_PAIR": "1 2 32", "DUMMY_CHUNK": str(1 << 30)}) as run:
        run.start()
        run.wait(20)
        log = run.used(0)
    assert log["requested_channels"].tolist() == [32]
    assert log["channels"].tolist() == [program.max_channels]
    assert log["chunk_bytes"].tolist() == [(1 << 22) // 2]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"DUMMY_CHUNK": "100"}, "divide by zero"),
        ({"DUMMY_PAIR": "4 2 0"}, "wrote a cost over -1: NVLS/SIMPLE"),
        ({"DUMMY_PAIR": "1 2 200"}, "signed 8-bit"),
        ({"DUMMY_PAIR": "1 2 5"}, "no measurement for phase 0, key 0"),
        ({"DUMMY_ERROR_AT": "3"}, "getCollInfo returned 3"),
    ],
)
def test_what_breaks_nccl_fails_the_host(job: StartJob, env: dict[str, str], message: str) -> None:
    with job(make_program(total=10), ranks=(0,), env=env) as run:
        run.start()
        with pytest.raises(HostError, match=message):
            run.wait(20)


def test_a_cell_without_a_measurement_is_named(job: StartJob) -> None:
    program = make_program(total=10)
    program.time_us[0, 1, 0, 0] = np.nan
    with job(program) as run:
        run.start()
        with pytest.raises(HostError, match=r"no measurement for phase 0, key 1 \(AllReduce, 16777216 bytes\)"):
            run.wait(20)


def test_missing_symbols_are_named(host: Path, tmp_path: Path) -> None:
    source, plugin = tmp_path / "empty.c", tmp_path / "empty.so"
    source.write_text("int nothing;\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(plugin), str(source)], check=True)
    with EmulatedJob(
        make_program(total=1), ranks=[0], job_id="j", plugin=plugin, directory=tmp_path / "j", host=host
    ) as run:
        run.start()
        with pytest.raises(HostError, match=r"empty\.so exports no symbol ncclProfiler_v6"):
            run.wait(20)


# ---- steering ----


def wait_for(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_credit_is_the_number_of_collectives_that_begin(job: StartJob) -> None:
    with job(make_program()) as run:
        run.set_credit(10)
        run.start()
        wait_for(lambda: run.progress().tolist() == [10, 10] and run.states() == ["waiting"] * 2)
        assert run.add_credit(5) == 15
        wait_for(lambda: run.progress().tolist() == [15, 15])
        time.sleep(0.05)
        assert run.progress().tolist() == [15, 15]
        assert run.stop(10) in (15, 16)
        assert len(run.used(0)) == len(run.used(1))


def test_no_rank_runs_further_ahead_than_the_window(job: StartJob) -> None:
    program = make_program(window=4)
    with job(program, max_delay_us=3000) as run:
        run.start()
        furthest = 0
        for _ in range(300):
            # Read one process at a time: the other may move in between, so the bound holds one way only.
            first = int(run.progress()[0])
            second = int(run.progress()[1])
            furthest = max(furthest, first - second)
        assert furthest <= program.window
        stopped = run.stop(20)
        assert [len(run.used(i)) for i in range(2)] == [stopped, stopped]


def test_every_rank_switches_at_the_same_collective(job: StartJob) -> None:
    program = make_program()
    with job(program, ranks=(0, 3, 5)) as run:
        run.start()
        wait_for(lambda: int(run.progress().min()) > 1000)
        switches = []
        for phase in (1, 0, 1):
            switches.append(run.schedule_phase(phase))
            wait_for(lambda at=switches[-1]: int(run.progress().min()) > at + 500)
        with pytest.raises(ValueError, match="may have begun"):
            run.schedule_phase(0, at=switches[-1])
        run.stop(20)
        logs = [run.used(i) for i in range(3)]
    assert agreement_violations(logs) == 0
    for log in logs:
        assert (np.flatnonzero(np.diff(log["phase"].astype(int))) + 1).tolist() == switches


def test_a_dead_peer_ends_the_others(job: StartJob) -> None:
    with job(make_program(), ranks=(0, 3, 5)) as run:
        run.start()
        wait_for(lambda: int(run.progress().min()) > 100)
        pid = run.pids()[1]
        run.kill(1)
        codes = run.join(10)
        assert codes == [PEER_DIED_CODE, -9, PEER_DIED_CODE]
        assert f"peer process 1 (pid {pid}) died; NCCL would abort the communicator" in run.stderr(0)


def test_leaving_the_context_ends_free_running_processes(job: StartJob) -> None:
    with job(make_program()) as run:
        run.start()
        wait_for(lambda: int(run.progress().min()) > 10)
    assert run.returncodes() == [0, 0]


def test_rate(job: StartJob) -> None:
    with job(make_program(total=100, rate_hz=200.0)) as run:
        started = time.monotonic()
        run.start()
        run.wait(20)
        assert 0.4 < time.monotonic() - started < 5


# ---- what makes it realistic ----


def test_equal_seeds_give_equal_logs(job: StartJob) -> None:
    program = make_program(total=300)
    logs = []
    for seed in (1, 1, 2):
        with job(program, seed=seed, max_delay_us=100) as run:
            run.start()
            run.wait(20)
            logs.append([run.used(i).tobytes() for i in range(2)])
    # The host's seed is about order and delays; the program's about the times.
    assert logs[0] == logs[1] == logs[2]
    with job(dataclasses.replace(program, noise_seed=8)) as run:
        run.start()
        run.wait(20)
        assert run.used(0).tobytes() != logs[0][0]


def test_aggregates_p2p_pxn_and_bad_timers(job: StartJob, tmp_path: Path) -> None:
    n = 400
    extra = [
        *("--aggregate-every", "4"),
        *("--p2p-every", "5"),
        *("--pxn-every", "8"),
        *("--bad-timers", "50"),
    ]
    with job(make_program(total=n), extra_args=extra) as run:
        run.start()
        run.wait(20)
        log = run.used(0)
        count = summaries(run, tmp_path)[0]
    count.pop("bad_timers") if 0 < count["bad_timers"] < count["state_22"] / 10 else pytest.fail("bad timers")
    assert violations(count) == {}
    assert np.count_nonzero(log["n_collectives"] == 2) == n // 4
    assert count["get_coll_info"] == n
    assert count["start_2"] == count["start_512"] == n + n // 4
    assert count["start_4"] == count["stop_4"] == count["start_1024"] == n // 5
    assert count["foreign"] >= n // 8
    # The second of an aggregate, and members of a larger group, do not start at channel 0.
    assert count["high_channels"] > 0


def test_a_mask_that_goes_off_leaves_nccls_stale_stop(job: StartJob, tmp_path: Path) -> None:
    with job(make_program(total=20), env={"DUMMY_MASK_OFF_AT": "5"}) as run:
        run.start()
        run.wait(20)
        count = summaries(run, tmp_path)[0]
    assert violations(count) == {}
    # The mask is read at the API call, so the collective that turned it off is still reported.
    assert count["start_2"] == count["stop_2"] == count["start_512"] == 5
    assert count["stop_512"] == 20
    assert count["stopped_twice"] == 15


def test_communicators_take_turns(job: StartJob, tmp_path: Path) -> None:
    program = make_program(total=30)
    with job(program, communicators=3) as run:
        run.start()
        run.wait(20)
        count = summaries(run, tmp_path)[0]
        logs = [[run.used(i, c) for i in range(2)] for c in range(3)]
    assert count["profiler_init"] == count["tuner_end"] == 3
    for index, both in enumerate(logs):
        assert [len(log) for log in both] == [10, 10]
        assert agreement_violations(both) == 0
        expected = expected_ns(program, both[1], rank=5, communicator=index)
        np.testing.assert_allclose(both[1]["exec_ns"], expected, atol=0.51)
    assert not np.array_equal(logs[0][0]["exec_ns"], logs[1][0]["exec_ns"])


def test_logger(job: StartJob) -> None:
    for extra, shown in ([], False), (["--verbose"], True):
        with job(make_program(total=1), ranks=(3,), extra_args=extra) as run:
            run.start()
            run.wait(20)
            assert "[rank 3] NCCL WARN " in run.stderr(0)
            assert ("TUNER/Dummy: information" in run.stderr(0)) == shown


def test_bench(host: Path, dummy: Path, tmp_path: Path) -> None:
    make_program().write(tmp_path / "p")
    command = [host, "bench", "--program", tmp_path / "p", "--plugin", dummy, "--calls", "2000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        report = json.loads(run.communicate(b"go\n", timeout=20)[0])
    assert report["calls"] == 2000
    assert report["profiler_calls"] == 26
    for name in ("tuner_ns", "baseline_ns", "profiler_ns_per_collective"):
        assert 0 < report[name]["p50"] <= report[name]["p99"]
    assert report["tuner_block_ns"] > report["baseline_block_ns"] > 0


# ---- Python alone ----


def test_noise_is_standard_normal() -> None:
    z = noise(3, np.arange(200_000))
    assert abs(z.mean()) < 0.01
    assert abs(z.std() - 1) < 0.01
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.01
    assert not np.array_equal(z[:10], noise(4, np.arange(10)))


def test_agreement_violations() -> None:
    one = np.zeros(10, USED_DTYPE)
    other = one.copy()
    assert agreement_violations([one]) == 0
    assert agreement_violations([one, other]) == 0
    other["exec_ns"] = 5
    assert agreement_violations([one, other[:7]]) == 0
    other["protocol"][3] = 1
    other["chunk_bytes"][3] = 1
    other["channels"][8] = 1
    assert agreement_violations([one, one, other]) == 2
    assert agreement_violations([one, other[:5]]) == 1


def test_a_torn_log_record_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(np.zeros(3, USED_DTYPE).tobytes()[:-1])
    assert len(read_used(tmp_path / "log")) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": np.array([2])}, "key indices below 2"),
        ({"phases": (-1.0,)}, "must be positive"),
        ({"sigma": np.zeros(3)}, "sigma has shape"),
        ({"n_nodes": 9}, "1 <= nodes <= ranks"),
        ({"max_channels": 65}, "expected 1 to 64"),
        ({"window": 0}, "at least 1"),
        ({"comm_name": "x" * 64}, "63 bytes"),
        ({"comm_id": -1}, "unsigned 64-bit"),
    ],
)
def test_programs_are_validated(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_program(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_bytes": 0}, "n_bytes is 0"),
        ({"cost_us": np.zeros((6, 3))}, r"shape \(6, 3\)"),
        ({"cost_us": np.full((7, 3), -2.0)}, "NaN or negative"),
        ({"cost_us": np.full((7, 3), -1.0)}, "no pair is available"),
        ({"own_channels": np.zeros((7, 3), int)}, "own_channels must be"),
        ({"own_chunk_bytes": np.full((7, 3), 100)}, "own_chunk_bytes must be"),
    ],
)
def test_keys_are_validated(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make_key(), **changes)


def test_a_damaged_program_is_refused(host: Path, dummy: Path, tmp_path: Path) -> None:
    make_program().write(tmp_path / "p")
    (tmp_path / "p").write_bytes((tmp_path / "p").read_bytes()[:-8])
    result = subprocess.run(
        [host, "bench", "--program", tmp_path / "p", "--plugin", dummy],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert result.returncode == 1
    assert "truncated" in result.stderr


def test_usage_errors(host: Path) -> None:
    for arguments, message in [
        ([], "missing --program"),
        (["--tuner-abi", "x"], "expected a number up to 6"),
        (["stray"], "unexpected argument"),
    ]:
        result = subprocess.run([host, *arguments], capture_output=True, text=True, timeout=20)
        assert result.returncode == 2
        assert message in result.stderr


def test_ranks_are_validated(job: StartJob) -> None:
    with pytest.raises(ValueError, match="each once"):
        job(make_program(), ranks=(1, 1))
    with pytest.raises(ValueError, match="has 0 to 7"):
        job(make_program(), ranks=(8,))
