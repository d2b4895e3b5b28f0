"""The store: what was measured, what a shift leaves of it, and what may be the best by it."""

from __future__ import annotations

import copy
import io

import hypothesis.strategies as st
import numpy as np
import pytest
from evidenced import measured, store
from hypothesis import given, settings
from looped import MIB, pair

from dynamiccl_ray.actions import N_ACTIONS, N_CHANNELS, N_CHUNKS, OWN_ACTION, flat_action
from dynamiccl_ray.control.columns import nothing_expected
from dynamiccl_ray.knobs import N_PAIRS, OWN_PAIR


def test_a_new_key_knows_nothing() -> None:
    evidence = store(1)
    assert np.isnan(evidence.baseline[0])
    assert np.isnan(evidence.last[0])
    assert np.isinf(evidence.fastest[0])
    assert evidence.noise[0] == pytest.approx(0.02)
    assert evidence.ratio(np.array([0])).tolist() == np.zeros((1, N_PAIRS, N_CHANNELS)).tolist()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 9), st.floats(1, 9), st.floats(0, 1)),
        min_size=1,
        max_size=20,
    )
)
def test_sums_are_those_of_a_loop_in_python(decisions: list[tuple[int, int, int, float, float]]) -> None:
    evidence = store(3)
    counts, totals = np.zeros((3, N_ACTIONS)), np.zeros((3, N_ACTIONS))
    square, freedom = np.zeros(3), np.zeros(3)
    last, fastest = np.full(3, np.nan), np.full(3, np.inf)
    for row, action, samples, mean, deviation in decisions:
        measured(evidence, row, action, samples, mean, deviation)
        counts[row, action] += samples
        totals[row, action] += samples * mean
        square[row], freedom[row] = square[row] + deviation, freedom[row] + samples - 1
        last[row], fastest[row] = mean, min(fastest[row], mean)
    shape = (3, N_PAIRS, N_CHANNELS, N_CHUNKS)
    for mine, expected in (
        (evidence.samples, counts),
        (evidence.total, totals),
        (evidence.by_channels, counts.reshape(shape).sum(-1)),
        (evidence.by_channels_total, totals.reshape(shape).sum(-1)),
        (evidence.by_chunk, counts.reshape(shape).sum(-2)),
        (evidence.by_chunk_total, totals.reshape(shape).sum(-2)),
        (evidence.square, square),
        (evidence.freedom, freedom),
        (evidence.last, last),
        (evidence.fastest, fastest),
    ):
        np.testing.assert_allclose(mine, expected)
    assert (evidence.tried == (counts > 0)).all()
    own = counts[:, OWN_ACTION] > 0
    baseline = np.where(own, totals[:, OWN_ACTION] / np.maximum(counts[:, OWN_ACTION], 1), np.nan)
    np.testing.assert_allclose(evidence.baseline, baseline)
    np.testing.assert_allclose(evidence.mean(np.arange(3), np.full(3, OWN_ACTION)), baseline)


def test_times_are_told_as_ratios_to_the_baseline_whichever_came_first() -> None:
    evidence = store(1)
    measured(evidence, 0, pair(5), 2, 2.5)
    measured(evidence, 0, OWN_ACTION, 4, 3.0, begin=True)
    measured(evidence, 0, int(flat_action(5, 2, 3)), 2, 2.7)
    ratio = evidence.ratio(np.array([0]))[0]
    assert (ratio[5, 0], ratio[5, 2], ratio[OWN_PAIR, 0]) == (pytest.approx(-0.5), pytest.approx(-0.3), 0)
    estimates = evidence.estimates(np.array([0]))
    (time, sure), (time_by_chunk, sure_by_chunk) = estimates.channels, estimates.chunks
    assert (time[0, 5, 0], time[0, 5, 2]) == (pytest.approx(-0.5), pytest.approx(-0.3))
    assert (time_by_chunk[0, 5, 0], time_by_chunk[0, 5, 3]) == (pytest.approx(-0.5), pytest.approx(-0.3))
    assert sure[0, OWN_PAIR, 0] > sure[0, 5, 0] > 0 == sure[0, 5, 1]
    assert sure_by_chunk[0, 5, 0] > 0 == sure_by_chunk[0, 5, 1]


def test_what_one_key_measures_is_lent_to_its_neighbour_as_a_ratio() -> None:
    evidence = store(2)
    measured(evidence, 0, OWN_ACTION, 4, 3.0, begin=True)
    measured(evidence, 0, pair(5), 4, 2.8)
    # Of another time, and even before it has one.
    for baseline in (None, 7.0):
        if baseline is not None:
            measured(evidence, 1, OWN_ACTION, 4, baseline, begin=True)
        time, sure = evidence.estimates(np.array([1])).channels
        assert time[0, 5, 0] == pytest.approx(-0.2, abs=1e-6)
        assert sure[0, 5, 0] > 0


