"""Jobs on the emulated NCCL: how they are steered, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from attached import training
from dummy_job import PAIR, MakeJob, dummy_play, run
from rig import Rig, used_of, wait_for

from dynamiccl_ray.plugin_bridge.nccl_job import (
    FREE_RUNNING,
    PEER_DIED_CODE,
    HostError,
    agreement_violations,
)

ROOT = Path(__file__).parents[2]

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


def test_ctrl_c_in_a_terminal_is_not_for_the_ranks(job: MakeJob) -> None:
    """It goes to a whole group of processes. Ranks that end because of it would do so at different steps, and those
    that are ahead wait for the others."""
    run_ = job(dummy_play(PAIR[:1], steps=100, rate_hz=200.0))
    run_.start()
    run_.await_ranks()
    pids = {int(word) & 0xFFFFFFFF for word in run_._page.pid_and_state}
    assert os.getpgrp() not in {os.getpgid(pid) for pid in pids}
    run_.stop()


def test_ranks_that_wait_for_a_late_one_leave_it_the_processor(rig: Rig, tmp_path: Path) -> None:
    """Twenty that wake up every 50 us, each in two threads, take two cores from the one that they wait for."""
    with training(rig.job_id, tmp_path / "job", ranks_per_node=1, comms=(0,), rate_hz=100) as run_:
        run_.start()
        run_.await_ranks()
        wait_for(lambda: run_.progress().min() > 10)
        waits, late = (int(word) & 0xFFFFFFFF for word in run_._page.pid_and_state)
        os.kill(late, signal.SIGSTOP)
        try:
            time.sleep(0.3)
            before = _naps(waits)
            time.sleep(0.5)
            napped = _naps(waits) - before
        finally:
            os.kill(late, signal.SIGCONT)
        wait_for(lambda: run_.progress().min() > 30, what="the late rank's steps")
    assert 0 < napped < 2000


def _naps(pid: int) -> int:
    """How often the threads of a process have gone to sleep."""
    said = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(status.split("voluntary_ctxt_switches:")[1].split()[0]) for status in said)


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


@pytest.mark.parametrize("how", ["running", "waiting", "stopped"])
def test_no_process_outlives_the_one_that_started_it(rig: Rig, how: str) -> None:
    arguments = [str(Path(__file__).parent), str(rig.directory), str(rig.shm), how]
    with subprocess.Popen([sys.executable, "-c", ORPHANS, *arguments], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        try:
            assert len(pids) == 2
            assert all(map(is_running, pids))
            if how == "stopped":
                os.kill(pids[0], signal.SIGSTOP)
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
