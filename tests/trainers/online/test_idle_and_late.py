"""Communicators that are idle, or come late, hold up nobody, and are served when they are there: in one process and on
Ray, where they have a runner of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from attached import training
from small import small_experiment

from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.status import Epoch
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING, NcclJob
from dynamiccl_ray.trainers.online.backends import Backend, RayBackend, SerialBackend

MOST_S = 12.0
SERVED_S = 10.0
"""A few seconds, on a machine that has other things to do."""
pytestmark = pytest.mark.timeout(600)


def _plan(job: str) -> Plan:
    learning = {"baseline_samples": 4, "draws": 30, "draw_samples": 2, "compares": 2, "compare_samples": 2}
    # A round that ends by itself only where nothing learns any more.
    experiment = small_experiment(
        job,
        fabric={"kind": "nccl", "intra": "pcie", "inter": "tcp", "processes": None, "rate_hz": None},
        control={"learning": learning},
        epochs={"most_s": MOST_S, "per_round": 100_000},
        ppo={"epochs": 1},
        stop={"rounds": 1_000_000},
    )
    return Plan(run=job, experiment=experiment)


class Run:
    """Rounds, one after the other, and what they brought."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._over = backend, threading.Event()
        self.epochs: list[Epoch] = []
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()

    def _go(self) -> None:
        while not self._over.is_set():
            self._backend.round()

    def until(self, condition: Callable[[list[Epoch]], Any], limit_s: float, what: str) -> float:
        """Seconds until what was observed by then satisfies ``condition``."""
        began = time.monotonic()
        while True:
            self.epochs += self._backend.observed()
            if condition(self.epochs):
                return time.monotonic() - began
            assert time.monotonic() - began < limit_s, f"{what}: not within {limit_s} s"
            time.sleep(0.1)

    def close(self) -> None:
        self._over.set()
        # The round ends where the run does.
        if isinstance(self._backend, SerialBackend):
            self._backend._core.release(keep=False)
        elif isinstance(self._backend, RayBackend):
            ray.get(self._backend._coordinator.release.remote(False))
        self._thread.join()
        self._backend.close()


def _serial(plan: Plan) -> Backend:
    return SerialBackend(plan)


def _ray(plan: Plan) -> Backend:
    return RayBackend(plan)


@pytest.fixture(params=[pytest.param(_serial, id="serial"), pytest.param(_ray, id="ray", marks=pytest.mark.slow)])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[[Plan], Run]]:
    runs: list[Run] = []

    def started(plan: Plan) -> Run:
        runs.append(Run(request.param(plan)))
        return runs[-1]

    yield started
    for run in runs:
        run.close()
    if ray.is_initialized():
        ray.shutdown()


def _comms(epochs: list[Epoch]) -> set[int]:
    """That something was measured of."""
    return {epoch.comm for epoch in epochs if len(epoch.samples)}


def _exploiting(epochs: list[Epoch], comm: int) -> bool:
    return any(epoch.comm == comm and (epoch.samples["phase"] == Phase.EXPLOIT).any() for epoch in epochs)


def _begin(running: NcclJob, credit: int) -> None:
    running.set_credit(credit)
    running.start()
    running.await_ranks()


def test_a_communicator_that_is_idle_for_ever_and_ones_that_come_late(
    start: Callable[[Plan], Run], tmp_path: Path, job: str
) -> None:
    of_two: dict[str, Any] = {"nodes": 1}
    sizes = [1 << k for k in range(14, 22)]
    with (
        training(job, tmp_path / "idle", **of_two, comms=[0], sizes=sizes, rate_hz=50) as idle,
        training(job, tmp_path / "slow", **of_two, comms=[1], sizes=[1 << 20], rate_hz=10) as slow,
        training(job, tmp_path / "late", **of_two, comms=[2], sizes=sizes[:2], rate_hz=50) as late,
        training(job, tmp_path / "later", **of_two, comms=[3], sizes=sizes[:2], rate_hz=50) as later,
    ):
        _begin(idle, 0)
        _begin(slow, 0)
        run = start(_plan(job))
        idle.set_credit(25)
        run.until(lambda epochs: idle.progress().min() >= 25 and _comms(epochs), 90, "all that it ever does")
        (its,) = _comms(run.epochs)
        known = run.epochs[-1].number
        slow.set_credit(FREE_RUNNING)
        run.until(lambda epochs: len(_comms(epochs)) == 2, 10, "the one that goes on")
        (other,) = _comms(run.epochs) - {its}

        _begin(late, FREE_RUNNING)
        run.until(lambda epochs: len(_comms(epochs)) == 3, SERVED_S, "one that comes in the middle of a round")
        assert not _exploiting(run.epochs, other), "the round was over by then"
        run.until(lambda epochs: all(_exploiting(epochs, comm) for comm in _comms(epochs) - {its}), 90, "learning")
        assert not _exploiting(run.epochs, its)
        waited = {epoch.number: epoch.took_s for epoch in run.epochs if epoch.number > known}
        assert max(waited.values()) < MOST_S / 2

        last = run.epochs[-1].number
        run.until(lambda epochs: epochs[-1].number > last + 1, 120, "the update after a round as long as that one")
        _begin(later, FREE_RUNNING)
        run.until(lambda epochs: len(_comms(epochs)) == 4, SERVED_S, "one that comes while nothing learns")
        run.until(lambda epochs: all(_exploiting(epochs, comm) for comm in _comms(epochs) - {its}), 90, "learning")