def test_after_a_shift_a_hint_is_left_that_one_collective_outweighs() -> None:
    evidence = store(2)
    for row in (0, 1):
        measured(evidence, row, OWN_ACTION, 4, 3.0, begin=True)
        measured(evidence, row, pair(5), 100, 2.5, 100 * 0.05**2)
    untouched = evidence.by_channels[1].copy()
    evidence.shift(np.array([0]))
    assert not evidence.samples[0].any()
    assert not evidence.total[0].any()
    assert np.isinf(evidence.fastest[0])
    assert 0 < evidence.by_channels[0, 5, 0] < 0.5
    assert evidence.by_channels[0, 5, 0] == evidence.by_chunk[0, 5, 0]
    assert evidence.by_channels[0, OWN_PAIR, 0] == evidence.by_chunk[0, OWN_PAIR, 0] == 0
    assert evidence.tried[0, [OWN_ACTION, pair(5)]].all(), "it has been tried, whatever the network"
    assert evidence.noise[0] == evidence.noise[1], "how noisy a key is outlasts a shift"
    # Against the old baseline until there is a new one, and then against that.
    assert evidence.ratio(np.array([0]))[0, 5, 0] == pytest.approx(-0.5)
    measured(evidence, 0, OWN_ACTION, 4, 4.0, begin=True)
    assert evidence.baseline[0] == pytest.approx(4.0)
    assert evidence.ratio(np.array([0]))[0, 5, 0] == pytest.approx(-0.5)
    estimates = evidence.estimates(np.array([0]))
    (time, _), (by_chunk, _) = estimates.channels, estimates.chunks
    assert (time[0, 5, 0], by_chunk[0, 5, 0]) == (pytest.approx(-0.5, abs=1e-5), pytest.approx(-0.5, abs=1e-5))
    # One collective goes before the hint.
    measured(evidence, 0, pair(5), 1, 4.2)
    assert evidence.ratio(np.array([0]))[0, 5, 0] > (0.2 - 0.5) / 2
    assert (evidence.by_channels[1] == untouched).all()


def test_a_hint_does_not_grow_old_twice_over_and_survives_a_second_shift() -> None:
    evidence = store(1)
    rows = np.array([0])
    measured(evidence, 0, OWN_ACTION, 4, 3.0, begin=True)
    measured(evidence, 0, pair(5), 100, 2.5)
    evidence.shift(rows)
    hint = evidence.by_channels[0, 5, 0]
    # A second one, before the baseline was measured anew, and a third one after that.
    evidence.shift(rows)
    measured(evidence, 0, OWN_ACTION, 4, 5.0, begin=True)
    evidence.shift(rows)
    measured(evidence, 0, OWN_ACTION, 4, 6.0, begin=True)
    assert 0 < evidence.by_channels[0, 5, 0] <= hint
    assert evidence.ratio(rows)[0, 5, 0] == pytest.approx(-0.5)


def test_a_later_measurement_of_nccls_own_choice_moves_the_baseline_and_no_time() -> None:
    evidence = store(1)
    measured(evidence, 0, OWN_ACTION, 4, 3.0, begin=True)
    measured(evidence, 0, pair(5), 4, 2.5)
    measured(evidence, 0, OWN_ACTION, 4, 3.2)
    assert evidence.baseline[0] == pytest.approx(3.1)
    assert evidence.ratio(np.array([0]))[0, 5, 0] == pytest.approx(-0.6)


def test_noise_is_what_one_action_varies_by_and_not_what_actions_differ_by() -> None:
    evidence, rng = store(1), np.random.default_rng(0)
    for i in range(200):
        times = 3 + i % 2 + rng.normal(0, 0.1, 8)
        measured(evidence, 0, pair(i % 2), 8, times.mean(), ((times - times.mean()) ** 2).sum())
    assert evidence.noise[0] == pytest.approx(0.1, rel=0.05)


def test_keys_that_are_kept_move_together_and_lend_to_each_other_as_before() -> None:
    evidence = store(4)
    for row in range(4):
        measured(evidence, row, OWN_ACTION, 4, 3.0 + row, begin=True)
    measured(evidence, 1, pair(5), 4, 3.5)
    evidence.keep(np.array([False, True, False, True]))
    evidence.grow([1], [4], [2 * MIB], nothing_expected(1), nothing_expected(1), np.full(1, np.nan, np.float32))
    assert evidence.baseline[:2].tolist() == [4.0, 6.0]
    time, sure = evidence.estimates(np.arange(3)).channels
    assert time[:2, 5, 0].tolist() == pytest.approx([-0.5, -0.5], abs=1e-6)
    assert sure[0, 5, 0] > sure[1, 5, 0] > sure[2, 5, 0] == 0


