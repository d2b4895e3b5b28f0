"""Agreement with every part that can die: plugin, segments, the runner's half and the coordinator's, as they are.

Three ranks of one communicator, in this process, and two control planes that may both be up: each has a coordinator,
and a runner for each rank that it could claim. Messages are lost, repeated and late; runners and coordinators are
killed and started at any time, everything at once included, and nothing of a control plane outlives it. A rank is only
called where it would not wait. No call may have two tables; and whatever happened, a new control plane that reaches all
ranks finishes what was begun.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from trained import Trained

from dynamiccl_ray.actions import Action
from dynamiccl_ray.actors.messages import Member
from dynamiccl_ray.actors.ranks import Rank
from dynamiccl_ray.control.agreement import Agreement, Answer, Decision, new_term
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import ChannelBusyError
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import CHANNEL_VALUES, Algorithm, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.layout import Prepared

RANKS = range(3)
PLANES = range(2)
BYTES = 1 << 20
KEY = key_of(4, BYTES, False)
PAIRS = [pair_index(a, p) for a in (Algorithm.TREE, Algorithm.RING) for p in Protocol]
CHANNELS = [i for i, count in enumerate(CHANNEL_VALUES) if count <= 16]
ACTIONS = [Action(pair=pair, channels=channels) for channels in CHANNELS for pair in PAIRS]


def table_of(version: int) -> DecisionTable:
    return DecisionTable.of(version, {KEY: ACTIONS[version % len(ACTIONS)]}, max_channels=16)


def would_wait(rank: Trained) -> bool:
    """Whether its next call would come to a hold that was promised and not decided."""
    with Channel(rank.path, claim=False) as channel:
        status = channel.status
    held = status.hold_at is not None and len(rank.told) + 1 >= status.hold_at
    return held and status.decision == 0 and status.promised


@dataclass(eq=False)
class Runner:
    """Serves one rank. It does one thing at a time: while it waits for a decision it does nothing else."""

    rank: Rank
    joined: int = -1
    """Of which coordinator, by number, it knows that it has joined."""
    asked: int | None = None
    """The version that it waits for."""
    inbox: list[Decision | None] = field(default_factory=list)


@dataclass(eq=False)
class Plane:
    """A control plane. Messages know which coordinator and which runner they were for."""

    number: int = 0
    """Of its coordinator: another one has another number."""
    agreement: Agreement | None = None
    next_version: int = 1
    runners: dict[int, Runner] = field(default_factory=dict)
    mail: list[tuple[Runner, int, Answer]] = field(default_factory=list)
    parked: list[tuple[Runner, int]] = field(default_factory=list)
    """Whose answers wait for others."""

    def settle(self, member: Member) -> Decision | None:
        return self.agreement.resolve(member.standing.pending) if self.hear(member) and self.agreement else None

    def hear(self, member: Member) -> bool:
        """As ``Coordinator`` does: whoever was shown a rank since is outdone, and all ranks have to be heard again."""
        if self.agreement is None:
            return False
        if member.term > self.agreement.term:
            self.start(above=member.term)
        return self.agreement.hear(member.rank, member.standing, member.term)

    def start(self, above: int = 0) -> None:
        self.number, self.agreement, self.parked = self.number + 1, Agreement(RANKS, new_term(above)), []

    @property
    def term(self) -> int:
        return self.agreement.term if self.agreement is not None else 0

    def complete(self) -> bool:
        return self.runners.keys() == set(RANKS) and all(r.joined == self.number for r in self.runners.values())

    def tell_parked(self) -> None:
        """A version was closed."""
        assert self.agreement is not None
        for runner, version in self.parked:
            runner.inbox.append(self.agreement.abort(version))
        self.parked = []


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="dynamiccl-machine-", dir="/dev/shm"))
        os.environ |= {"DYNAMICCL_SHM_DIR": str(self.directory), "DYNAMICCL_JOB_ID": "machine"}
        self.ranks = [Trained("machine", 7, len(RANKS)) for _ in RANKS]
        self.planes = [Plane() for _ in PLANES]
        self.told: list[tuple[int, int]] = []
        """What the first rank was told that made each call."""
        self.switches = 0

    # -- training --

    @rule(rank=st.sampled_from(RANKS), calls=st.integers(1, 8))
    def train(self, rank: int, calls: int) -> None:
        it = self.ranks[rank]
        for _ in range(calls):
            if would_wait(it):
                return
            it.call(4, BYTES)
            at = len(it.told) - 1
            if at == len(self.told):
                self.told.append(it.told[at])
            assert it.told[at] == self.told[at], f"call {at + 1} has two tables"

    # -- runners --

    @rule(plane=st.sampled_from(PLANES), rank=st.sampled_from(RANKS))
    def claim(self, plane: int, rank: int) -> None:
        if rank in self.planes[plane].runners:
            return
        try:
            channel = Channel(self.ranks[rank].path)
        except ChannelBusyError:
            return
        self.planes[plane].runners[rank] = Runner(Rank(channel, 7, rank))

    @rule(plane=st.sampled_from(PLANES), rank=st.sampled_from(RANKS))
    def kill_runner(self, plane: int, rank: int) -> None:
        if (runner := self.planes[plane].runners.pop(rank, None)) is not None:
            runner.rank.channel.close()
            runner.joined = -1

    @rule(plane=st.sampled_from(PLANES), rank=st.sampled_from(RANKS))
    def join(self, plane: int, rank: int) -> None:
        its = self.planes[plane]
        runner = its.runners.get(rank)
        if runner is None or runner.asked is not None or its.agreement is None:
            return
        member = runner.rank.shown_to(its.term)
        if its.hear(member):
            its.next_version = max(its.next_version, member.standing.newest + 1)
            runner.joined = its.number

    @rule(plane=st.sampled_from(PLANES), rank=st.sampled_from(RANKS), margin=st.integers(0, 6))
    def prepare(self, plane: int, rank: int, margin: int) -> None:
        its = self.planes[plane]
        runner = its.runners.get(rank)
        if runner is None or runner.asked is not None or its.agreement is None or runner.joined != its.number:
            return
        version = its.agreement.open_version
        if version is None:
            return
        table = table_of(version)
        answer = Answer(rank=rank, digest=table.digest, hold_at=None)
        if runner.rank.settle(its.settle, its.term):
            outcome, hold_at, digest = runner.rank.channel.prepare(table, margin)
            if outcome is Prepared.PREPARED:
                answer = Answer(rank=rank, digest=digest, hold_at=hold_at)
        runner.asked, runner.inbox = version, []
        its.mail.append((runner, version, answer))

    @rule(plane=st.sampled_from(PLANES), rank=st.sampled_from(RANKS))
    def hear_the_decision(self, plane: int, rank: int) -> None:
        runner = self.planes[plane].runners.get(rank)
        if runner is None or runner.asked is None or not runner.inbox:
            return
        decision, runner.asked = runner.inbox.pop(0), None
        if decision is None:
            runner.joined = -1
        elif runner.rank.channel.decide(decision.version, decision.switch_at):
            self.switches += decision.switch_at is not None

    @rule(plane=st.sampled_from(PLANES), rank=st.sampled_from(RANKS))
    def give_up_waiting(self, plane: int, rank: int) -> None:
        if (runner := self.planes[plane].runners.get(rank)) is not None:
            runner.asked, runner.joined = None, -1

    @rule(plane=st.sampled_from(PLANES), rank=st.sampled_from(RANKS))
    def settle(self, plane: int, rank: int) -> None:
        runner = self.planes[plane].runners.get(rank)
        if runner is not None and runner.asked is None:
            runner.rank.settle(self.planes[plane].settle, self.planes[plane].term)

    # -- coordinators --

    @rule(plane=st.sampled_from(PLANES))
    def start_coordinator(self, plane: int) -> None:
        its = self.planes[plane]
        if its.agreement is None:
            its.start()
            its.next_version = 1

    @rule(plane=st.sampled_from(PLANES))
    def kill_coordinator(self, plane: int) -> None:
        self.planes[plane].agreement, self.planes[plane].parked = None, []

    @rule(plane=st.sampled_from(PLANES))
    def open(self, plane: int) -> None:
        its = self.planes[plane]
        if its.agreement is not None and its.complete():
            its.agreement.open(its.next_version)
            its.next_version += 1
            its.tell_parked()

    @rule(plane=st.sampled_from(PLANES), which=st.integers(0, 5), again=st.booleans())
    def deliver(self, plane: int, which: int, again: bool) -> None:
        its = self.planes[plane]
        if its.agreement is None or not its.mail:
            return
        runner, version, answer = its.mail[which % len(its.mail)]
        if not again:
            its.mail.remove((runner, version, answer))
        if runner.joined != its.number:
            runner.inbox.append(None)
            return
        decision = its.agreement.answer(version, answer)
        if decision is None:
            its.parked.append((runner, version))
            return
        runner.inbox.append(decision)
        its.tell_parked()

    @rule(plane=st.sampled_from(PLANES), which=st.integers(0, 5))
    def lose(self, plane: int, which: int) -> None:
        if mail := self.planes[plane].mail:
            del mail[which % len(mail)]

    @rule(plane=st.sampled_from(PLANES))
    def time_is_up(self, plane: int) -> None:
        its = self.planes[plane]
        if its.agreement is not None and its.agreement.open_version is not None:
            its.agreement.abort(its.agreement.open_version)
            its.tell_parked()

    # -- a switch at once, or all of it gone: rare if left to chance --

    @rule(plane=st.sampled_from(PLANES))
    def serve_all(self, plane: int) -> None:
        self.start_coordinator(plane)
        for rank in RANKS:
            self.claim(plane, rank)
            self.join(plane, rank)
        self.open(plane)

    @precondition(lambda self: any(plane.agreement and plane.agreement.open_version for plane in self.planes))
    @rule(plane=st.sampled_from(PLANES), heard=st.integers(0, 3), margin=st.integers(0, 6))
    def almost_switch(self, plane: int, heard: int, margin: int) -> None:
        for rank in RANKS:
            self.prepare(plane, rank, margin)
        for _ in RANKS:
            self.deliver(plane, 0, False)
        for rank in RANKS[:heard]:
            self.hear_the_decision(plane, rank)

    @rule()
    def kill_everything(self) -> None:
        for plane in PLANES:
            self.kill_coordinator(plane)
            for rank in RANKS:
                self.kill_runner(plane, rank)
            self.planes[plane] = Plane(number=self.planes[plane].number)

    def teardown(self) -> None:
        try:
            self.kill_everything()
            self.serve_all(0)
            for rank in RANKS:
                assert self.planes[0].runners[rank].rank.settle(self.planes[0].settle, self.planes[0].term), (
                    "nobody knows"
                )
            longest = max(len(rank.told) for rank in self.ranks)
            for rank in RANKS:
                while len(self.ranks[rank].told) < longest + 8:
                    before = len(self.ranks[rank].told)
                    self.train(rank, 1)
                    assert len(self.ranks[rank].told) > before, "a rank waits"
        finally:
            self.kill_everything()
            for it in self.ranks:
                it.close()
            shutil.rmtree(self.directory)


@pytest.fixture
def _own_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYNAMICCL_SHM_DIR", "DYNAMICCL_JOB_ID"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("examples", [120, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("_own_segments")
def test_whatever_dies_no_call_has_two_tables(examples: int) -> None:
    """A hundred steps an example: 100,000 in the long run."""
    run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=100, deadline=None))


@pytest.fixture
def machine(_own_segments: None) -> Iterator[Any]:
    """Untyped, as rules are to mypy."""
    machine = Machine()
    machine.serve_all(0)
    for rank in RANKS:
        machine.train(rank, 5)
    yield machine
    machine.teardown()


@pytest.mark.parametrize("told", [1, 2])
def test_everything_killed_between_the_first_commit_and_the_last(machine: Any, told: int) -> None:
    """What a store that died with the control plane used to answer with ABORT."""
    machine.almost_switch(0, told, 0)
    machine.kill_everything()
    machine.train(0, 20)
    assert len(machine.ranks[0].told) > 5, "it was told"
    machine.serve_all(1)
    for rank in RANKS:
        machine.settle(1, rank)
        machine.train(rank, 30)
    assert len(set(machine.told)) == 2, "the switch was not made"


def test_nothing_is_decided_while_a_rank_cannot_be_asked(machine: Any) -> None:
    machine.almost_switch(0, 1, 0)
    machine.kill_everything()
    machine.start_coordinator(1)
    for rank in RANKS[1:]:
        machine.claim(1, rank)
        machine.join(1, rank)
        machine.settle(1, rank)
        machine.train(rank, 5)
        assert would_wait(machine.ranks[rank])
    machine.claim(1, 0)
    machine.join(1, 0)
    for rank in RANKS:
        machine.settle(1, rank)
        machine.train(rank, 30)
    assert len(set(machine.told)) == 2, "the switch was not made"


def test_a_rank_that_was_asked_for_the_next_version_still_knows_the_last(machine: Any) -> None:
    machine.almost_switch(0, 1, 0)
    machine.train(0, 20)
    machine.settle(0, 0)
    machine.open(0)
    machine.prepare(0, 0, 3)
    machine.kill_everything()
    machine.serve_all(1)
    for rank in RANKS:
        machine.settle(1, rank)
        machine.train(rank, 30)
    assert len(set(machine.told)) == 2, "the switch was not made"


def test_a_coordinator_that_was_outdone_believes_nothing_that_it_heard(machine: Any) -> None:
    """docs/agreement_model.md: another control plane served its ranks since, and committed."""
    machine.kill_everything()
    machine.start_coordinator(0)
    for rank in RANKS[1:]:
        machine.claim(0, rank)
        machine.join(0, rank)
    for rank in RANKS:
        machine.kill_runner(0, rank)
    machine.serve_all(1)
    machine.almost_switch(1, 0, 0)
    machine.hear_the_decision(1, 1)
    machine.train(1, 20)
    machine.kill_runner(1, 0)
    machine.claim(0, 0)
    machine.join(0, 0)
    machine.settle(0, 0)
    machine.train(0, 20)


def test_a_coordinator_that_was_outdone_does_not_remember_its_own_commit(machine: Any) -> None:
    machine.almost_switch(0, 0, 0)
    for rank in RANKS:
        machine.kill_runner(0, rank)
    machine.serve_all(1)
    for rank in (0, 2):
        machine.settle(1, rank)
        machine.train(rank, 20)
    machine.kill_runner(1, 1)
    machine.claim(0, 1)
    machine.join(0, 1)
    machine.settle(0, 1)
    machine.train(1, 20)
