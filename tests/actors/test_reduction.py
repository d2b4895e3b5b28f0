"""Which collectives count: those that everybody has measured under the same table, however late some of them are."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynamiccl_ray.actors.messages import COLLECTIVE_DTYPE, Collectives
from dynamiccl_ray.actors.reduction import MOST_WAITING, Matching


def collectives(dseq: list[int], times: list[int] | int = 1000, **columns: Any) -> Collectives:
    out = np.zeros(len(dseq), COLLECTIVE_DTYPE)
    out["dseq"], out["least_ns"], out["most_ns"], out["ranks"] = dseq, times, times, 1
    for name, values in columns.items():
        out[name] = values
    return out


def test_the_fastest_and_the_slowest_rank_and_only_what_all_have() -> None:
    matching = Matching()
    done = matching.take([collectives([1, 2, 3], [100, 120, 140]), collectives([1, 2, 3, 4], [110, 90, 200, 999])], 2)
    assert done["dseq"].tolist() == [1, 2, 3]
    assert done["least_ns"].tolist() == [100, 90, 140]
    assert done["most_ns"].tolist() == [110, 120, 200]
    assert done["ranks"].tolist() == [2, 2, 2]
    assert matching.given_up == 0


def test_what_some_rank_does_not_have_yet_waits_for_it() -> None:
    matching = Matching()
    assert len(matching.take([collectives([1, 2, 3])], 2)) == 0
    assert matching.take([collectives([2])], 2)["dseq"].tolist() == [2]
    assert matching.take([collectives([3, 1])], 2)["dseq"].tolist() == [1, 3]


def test_a_source_may_stand_for_several_ranks() -> None:
    matching = Matching()
    assert matching.take([collectives([1, 2], ranks=3), collectives([1])], 4)["dseq"].tolist() == [1]


def test_what_was_measured_under_different_tables_is_given_up_and_counted() -> None:
    matching = Matching()
    done = matching.take([collectives([1, 2], version=[5, 5]), collectives([1, 2], version=[5, 6])], 2)
    assert done["dseq"].tolist() == [1]
    assert matching.given_up == 2


def test_what_waits_too_long_is_given_up_the_oldest_first() -> None:
    matching = Matching()
    matching.take([collectives(list(range(MOST_WAITING + 10)))], 2)
    assert matching.given_up == 10
    assert len(matching.take([collectives([9])], 2)) == 0
    assert len(matching.take([collectives([11])], 2)) == 1


@given(st.data())
def test_in_whatever_pieces_records_come_each_is_used_once_or_waits(data: st.DataObject) -> None:
    ranks, calls = data.draw(st.integers(1, 4)), 30
    have = [sorted(data.draw(st.sets(st.integers(0, calls - 1)))) for _ in range(ranks)]
    times = np.random.default_rng(0).integers(1, 1000, (ranks, calls))
    matching, done = Matching(), []
    while any(have):
        cut = [data.draw(st.integers(0, len(of))) for of in have]
        if not any(cut):
            cut = [len(of) for of in have]
        parts = [
            collectives(of[:n], times[rank, of[:n]].tolist())
            for rank, (of, n) in enumerate(zip(have, cut, strict=True))
        ]
        have = [of[n:] for of, n in zip(have, cut, strict=True)]
        done += matching.take(parts, ranks).tolist()
    seen = [row[0] for row in done]
    assert len(seen) == len(set(seen))
    for row in done:
        assert row[2] == times[:, row[0]].min()
        assert row[3] == times[:, row[0]].max()
    assert matching.given_up == 0
