"""The coordinator's half of agreement; ``plugin_bridge/test_agreement_machine.py`` has it with the ranks' half."""

from __future__ import annotations

import pytest

from dynamiccl_ray.control.agreement import Agreement, Answer, Decision, Standing, new_term

RANKS = (0, 1, 2)
TERM = 7
NOTHING = dict.fromkeys(RANKS, Standing())


def _agreement(standings: dict[int, Standing] = NOTHING, *, first: int | None = 1) -> Agreement:
    agreement = Agreement(RANKS, TERM)
    for rank, standing in standings.items():
        assert agreement.hear(rank, standing, TERM)
    if first is not None:
        agreement.open(first)
    return agreement


def _answer(rank: int, hold_at: int | None = 10, digest: int = 1) -> Answer:
    return Answer(rank=rank, digest=digest, hold_at=hold_at)


def _abort(version: int) -> Decision:
    return Decision(version=version, switch_at=None)


def test_commits_at_the_largest_hold_once_all_answered() -> None:
    agreement = _agreement()
    assert agreement.answer(1, _answer(0, 10)) is None
    assert agreement.answer(1, _answer(1, 30)) is None
    assert agreement.answer(1, _answer(2, 20)) == Decision(version=1, switch_at=30)
    assert agreement.open_version is None
    assert agreement.resolve(1) == Decision(version=1, switch_at=30), "asked again"
    assert agreement.abort(1) == Decision(version=1, switch_at=30), "too late"


def test_one_refusal_aborts() -> None:
    agreement = _agreement()
    agreement.answer(1, _answer(0))
    assert agreement.answer(1, _answer(1, None)) == _abort(1)
    assert agreement.answer(1, _answer(2)) == _abort(1)


def test_different_digests_abort_and_ask_for_the_leaders_table() -> None:
    agreement = _agreement()
    agreement.answer(1, _answer(0, digest=1))
    agreement.answer(1, _answer(1, digest=2))
    decision = agreement.answer(1, _answer(2, digest=1))
    assert decision == Decision(version=1, switch_at=None, adopt_leader=True)
    assert agreement.digest_mismatches == 1


def test_a_duplicate_answer_does_not_move_the_switch() -> None:
    agreement = _agreement()
    agreement.answer(1, _answer(0, 10))
    agreement.answer(1, _answer(0, 99))
    agreement.answer(1, _answer(1, 10))
    assert agreement.answer(1, _answer(2, 10)) == Decision(version=1, switch_at=10)


def test_a_rank_that_gave_up_waiting_aborts_what_is_open() -> None:
    agreement = _agreement()
    agreement.answer(1, _answer(0))
    assert agreement.resolve(1) == _abort(1)
    agreement.answer(1, _answer(1))
    assert agreement.answer(1, _answer(2)) == _abort(1), "nobody commits it any more"


PENDING = Standing(base=4, base_at=100, pending=5)


@pytest.mark.parametrize(
    "told",
    [
        Standing(base=4, base_at=100, pending=5, switch_at=130),
        Standing(base=5, base_at=130, pending=5, switch_at=130),
        Standing(base=5, base_at=130, pending=6),
    ],
    ids=["told", "in force", "asked for the next"],
)
def test_a_commit_that_any_rank_knows_is_adopted_whoever_was_lost(told: Standing) -> None:
    agreement = _agreement({0: PENDING, 1: told}, first=None)
    assert agreement.resolve(5) == Decision(version=5, switch_at=130)
    agreement.hear(2, PENDING, TERM)
    assert agreement.resolve(5) == Decision(version=5, switch_at=130)


def test_abort_only_when_every_rank_is_known_to_be_undecided() -> None:
    agreement = _agreement({0: PENDING, 2: PENDING}, first=None)
    assert agreement.resolve(5) is None
    assert agreement.silent == {1}
    agreement.hear(1, Standing(base=4, base_at=100, pending=6), TERM)
    assert agreement.resolve(5) == _abort(5)


def test_nothing_is_opened_before_every_rank_is_heard() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[2\]"):
        _agreement({0: Standing(), 1: Standing()})


def test_an_unknown_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 9"):
        _agreement().answer(1, _answer(9))


def test_what_was_shown_to_another_coordinator_is_not_heard() -> None:
    agreement = _agreement({0: PENDING, 1: PENDING}, first=None)
    for term in (TERM - 1, TERM + 1):
        assert not agreement.hear(2, PENDING, term)
    assert agreement.silent == {2}
    assert agreement.resolve(5) is None


def test_terms_grow_and_differ() -> None:
    terms = [new_term() for _ in range(10)]
    assert len(set(terms)) == 10, "drawn by chance within 65 us"
    assert new_term(above=terms[0]) > terms[0]
    ahead = 2**63
    assert new_term(above=ahead) > ahead
    assert new_term() < 2**64
