"""A runner beside ranks that are played: which it claims, what it makes of dead ones, and what it tells."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from elsewhere import Elsewhere
from made import comm_context, context, due
from small import small_experiment

from dynamiccl_ray.actions import Action
from dynamiccl_ray.actors.messages import CommReport, EpochContext, Member
from dynamiccl_ray.actors.rank_runner import LEAST_MARGIN, LOOK_AFTER_S, MOST_AHEAD_S, RankRunner
from dynamiccl_ray.agent.observation import SIZE
from dynamiccl_ray.control.agreement import Answer, Decision
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Algorithm, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.segments import remove_stale, segments, shm_dir
from dynamiccl_ray.trainers.online.learning import ppo_config

COMM, OTHER = 0xA1, 0xB2
KEY = key_of(4, 1 << 20, False)
RING = Action(pair=pair_index(Algorithm.RING, Protocol.LL)).flat
VERSION, TERM = 5, 9


class Said:
    """A coordinator that has one table to put in force, and ends the round with its first epoch."""

    def __init__(self, decide: Callable[[list[Answer]], Decision | None] = lambda _: None) -> None:
        self._decide = decide
        self.joined: list[list[Member]] = []
        self.answers: list[list[Answer]] = []
        self.reports: list[list[CommReport]] = []
        self.settled: list[int] = []
        self.gone: frozenset[tuple[int, int]] = frozenset()
        self.meanwhile: Callable[[Callable[[], object]], object] = lambda _: None

    def context(self, **changes: Any) -> EpochContext:
        comm = comm_context(COMM, keys=[KEY], wanted=[RING])
        return context(comm, version=VERSION, term=TERM, **changes)

    def join(self, runner: str, members: list[Member], gone: frozenset[tuple[int, int]]) -> EpochContext:
        self.joined.append(members)
        self.gone |= gone
        return self.context()

    def report(
        self,
        runner: str,
        epoch: int,
        comms: list[CommReport],
        entropy: float | None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> EpochContext:
        self.reports.append(comms)
        self.meanwhile(meanwhile)
        return self.context(round_end=True)

    def others_done(self, epoch: int) -> Callable[[], bool]:
        return lambda: True

    def promise(
        self, runner: str, comm: int, version: int, answers: list[Answer], table: bytes | None, term: int
    ) -> Decision | None:
        self.answers.append(answers)
        return self._decide(answers)

    def settle(self, member: Member) -> Decision | None:
        self.settled.append(member.rank)
        return None


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

    def runner(self, on_node: int = 1, said: Said | None = None, **settings: Any) -> RankRunner:
        real = {"kind": "nccl", "processes": None, "rate_hz": None}
        experiment = small_experiment(self._job, fabric=real, **settings)
        told = said or Said()
        config = ppo_config(experiment, coordination=lambda: told, per_node=on_node)
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


def test_ranks_that_are_gone_are_let_go_of(place: Place) -> None:
    kept, killed = (place.process(rank, COMM, OTHER) for rank in range(2))
    said = Said()
    runner = place.runner(said=said)
    killed.kill()
    kept.close(OTHER)
    look(runner)
    assert served(runner) == [(COMM, 0)]
    assert runner._serving.comms == [COMM]
    runner._join()
    assert said.gone == {(OTHER, 0), (OTHER, 1), (COMM, 1)}
    kept.open(OTHER, 8, 0)
    look(runner)
    assert served(runner) == [(COMM, 0), (OTHER, 0)]


def test_segments_that_are_removed_leave_nothing_behind(place: Place, job: str) -> None:
    place.process(0, COMM).kill()
    damaged = shm_dir() / f"dynamiccl-{job}-{2**22 + 1}-0"
    damaged.write_bytes(bytes(100))
    serving: Any = place.runner()._serving
    assert (serving._left, serving._told) != (set(), set())
    damaged.unlink()
    remove_stale(job)
    assert not list(segments(job))
    serving.look()
    assert (serving._left, serving._told) == (set(), set())


# ---- what it asks and tells ----


def commit(answers: list[Answer]) -> Decision:
    return Decision(version=VERSION, switch_at=max(answer.hold_at or 0 for answer in answers))


def statuses(runner: Any) -> list[Any]:
    return [rank.channel.status for rank in runner._serving.ranks]


def test_a_table_is_put_in_force_on_all_ranks_at_the_last_hold(place: Place) -> None:
    for rank in range(2):
        place.process(rank, COMM, ranks=2)
    said = Said(commit)
    runner = place.runner(said=said)
    place.processes[1].call(COMM, 100)
    runner.sample()
    (answers,) = said.answers
    assert sorted(answer.rank for answer in answers) == [0, 1]
    assert max(answer.hold_at or 0 for answer in answers) == 100 + LEAST_MARGIN + 1
    for process in place.processes:
        process.call(COMM, 200)
    assert all(rank.channel.fold() for rank in runner._serving.ranks)
    assert [(s.base_version, s.base_at) for s in statuses(runner)] == [(VERSION, 100 + LEAST_MARGIN + 1)] * 2
    assert [sorted(report.ranks) for report in said.reports[0]] == [[0, 1]]


def test_what_nobody_could_decide_leaves_the_ranks_waiting_and_is_asked_for(place: Place) -> None:
    for rank in range(2):
        place.process(rank, COMM, ranks=2)
    said = Said()
    runner = place.runner(said=said)
    runner.sample()
    assert [s.open_version for s in statuses(runner)] == [VERSION, VERSION]
    assert all(s.promised and s.decision == 0 for s in statuses(runner))
    assert sorted(said.settled) == [0, 1]
    assert len(said.joined) >= 3, "it shows itself again"
    assert said.reports == [], "an epoch without a decision is none"
    # The next version: a rank of which nobody knows cannot promise.
    runner.sample()
    assert [answer.hold_at for answer in said.answers[1]] == [None, None]


def test_an_aborted_version_holds_nobody(place: Place) -> None:
    for rank in range(2):
        place.process(rank, COMM, ranks=2)
    runner = place.runner(said=Said(lambda _: Decision(version=VERSION, switch_at=None)))
    runner.sample()
    for process in place.processes:
        process.call(COMM, 50)
    assert all(rank.channel.fold() for rank in runner._serving.ranks)
    assert [s.base_version for s in statuses(runner)] == [0, 0]


def test_a_switch_lies_no_further_ahead_than_is_of_use(place: Place) -> None:
    place.process(0, COMM, ranks=2)
    said = Said(commit)
    runner = place.runner(said=said)
    runner._promise_s = 30.0  # the coordinator was gone for a while
    runner._serving.ranks[0].rate_hz = 10_000.0
    runner.sample()
    assert said.answers[0][0].hold_at == LEAST_MARGIN + 10_000 * MOST_AHEAD_S + 1


def test_a_restarted_runner_does_not_take_calls_of_before_for_a_rate(place: Place) -> None:
    process = place.process(0, COMM, ranks=2)
    process.call(COMM, 50_000)
    said = Said(commit)
    runner = place.runner(said=said)
    process.call(COMM, 50_000)
    for _ in range(2):
        runner.sample()
        assert (said.answers[-1][0].hold_at or 0) <= 100_000 + LEAST_MARGIN + 1


def test_ranks_of_a_runner_that_dies_while_others_wait_for_its_report_are_settled(place: Place) -> None:
    for rank in range(2):
        place.process(rank, COMM, ranks=2)
    said = Said(commit)
    first, second = place.runner(2, said), place.runner(2)
    assert len(pids(first)) == len(pids(second)) == 1
    second.sample()
    (left,) = [rank.rank for rank in second._serving.ranks]

    def dies(look: Callable[[], object]) -> None:
        second._serving.close()
        time.sleep(LOOK_AFTER_S)
        look()

    said.meanwhile = dies
    first.sample()
    assert left in said.settled


def test_what_was_drawn_before_shadow_is_not_judged_by_what_comes_after(place: Place) -> None:
    """Back in active, decisions are counted anew: the first has the same number as the first before."""
    place.process(0, COMM)
    said = Said(commit)
    runner = place.runner(said=said)
    for seen, greedy in ((1.0, False), (2.0, True), (3.0, False)):
        drawn = due([0], observation=np.full((1, SIZE), seen, np.float32))
        comm = comm_context(COMM, keys=[KEY], wanted=[RING], due=drawn, reward=[0.0])
        said.context = partial(context, comm, version=VERSION, term=TERM, greedy=greedy)  # type: ignore[method-assign]
        runner.sample()
    stream = runner._streams._streams[COMM, KEY]
    assert stream.observations[0][0] == 3.0


class Looks(Said):
    """Counts how often a runner looks whether the epoch is over. ``watching``: no key learns."""

    def __init__(self, *, watching: bool = False) -> None:
        super().__init__(commit)
        self._watching, self.n = watching, 0

    def context(self, **changes: Any) -> EpochContext:
        return super().context(**changes, watching=self._watching)

    def others_done(self, epoch: int) -> Callable[[], bool]:
        def look() -> bool:
            self.n += 1
            return False

        return look


def test_a_runner_beside_quiet_ranks_looks_for_records_more_and_more_seldom(place: Place) -> None:
    """Each look takes it some 50 us a rank, and the training wants these cores."""
    place.process(0, COMM)
    said = Looks()
    place.runner(said=said).sample()
    assert 0 < said.n < 60, "in 0.2 s"


@pytest.mark.parametrize(("rate_hz", "least", "most"), [(1000.0, 2, 8), (100_000.0, 10, 30)])
def test_a_runner_that_watches_looks_as_seldom_as_its_rings_allow(
    place: Place, rate_hz: float, least: int, most: int
) -> None:
    place.process(0, COMM)
    said = Looks(watching=True)
    runner = place.runner(said=said)
    runner._serving.ranks[0].rate_hz = rate_hz
    runner.sample()
    assert least <= said.n <= most, "in 1 s"


def test_a_runner_that_watches_sleeps_no_longer_than_an_epoch_takes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.process(0, COMM)
    runner = place.runner(said=Looks(watching=True), epochs={"watch_s": 0.05})
    naps, sleep = [], time.sleep
    monkeypatch.setattr("dynamiccl_ray.actors.rank_runner.time.sleep", lambda s: (naps.append(s), sleep(s)))
    runner.sample()
    assert 0 < max(naps) <= 0.05
