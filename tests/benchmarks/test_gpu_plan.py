"""What is checked, and against what: plans, inputs, references, statistics."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu import reference
from benchmarks.gpu.cases import COPIES, ITEM_BYTES, Case
from benchmarks.gpu.plan import (
    CHECK_SIZES,
    COLLECTIVES,
    TYPES,
    action_from_json,
    action_to_json,
    actions,
    assumed,
    fitted,
    refusals,
    slots,
    steps,
)
from benchmarks.gpu.stats import geomean, slope, spread, summary
from dynamiccl_ray.actions import Action
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_PAIRS, OWN_PAIR, Collective

cases = st.builds(
    lambda ranks, units, collective, dtype, reduction, offset, seed: (
        ranks,
        Case(
            collective=collective,
            count=units * ranks,
            dtype=dtype,
            reduction=reduction,
            root=seed % ranks,
            offset=offset,
            seed=seed,
        ),
    ),
    st.integers(2, 8),
    st.integers(1, 300),
    st.sampled_from(COLLECTIVES),
    st.sampled_from(TYPES),
    st.sampled_from(("sum", "max")),
    st.integers(0, 1),
    st.integers(0, 50),
)


# ---- inputs and results ----


@given(cases)
@settings(max_examples=60, deadline=None)
def test_every_rank_gives_something_else_and_every_type_holds_the_result(drawn: tuple[int, Case]) -> None:
    ranks, case = drawn
    inputs = [reference.given(case, rank, ranks) for rank in range(ranks)]
    for tensor in inputs:
        assert tensor.dtype == getattr(torch, case.dtype)
        assert tensor.numel() == case.sent(ranks)
        if case.collective not in COPIES:
            assert tensor.min() >= 1
            assert tensor.max() <= reference.LARGEST
    if case.sent(ranks) > 32 and case.collective is not Collective.BROADCAST:
        assert not any(torch.equal(inputs[0].view(torch.uint8), other.view(torch.uint8)) for other in inputs[1:])
    for rank in range(ranks):
        want = reference.expected(case, rank, ranks)
        if want is None:
            assert case.collective is Collective.REDUCE
            assert rank != case.root
            continue
        assert want.numel() == case.received(ranks)
        if case.collective in (Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER):
            # In float64, where nothing can overflow: the type itself must hold it.
            stacked = torch.stack([tensor.to(torch.float64) for tensor in inputs])
            whole = stacked.sum(0) if case.reduction == "sum" else stacked.amax(0)
            share = case.received(ranks)
            mine = whole[rank * share : (rank + 1) * share] if case.collective is Collective.REDUCE_SCATTER else whole
            assert torch.equal(want.to(torch.float64), mine)


def test_what_is_copied_is_any_bits_and_arrives_whole() -> None:
    case = Case(collective=Collective.ALL_GATHER, count=4096, dtype="uint8")
    parts = [reference.given(case, rank, 4) for rank in range(4)]
    want = reference.expected(case, 0, 4)
    assert want is not None
    assert torch.equal(want, torch.cat(parts))
    assert len(set(want.tolist())) == 256
    sent = Case(collective=Collective.BROADCAST, count=64, root=2)
    assert reference.difference(reference.given(sent, 0, 4), reference.given(sent, 2, 4)) is None


def test_a_seed_makes_other_data() -> None:
    one, other = (Case(collective=Collective.ALL_REDUCE, count=64, seed=seed) for seed in (0, 1))
    assert not torch.equal(reference.given(one, 0, 2), reference.given(other, 0, 2))
    assert not torch.equal(reference.given(one, 1, 2), reference.given(other, 0, 2))


def test_a_shifted_chunk_is_no_chunk() -> None:
    """No shift by a whole grain maps the input onto itself, so data that lands in the wrong place is seen."""
    bits = reference.given(Case(collective=Collective.ALL_REDUCE, count=1 << 16, dtype="int32"), 0, 2)
    for grain in (4, 128, 480, 4096, 16384, 32768):
        assert (bits[grain:] == bits[:-grain]).float().mean() < 0.1


def test_differences_say_where() -> None:
    want = torch.arange(8, dtype=torch.float16)
    assert reference.difference(want.clone(), want) is None
    got = want.clone()
    got[3], got[6] = 9.0, float("nan")
    assert reference.difference(got, want) == {
        "wrong_elements": 2,
        "elements": 8,
        "first": 3,
        "last": 6,
        "got": ["9.0", "4.0", "5.0", "nan"],
        "want": ["3.0", "4.0", "5.0", "6.0"],
    }
    nans = torch.full((4,), float("nan"))
    assert reference.difference(nans.clone(), nans) is None, "bits count, and a NaN's are as good as any"
    zero = torch.zeros(1)
    assert reference.difference(-zero, zero) is not None


@given(cases)
@settings(max_examples=30)
def test_a_case_goes_into_a_report_and_back(drawn: tuple[int, Case]) -> None:
    _, case = drawn
    assert Case.from_json(case.to_json()) == case


# ---- the plan ----


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("sizes", CHECK_SIZES.values())
def test_all_variants_of_a_slot_share_its_key(ranks: int, sizes: tuple[int, ...]) -> None:
    found = slots(sizes, ranks)
    assert len({slot[0].key for slot in found}) == len(found) == len(COLLECTIVES) * len(sizes)
    for slot in found:
        assert len({(case.key, case.nbytes) for case in slot}) == 1
        assert {case.dtype for case in slot} == set(ITEM_BYTES)
        assert slot[0].dtype == "float32", "all pairs are offered for it"
        assert all(case.count % ranks == 0 and case.root < ranks for case in slot)
        assert {case.offset for case in slot} == {0, 1}


def test_sizes_that_are_no_multiple_of_a_chunk() -> None:
    assert fitted(1 << 20, 4, ragged=False) == 1 << 20
    assert fitted(1 << 20, 4, ragged=True) == (1 << 20) + 32
    assert fitted(1, 8, ragged=True) == 64


def test_every_configuration_is_checked_on_everything_that_offers_it() -> None:
    found = slots(CHECK_SIZES["one"], 3)
    offered = assumed(found)
    pairs = {pair for of in offered.values() for pair in of}
    grid = actions(pairs, CHANNEL_VALUES, CHUNK_VALUES, cross=True)
    assert len(set(grid)) == len(grid) == len(CHANNEL_VALUES) * (1 + len(pairs) * len(CHUNK_VALUES))
    checked = Counter((step.action, case.key) for step in steps(found, offered, grid) for case in step.cases)
    for action in grid:
        for slot in found:
            key = slot[0].key
            offers = action.pair == OWN_PAIR or action.pair in offered[key]
            plain = not action.channels and not action.chunk
            assert checked[action, key] == ((len(slot) if plain else 1) if offers else 0)
    # Another variant every time: all types run with every pair beyond NCCL's own channels and chunk.
    seen = {
        (step.action.pair, case.dtype)
        for step in steps(found, offered, grid)
        if step.action.chunk
        for case in step.cases
    }
    assert seen == {(pair, dtype) for pair in pairs for dtype in TYPES}


def test_one_at_a_time_is_less_and_still_everything() -> None:
    grid = actions({1, 6}, CHANNEL_VALUES, CHUNK_VALUES, cross=False)
    assert len(grid) == len(CHANNEL_VALUES) + 2 * (len(CHANNEL_VALUES) + len(CHUNK_VALUES) - 1)
    assert not any(action.channels and action.chunk for action in grid)
    assert not any(action.chunk for action in grid if action.pair == OWN_PAIR)
    with pytest.raises(ValueError, match=r"channels: \[3\] not among"):
        actions({1}, (0, 3), (0,), cross=True)


def test_what_is_not_offered_is_asked_for_too() -> None:
    found = slots((4096, 65536), 2)
    offered = assumed(found)
    refused = list(refusals(found, offered))
    assert all(step.refused for step in refused)
    for step in refused:
        assert all(step.action.pair not in offered[case.key] for case in step.cases)
        assert len({case.collective for case in step.cases}) == len(step.cases)
    assert len(refused) == N_PAIRS - 1 - 3, "ring is offered for everything"


@given(st.integers(0, N_PAIRS - 1), st.integers(0, len(CHANNEL_VALUES) - 1), st.integers(0, len(CHUNK_VALUES) - 1))
def test_an_action_goes_into_a_report_and_back(pair: int, channels: int, chunk: int) -> None:
    action = Action(pair=pair, channels=channels, chunk=chunk)
    assert action_from_json(action_to_json(action)) == action


# ---- statistics ----


def test_the_protocols_figures() -> None:
    found = summary([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])
    assert found["mean"] == 3.0
    assert found["std"] == pytest.approx(np.std([1, 2, 3, 3, 4, 5], ddof=1))
    assert found["run_std"] == pytest.approx(math.sqrt(2))
    assert found["p99"] == pytest.approx(np.percentile([1, 2, 3, 3, 4, 5], 99))
    assert (found["runs"], found["samples"], found["median"]) == (2, 6, 3.0)
    assert summary([[7.0]])["run_std"] is None
    assert summary([[], [7.0]])["runs"] == 1
    for empty in ([], [[]]):
        with pytest.raises(ValueError, match="no samples"):
            summary(empty)


def test_spreads_slopes_and_means() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0, "runs": 3}
    assert slope([5.0]) == 0.0
    assert slope([0.0, 2.0, 4.0, 6.0]) == 2.0
    assert slope([0.0] * 10 + [100.0] + [0.0] * 10) == 0.0, "one outlier is no trend"
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="positive"):
        geomean([1.0, 0.0])
    with pytest.raises(ValueError, match="no values"):
        spread([])