def test_the_noise_of_an_earlier_run_is_known_of_the_keys_that_come_and_up_to_a_limit() -> None:
    evidence = store(1)
    measured(evidence, 0, OWN_ACTION, 4, 3.0, begin=True)
    before, noise = evidence.noise[0], np.array([np.nan, 0.2, 0.5, 50.0, np.inf], np.float32)
    evidence.grow(np.zeros(5), np.full(5, 4), np.full(5, MIB), nothing_expected(5), nothing_expected(5), noise)
    own, unknown, known, most, beyond, infinite = evidence.noise
    assert own == before
    assert unknown == infinite < 0.1 < known < 0.2 < most == beyond < 0.5


def test_a_model_that_was_wrong_about_what_was_tried_is_believed_less_of_what_was_not() -> None:
    expected = nothing_expected(2)
    expected[:, 1:9] = -0.3
    surer = []
    for ratio in (-0.3, 0.7):
        evidence = store(2, expected)
        for row in range(2):
            measured(evidence, row, OWN_ACTION, 4, 3.0, begin=True)
        for tried in range(1, 6):
            measured(evidence, 0, pair(tried), 4, 3.0 + ratio)
        time, sure = evidence.estimates(np.arange(2)).channels
        assert time[0, 8, 0] == pytest.approx(-0.3), "nothing else is known of it"
        assert time[0, 1, 0] == pytest.approx(ratio, abs=0.01)
        surer.append(float(sure[0, 8, 0]))
    assert surer[0] > 3 * surer[1] > 0


def test_what_a_model_rules_out_cannot_be_the_best() -> None:
    expected = nothing_expected(2)
    expected[:, 1], expected[:, 2], expected[:, 3] = 0.6, 0.2, -0.2
    evidence = store(2, expected)
    for row in range(2):
        measured(evidence, row, OWN_ACTION, 8, 3.0, begin=True)
    measured(evidence, 0, pair(4), 8, 4.0)
    allowed = np.ones((2, N_PAIRS, N_CHANNELS), np.bool_)
    said = evidence.estimates(np.arange(2))
    may = evidence.may_be_best(np.arange(2), allowed, said)
    # Of an error of 0.15: 0.6 is four deviations behind NCCL's own choice, 0.2 is not three.
    assert may.any(-1)[:, 1:4].tolist() == [[False, True, True]] * 2
    assert not may[0, 4, 0], "measured, and far behind"
    assert may[:, 4, 1:].all(), "its other channel counts are not known"
    assert may[:, 5].all(), "nothing is known of it"
    allowed[0, 3] = False
    assert not evidence.may_be_best(np.arange(2), allowed, said)[0, 3].any()


def test_a_pair_that_is_slow_with_nccls_chunk_is_to_be_tried_with_a_faster_one() -> None:
    """As rings on a cloud's TCP at 2 MB, where NCCL's own chunk takes 2.7 times as long as the best."""
    expected = nothing_expected(1)
    expected[:, 1:5] = 0.7
    expected[:, 1, N_CHANNELS + 1], expected[:, 2, N_CHANNELS + 2] = -0.3, 0.1
    expected[:, 3] = -0.2
    expected[:, 3, N_CHANNELS + 1] = -0.24
    # What is only expected to be faster still does not keep it from being tried.
    expected[:, 6] = -0.5
    evidence = store(1, expected)
    measured(evidence, 0, OWN_ACTION, 8, 3.0, begin=True)
    row, allowed = np.array([0]), np.ones((1, N_PAIRS, N_CHUNKS), np.bool_)

    def tried_with() -> tuple[list[int], list[int]]:
        chunk, promising = evidence.with_its_chunk(row, allowed, evidence.estimates(row))
        return chunk[0, :5].tolist(), promising[0].nonzero()[0].tolist()

    assert not evidence.may_be_best(row, allowed[:, :, :N_CHANNELS], evidence.estimates(row))[0, [1, 2, 4]].any()
    assert tried_with() == ([0, 1, 2, 0, 0], [1]), "the second is behind NCCL's own choice, the third's are alike"
    allowed[0, 1, 1] = False
    assert tried_with() == ([0, 0, 2, 0, 0], [])
    allowed[0, 1, 1] = True
    measured(evidence, 0, flat_action(1, 3, 0), 8, 4.0)
    assert tried_with() == ([0, 1, 2, 0, 0], [1]), "it was tried, but not with that chunk"
    known = copy.deepcopy(evidence)
    measured(evidence, 0, flat_action(1, 0, 1), 8, 2.9)
    assert tried_with()[1] == []
    evidence = known
    measured(evidence, 0, pair(5), 8, 2.5)
    assert tried_with()[1] == [], "that is faster"


