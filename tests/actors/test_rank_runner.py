"""A runner beside ranks that are played: which it claims, what it makes of dead ones, and what it tells."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from elsewhere import Elsewhere
from small import small_experiment

from dynamiccl_ray.actors.rank_runner import RankRunner
from dynamiccl_ray.trainers.online.learning import ppo_config

COMM, OTHER = 0xA1, 0xB2


class Place:
    """A node of a job, and runners for it."""

    def __init__(self, job: str, stack: contextlib.ExitStack) -> None:
        self._job, self._stack = job, stack
        self.processes: list[Elsewhere] = []

    def process(self, rank: int, *comms: int, ranks: int = 8) -> Elsewhere:
        """A process more, with a rank of each of these communicators."""
        self.processes.append(self._stack.enter_context(Elsewhere(self._job)))
        for comm in comms:
            self.processes[-1].open(comm, ranks, rank)
        return self.processes[-1]

    def runner(self, on_node: int = 1) -> RankRunner:
        experiment = small_experiment(self._job, fabric={"kind": "nccl", "processes": None, "rate_hz": None})
        config = ppo_config(
            experiment,
            coordination=lambda: None,  # type: ignore[arg-type, return-value]
            runners=0,
            on_node=lambda: on_node,
        )
        runner = RankRunner(config=config)
        self._stack.callback(runner.stop)
        return runner


@pytest.fixture
def place(job: str) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        yield Place(job, stack)


def served(runner: Any) -> list[tuple[int, int]]:
    """Communicators and ranks."""
    return sorted((rank.comm, rank.rank) for rank in runner._serving.ranks)


def pids(runner: Any) -> set[int]:
    return {rank.channel.identity.pid for rank in runner._serving.ranks}


def look(*runners: Any) -> None:
    for runner in runners:
        runner._serving.look()
        runner._serving.renew()


# ---- which ranks are whose ----


def test_one_runner_serves_all_of_a_node(place: Place) -> None:
    for rank in range(6):
        place.process(rank, COMM, OTHER)
    runner = place.runner()
    assert served(runner) == [(comm, rank) for comm in (COMM, OTHER) for rank in range(6)]


def test_runners_divide_processes_and_not_communicators(place: Place) -> None:
    for rank in range(5):
        place.process(rank, COMM, OTHER)
    first, second = place.runner(2), place.runner(2)
    assert [len(pids(runner)) for runner in (first, second)] == [3, 2]
    assert pids(first) | pids(second) == {process.pid for process in place.processes}
    assert len(served(first)) == 6, "both communicators of each process"


def test_shares_follow_the_processes_that_come_and_go(place: Place) -> None:
    for rank in range(2):
        place.process(rank, COMM)
    first, second = place.runner(2), place.runner(2)
    assert [len(pids(runner)) for runner in (first, second)] == [1, 1]
    for rank in range(2, 6):
        place.process(rank, COMM)
    look(first, second)
    assert [len(pids(runner)) for runner in (first, second)] == [3, 3]
    for process in place.processes:
        if process.pid in pids(first):
            process.kill()
    for rank in (6, 7):
        place.process(rank, COMM)
    look(first, second)
    assert pids(first) | pids(second) == {process.pid for process in place.processes if process._popen.poll() is None}
    assert len(pids(second)) == 3, "the dead count for nobody"
    assert len(pids(first)) == 2


def test_a_process_keeps_its_runner_for_communicators_that_it_makes_later(place: Place) -> None:
    for rank in range(2):
        place.process(rank, COMM)
    first, second = place.runner(2), place.runner(2)
    for rank, process in enumerate(place.processes):
        process.open(OTHER, 8, rank)
    look(second, first)
    for runner in (first, second):
        ((_, rank), (_, other)) = served(runner)
        assert rank == other
        assert len(pids(runner)) == 1
