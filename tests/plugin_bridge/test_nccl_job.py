"""Jobs on the emulated NCCL: what a plugin is told that only checks that, and what is done with its answers."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dummy_job import PAIR, PLAIN, MakeJob, dummy_play, run, summary, violations
from rig import KIB, MIB, Rig, belief_of, collectives, exec_ns, indices, used_of

from dynamiccl_ray.knobs import N_PAIRS, Algorithm, Collective, Protocol
from dynamiccl_ray.plugin_bridge import native_dir
from dynamiccl_ray.plugin_bridge.constants import Constants, write_constants
from dynamiccl_ray.plugin_bridge.nccl_job import HOST_NAME, LOG_DTYPE, HostError, NcclJob, agreement_violations
from dynamiccl_ray.plugin_bridge.program import Comm, Ops, Program
from dynamiccl_ray.plugin_bridge.times import Times

HOST = native_dir() / HOST_NAME
EMULATED = native_dir() / "libnccl-emulated.so"

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
        done = subprocess.run([HOST, *arguments], capture_output=True, text=True, timeout=60, check=False)
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
    done = subprocess.run([*run_._command, "--ranks", "0", "--parent", "1"], env=run_._env, timeout=60, check=False)
    assert done.returncode == 0
    assert run_.states() == ["absent"]
