"""Real Ray, real rank processes: whatever dies, no two ranks ever differ and training goes on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from attached import goes_on
from crashing import (
    CrashesAfterCommit,
    CrashesBeforeCommit,
    Crashing,
    StopsAfterCommit,
    StopsBeforeCommit,
    pid_of,
)
from small import small_experiment

from dynamiccl_ray.actors.coordinator_actor import CoordinatorActor
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.registry import KvStore
from dynamiccl_ray.actors.watchdog import STOPPED_S
from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING, NcclJob, agreement_violations
from dynamiccl_ray.plugin_bridge.played import play
from dynamiccl_ray.trainers.common.cluster import start_ray
from dynamiccl_ray.trainers.online.backends import RayBackend

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # Ray's workers import what is beside this file.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        start_ray()
        yield
        ray.shutdown()


class Rig:
    """Four ranks, two runners, one coordinator; rounds on demand."""

    def __init__(self, job: str, directory: Path, coordinator: type[CoordinatorActor] = CoordinatorActor) -> None:
        # It never stops learning, so there are always switches to come, however many calls a round sees.
        endless = {"learning": {"draws": 1_000_000}, "explore": {"max_regret": 1.0}}
        experiment = small_experiment(job, fabric={"rate_hz": 1500}, control=endless, stop={"rounds": 1_000_000})
        self.fabric = play(experiment.fabric, seed=0)  # type: ignore[arg-type]
        self.run = job
        plan = Plan(
            run=self.run,
            experiment=experiment,
            topology={"intra": "nvlink", "inter": "efa", "nvls": True},
            played=self.fabric.processes,
            valid=self.fabric.valid,
        )
        self.job = self.fabric.job(job, directory)
        self.job.start()
        self.job.await_ranks()
        self.backend = RayBackend(plan, coordinator=coordinator)
        self.status: dict[str, Any] = {}

    def until(self, what: str, limit_s: float = 150.0) -> None:
        """Rounds until ``what`` (over ``status`` as s) holds."""
        deadline = time.monotonic() + limit_s
        while True:
            self.status = self.backend.round().as_dict()
            s = self.status
            if eval(what, {"s": s}):
                return
            assert time.monotonic() < deadline, f"not reached: {what}; { ({k: s[k] for k in s if k != 'history'}) }"

    def finish(self) -> int:
        """Ends the job in good order, which needs every rank alive and none waiting; returns the violations."""
        self.backend.close()
        self.job.set_credit(FREE_RUNNING)
        self.job.stop()
        return agreement_violations(self.job.logs())

    def pids_of_runners(self) -> list[int]:
        return list(self.backend._algorithm.env_runner_group.foreach_env_runner(pid_of, local_env_runner=False))


@pytest.fixture
def rigs(job: str, tmp_path: Path) -> Iterator[Any]:
    made: list[Rig] = []

    def make(coordinator: type[CoordinatorActor] = CoordinatorActor) -> Rig:
        made.append(Rig(job, tmp_path / "job", coordinator))
        return made[-1]

    yield make
    for rig in made:
        rig.job.__exit__(None, None, None)


def test_killed_actors_come_back_and_take_their_ranks_again(rigs: Any) -> None:
    rig = rigs()
    rig.until("s['switches'] >= 10")
    for everyone in (False, True):
        before = rig.job.progress().min()
        killed = rig.pids_of_runners()[1:]
        if everyone:
            killed = [ray.get(rig.backend._coordinator.__ray_call__.remote(pid_of)), *rig.pids_of_runners()]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        rig.until("len(s['runners']) == 2 and s['ranks'] == 4")
        assert rig.job.progress().min() > before, "training stood still"
        switches = rig.status["switches"]
        rig.until(f"s['switches'] >= {switches + 10}")
    assert rig.finish() == 0


@pytest.mark.slow
def test_a_runner_that_stops_while_no_rank_waits_holds_up_nobody_for_long(rigs: Any) -> None:
    """The driver waits for all runners at the end of a round, and the stopped one keeps its claims."""
    rig = rigs()
    rig.until("s['switches'] >= 10")
    stopped = rig.pids_of_runners()[1]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    rig.backend.round()
    assert time.monotonic() - began < STOPPED_S + 10.0
    rig.until("len(s['runners']) == 2 and s['ranks'] == 4")
    switches = rig.status["switches"]
    rig.until(f"s['switches'] >= {switches + 10}")
    assert stopped not in rig.pids_of_runners()
    assert rig.finish() == 0


@pytest.mark.parametrize("crashing", [CrashesBeforeCommit, CrashesAfterCommit])
def test_a_coordinator_killed_around_commit_decides_nothing_twice(rigs: Any, crashing: type[Crashing]) -> None:
    rig = rigs(crashing)
    rig.until("s['switches'] >= 30")
    store = KvStore()
    version = store.get(f"{rig.run}/crashed")
    assert version is not None, "the coordinator was never killed"
    assert rig.finish() == 0


@pytest.mark.parametrize(
    ("stopping", "part"),
    [
        (StopsBeforeCommit, "coordinator"),
        (StopsAfterCommit, "runner"),
        pytest.param(StopsAfterCommit, "coordinator", marks=pytest.mark.slow),
        pytest.param(StopsBeforeCommit, "runner", marks=pytest.mark.slow),
    ],
)
def test_who_stops_on_the_way_to_a_decision_is_replaced(rigs: Any, stopping: type[Crashing], part: str) -> None:
    """A stopped process keeps its claims and its memory; ranks that promised wait for it."""
    rig = rigs(stopping)
    store = KvStore()
    if part == "runner":
        store.put(f"{rig.run}/victim", str(rig.pids_of_runners()[1]).encode())
    stalls = Stalls(rig.job)
    rig.until("s['switches'] >= 30", 150)
    longest_s = stalls.end()
    assert store.get(f"{rig.run}/crashed") is not None, "nobody was stopped"
    assert longest_s < STALL_S
    assert rig.finish() == 0


def test_everything_of_ray_dies_and_training_goes_on(rigs: Any) -> None:
    rig = rigs()
    rig.until("s['switches'] >= 5")
    pids = rig.pids_of_runners()
    rig.backend.close()
    for pid in pids:
        with_pid_gone(pid)
    goes_on(rig.job, calls=15)
    rig.job.stop()
    assert agreement_violations(rig.job.logs()) == 0


STALL_S = 30.0
"""docs/channel.md has what was measured; here other tests share the machine."""


class Stalls:
    """The longest time for which training stood still."""

    def __init__(self, job: NcclJob) -> None:
        self._job, self._longest, self._over = job, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        at, since = -1, time.monotonic()
        while not self._over.wait(0.02):
            now, progress = time.monotonic(), int(self._job.progress().min())
            if progress != at:
                at, since = progress, now
            self._longest = max(self._longest, now - since)

    def end(self) -> float:
        self._over.set()
        self._thread.join()
        return self._longest


def with_pid_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
