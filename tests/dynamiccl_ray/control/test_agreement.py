"""The coordinator's half of agreement as a state machine: crashes, duplicates, stragglers, two coordinators."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamiccl_ray.control.agreement import Agreement, Answer, Decision, MemoryStore, decision_key

RANKS = (0, 1, 2)


def _agreement(store: MemoryStore) -> Agreement:
    return Agreement(store, "run", 7, RANKS)


def _answer(rank: int, hold_at: int | None = 10, digest: int = 1) -> Answer:
    return Answer(rank=rank, digest=digest, hold_at=hold_at)


def test_commits_at_the_largest_hold_once_all_answered() -> None:
    agreement = _agreement(MemoryStore())
    agreement.open(1)
    assert agreement.answer(1, _answer(0, 10)) is None
    assert agreement.answer(1, _answer(1, 30)) is None
    assert agreement.answer(1, _answer(2, 20)) == Decision(version=1, switch_at=30)


def test_one_refusal_aborts() -> None:
    agreement = _agreement(MemoryStore())
    agreement.open(1)
    agreement.answer(1, _answer(0))
    assert agreement.answer(1, _answer(1, None)) == Decision(version=1, switch_at=None)
    assert agreement.answer(1, _answer(2)) == Decision(version=1, switch_at=None)


def test_different_digests_abort_and_ask_for_the_leaders_table() -> None:
    agreement = _agreement(MemoryStore())
    agreement.open(1)
    agreement.answer(1, _answer(0, digest=1))
    agreement.answer(1, _answer(1, digest=2))
    decision = agreement.answer(1, _answer(2, digest=1))
    assert decision == Decision(version=1, switch_at=None, adopt_leader=True)
    assert agreement.digest_mismatches == 1


def test_a_duplicate_answer_does_not_move_the_switch() -> None:
    agreement = _agreement(MemoryStore())
    agreement.open(1)
    agreement.answer(1, _answer(0, 10))
    agreement.answer(1, _answer(0, 99))
    agreement.answer(1, _answer(1, 10))
    assert agreement.answer(1, _answer(2, 10)) == Decision(version=1, switch_at=10)


def test_a_restarted_coordinator_adopts_what_was_recorded() -> None:
    store = MemoryStore()
    agreement = _agreement(store)
    agreement.open(1)
    for rank in RANKS:
        agreement.answer(1, _answer(rank))
    assert _agreement(store).answer(1, _answer(0)) == Decision(version=1, switch_at=10)


def test_a_restarted_coordinator_aborts_what_was_open() -> None:
    store = MemoryStore()
    agreement = _agreement(store)
    agreement.open(1)
    agreement.answer(1, _answer(0))
    successor = _agreement(store)
    assert successor.answer(1, _answer(1)) == Decision(version=1, switch_at=None)
    # The first one, cut off and still alive, cannot commit any more.
    agreement.answer(1, _answer(1))
    assert agreement.answer(1, _answer(2)) == Decision(version=1, switch_at=None)


def test_an_unknown_rank_is_refused() -> None:
    agreement = _agreement(MemoryStore())
    agreement.open(1)
    with pytest.raises(ValueError, match="rank 9"):
        agreement.answer(1, _answer(9))


class Crashes(RuleBasedStateMachine):
    """Two coordinators over one store, restarting at any time; whatever is told to anyone must never change."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.coordinators = [_agreement(self.store), _agreement(self.store)]
        self.version = 0
        self.told: dict[int, set[int | None]] = {}
        self.promised: dict[tuple[int, int], int] = {}

    @rule(which=st.integers(0, 1))
    def open_next(self, which: int) -> None:
        self.version += 1
        self.coordinators[which].open(self.version)

    @precondition(lambda self: self.version > 0)
    @rule(
        which=st.integers(0, 1),
        rank=st.sampled_from(RANKS),
        back=st.integers(0, 2),
        hold=st.integers(1, 50),
        refuses=st.booleans(),
    )
    def answer(self, which: int, rank: int, back: int, hold: int, refuses: bool) -> None:
        version = max(1, self.version - back)
        # A rank's promise for a version is made once; a refusal only if it never promised.
        hold = self.promised.get((version, rank), hold)
        if not refuses:
            self.promised[version, rank] = hold
        gives = None if refuses and (version, rank) not in self.promised else hold
        decision = self.coordinators[which].answer(version, _answer(rank, gives))
        if decision is not None:
            self.told.setdefault(version, set()).add(decision.switch_at)
            if decision.switch_at is not None:
                assert all((version, r) in self.promised for r in RANKS), "committed without every promise"
                assert decision.switch_at >= max(self.promised[version, r] for r in RANKS)

    @precondition(lambda self: self.version > 0)
    @rule(which=st.integers(0, 1), back=st.integers(0, 2))
    def abort(self, which: int, back: int) -> None:
        decision = self.coordinators[which].abort(max(1, self.version - back))
        self.told.setdefault(decision.version, set()).add(decision.switch_at)

    @rule(which=st.integers(0, 1))
    def crash(self, which: int) -> None:
        self.coordinators[which] = _agreement(self.store)

    @invariant()
    def nobody_was_told_two_things(self) -> None:
        for version, told in self.told.items():
            assert len(told) == 1, f"version {version}: {told}"
            raw = self.store.get(decision_key("run", 7, version))
            assert raw is not None
            assert {Decision.parse(raw).switch_at} == told


Crashes.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCrashes = Crashes.TestCase