def test_where_nccls_own_choice_is_off_what_is_expected_beside_the_best_may_be_better_still() -> None:
    """As on 4 nodes of p5en at 4 MiB, where NCCL's own choice took eight times as long as anything about it said."""
    expected = nothing_expected(9)
    expected[:, 1], expected[:, 2], expected[:, 3] = 0.4, 0.3, 1.2
    evidence = store(9, expected)
    for row in range(9):
        measured(evidence, row, OWN_ACTION, 8, 3.0, begin=True)
        measured(evidence, row, pair(1), 8, 1.5 if row == 0 else 3.3)
    rows = np.arange(2)
    may = evidence.may_be_best(rows, np.ones((2, N_PAIRS, N_CHANNELS), np.bool_), evidence.estimates(rows))
    assert may[:, 1:4, 0].tolist() == [[True, True, False], [False, True, False]]


def test_a_hint_from_before_a_shift_rules_nothing_out() -> None:
    evidence = store(1)
    measured(evidence, 0, OWN_ACTION, 8, 3.0, begin=True)
    measured(evidence, 0, pair(4), 8, 4.0)
    evidence.shift(np.array([0]))
    measured(evidence, 0, OWN_ACTION, 8, 3.5, begin=True)
    only = np.zeros((1, N_PAIRS, N_CHANNELS), np.bool_)
    only[:, :, 0] = True
    assert evidence.may_be_best(np.array([0]), only, evidence.estimates(np.array([0])))[0, 4, 0]


def test_keys_that_are_kept_keep_what_is_expected_of_them() -> None:
    expected = nothing_expected(3)
    expected[:, 5] = np.array([0.1, 0.2, 0.3])[:, None, None][:, 0]
    evidence = store(3, expected)
    evidence.keep(np.array([False, True, True]))
    time, _ = evidence.estimates(np.arange(2)).channels
    assert time[:, 5, 0].tolist() == pytest.approx([0.2, 0.3])


def test_a_rare_key_does_not_hide_what_stands_out_beside_it() -> None:
    evidence = store(4)
    for row, baseline in ((0, 1.0), (1, 5.0), (3, 4.0)):
        measured(evidence, row, OWN_ACTION, 4, baseline, begin=True)
    # A third of the way from 1 to 4.
    assert evidence.excess(np.array([1, 2])).tolist() == [pytest.approx(3.0), 0]


def test_the_state_goes_through_a_file_and_back() -> None:
    evidence, rng = store(3), np.random.default_rng(0)
    for action in rng.choice(N_ACTIONS, 20, replace=False).tolist():
        measured(evidence, int(rng.integers(3)), action, 3, 3.0 + rng.random(), 0.01)
    evidence.shift(np.array([1]))
    file = io.BytesIO()
    np.savez(file, **evidence.state())
    file.seek(0)
    again = store(3)
    again.restore(dict(np.load(file, allow_pickle=False)))
    for name, value in evidence.state().items():
        np.testing.assert_array_equal(again.state()[name], value, err_msg=name)
    rows = np.arange(3)
    np.testing.assert_array_equal(again.ratio(rows), evidence.ratio(rows))
    assert sum(value.nbytes for value in evidence.state().values()) < 20_000, "zeros are left out"


def test_what_is_corrected_of_one_action_moves_what_it_says_of_its_channels_and_its_chunk() -> None:
    evidence, one, other = store(2), int(flat_action(2, 3, 4)), int(flat_action(2, 3, 5))
    for row in range(2):
        measured(evidence, row, OWN_ACTION, 4, 3.0, begin=True)
        for action in (one, other):
            measured(evidence, row, action, 2, 2.8)
    evidence.correct(np.array([0]), np.array([one]), np.array([0.1]))
    rows = np.arange(2)
    assert evidence.mean(rows, np.array([one, one])) == pytest.approx([2.9, 2.8])
    assert evidence.mean(rows, np.array([other, other])) == pytest.approx([2.8, 2.8])
    assert evidence.ratio(rows)[:, 2, 3] == pytest.approx([-0.15, -0.2])
    of_chunk = evidence.by_chunk_total[:, 2] / np.maximum(evidence.by_chunk[:, 2], 1)
    assert of_chunk[:, 4] == pytest.approx([2.9, 2.8])
    assert of_chunk[:, 5] == pytest.approx([2.8, 2.8])
