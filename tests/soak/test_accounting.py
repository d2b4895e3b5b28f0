"""The soak can fail: what it checks with finds what is broken on purpose."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from accounting import Counted, Span, beyond, two_tables, uncounted, uncounted_records
from attacking import Attack
from table import by_part, stalls
from watching import NONE, committed, phase_of, undecided

from dynamiccl_ray.plugin_bridge.nccl_job import LOG, LOG_DTYPE, agreement_violations

RANKS, CALLS = 8, 100
COMM = 0x77


def log_of(switch_at: list[int]) -> LOG:
    """Each rank runs its calls on a tree, and from its own switch on as a ring."""
    log = np.zeros((RANKS, CALLS), LOG_DTYPE)
    log["comm"], log["ordinal"], log["bytes"], log["func"] = COMM, np.arange(CALLS), 1 << 20, 4
    log["rank"] = np.arange(RANKS)[:, None]
    log["algo"] = np.arange(CALLS) >= np.array(switch_at)[:, None]
    return log.ravel()


def test_one_rank_that_is_told_abort_where_the_others_are_told_commit_is_seen() -> None:
    assert agreement_violations(log_of([60] * RANKS)) == 0
    assert agreement_violations(log_of([60] * (RANKS - 1) + [CALLS])) == CALLS - 60
    assert agreement_violations(log_of([60] * (RANKS - 1) + [61])) == 1


def test_a_version_from_two_calls_on_is_seen() -> None:
    same = dict.fromkeys(range(RANKS), 60)
    assert two_tables({(COMM, 3): same}) == []
    assert two_tables({(COMM, 3): same, (COMM, 4): {**same, 7: 61}}) == [(COMM, 4)]


GOOD = [
    Counted(comm=COMM, rank=rank, calls=CALLS, records=90, read=80, dropped=4, unprofiled=6) for rank in range(RANKS)
]
PLAYED = {(COMM, rank): CALLS for rank in range(RANKS)}


def test_what_adds_up_is_accepted() -> None:
    assert uncounted(GOOD, PLAYED) == []
    assert uncounted_records(GOOD) == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"records": 89}, "1 of 100 calls are neither"),
        ({"records": 91}, "-1 of 100 calls are neither"),
        ({"calls": 99, "records": 89}, "counted 99 calls, and the log has 100"),
        ({"read": 91}, "91 records were read, and 90 written"),
    ],
)
def test_a_count_that_is_wrong_on_one_rank_is_named(changes: dict[str, int], says: str) -> None:
    (wrong,) = uncounted([*GOOD[:-1], dataclasses.replace(GOOD[-1], **changes)], PLAYED)
    assert says in wrong
    assert "rank 7" in wrong


def test_a_rank_without_a_segment_is_named() -> None:
    (wrong,) = uncounted(GOOD[:-1], PLAYED)
    assert "(119, 7)" in wrong


def _words(**changes: int) -> dict[str, int]:
    words = {"dseq": 50, "hold_at": NONE, "base": 3 << 8, "pending": 3 << 8, "decision": NONE, "promise": 3 << 2 | 1}
    return {**words, "staged": 0, "offered": 0, **changes}


PROMISED = _words(hold_at=70, pending=4 << 8 | 1, decision=0, promise=4 << 2 | 1)
TOLD = {**PROMISED, "decision": 75}
FOLDED = _words(base=4 << 8 | 1, pending=4 << 8 | 1, decision=75, promise=4 << 2 | 1)


def test_how_far_a_version_has_got() -> None:
    assert undecided(PROMISED)
    assert not committed(PROMISED)
    assert committed(TOLD)
    idle = _words()
    assert phase_of([idle, idle]) == "idle"
    assert phase_of([idle, PROMISED]) == "PREPARE"
    assert phase_of([PROMISED, PROMISED]) == "PREPARE"
    assert phase_of([TOLD, PROMISED]) == phase_of([FOLDED, PROMISED]) == "COMMIT"
    assert phase_of([TOLD, FOLDED]) == "idle", "nobody waits any more"
    aborted = {**PROMISED, "decision": NONE}
    assert phase_of([aborted, idle]) == "idle"
    offered = _words(offered=4 << 8 | 1)
    assert phase_of([offered, offered]) == phase_of([_words(staged=4 << 8), idle]) == "PREPARE"
    assert phase_of([offered, FOLDED]) == "COMMIT"


def test_a_stall_belongs_to_the_attack_before_it() -> None:
    attacks = [Attack(at, "runner", "kill", "idle") for at in (10.0, 20.0, 30.0)]
    spans = [Span(5.0, 6.0), Span(11.0, 14.0), Span(19.0, 24.0), Span(31.0, 31.5)]
    assert [row["s"] for row in stalls(attacks, spans)] == [5.0, 5.0, 0.5]
    (row,) = by_part(stalls(attacks, spans))
    assert (row["n"], row["p50"], row["worst"]) == (3, 5.0, 5.0)


def test_a_wait_counts_as_far_as_there_was_a_control_plane() -> None:
    waits = [Span(0.0, 29.0), Span(100.0, 131.0), Span(200.0, 250.0)]
    assert beyond(waits, [Span(198.0, 240.0)], 30.0) == [waits[1]]
    assert beyond(waits, [], 30.0) == waits[1:]
