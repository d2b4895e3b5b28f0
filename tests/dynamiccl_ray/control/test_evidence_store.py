"""The store: what was measured, what a shift leaves of it, and what may be the best by it."""

from __future__ import annotations

import copy
import io

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from looped import MIB, pair

from dynamiccl_ray.actions import N_ACTIONS, N_CHANNELS, N_CHUNKS, OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.arrays import Float32
from dynamiccl_ray.control.columns import nothing_expected
from dynamiccl_ray.control.evidence import Contest, Evidence
from dynamiccl_ray.knobs import N_PAIRS, OWN_PAIR


def _store(keys: int, prior: Float32 | None = None, earlier: Float32 | None = None) -> Evidence:
    """Keys of one kind on one communicator, from 1 MiB on."""
    evidence = Evidence()
    said = [nothing_expected(keys) if of is None else of for of in (prior, earlier)]
    evidence.grow(np.zeros(keys), np.full(keys, 4), MIB << np.arange(keys), *said)
    return evidence


def _measured(
    evidence: Evidence, row: int, action: int, samples: float, mean: float, square: float = 0.0, *, begin: bool = False
) -> None:
    numbers = (np.array([float(x)]) for x in (samples, mean, square))
    (evidence.begin if begin else evidence.record)(np.array([row]), np.array([action]), *numbers)


def _contest(evidence: Evidence, *, without: tuple[int, ...] = (), without_chunk: tuple[int, ...] = ()) -> Contest:
    """Of all keys, without some flat actions' pair and channels, or their pair and chunk."""
    allowed = np.ones((len(evidence), N_PAIRS, N_CHANNELS, N_CHUNKS), np.bool_)
    for action in without:
        of_pair, channels, _ = action_parts(action)
        allowed[:, of_pair, channels] = False
    for action in without_chunk:
        of_pair, _, chunk = action_parts(action)
        allowed[:, of_pair, :, chunk] = False
    return evidence.contest(np.arange(len(evidence)), allowed.reshape(len(evidence), -1), 8)


def test_a_new_key_knows_nothing() -> None:
    evidence = _store(1)
    assert np.isnan(evidence.baseline[0])
    assert np.isnan(evidence.last[0])
    assert np.isinf(evidence.fastest[0])
    assert evidence.noise[0] == pytest.approx(0.02)
    assert evidence.ratio(np.array([0])).tolist() == np.zeros((1, N_PAIRS, N_CHANNELS)).tolist()
    assert _contest(evidence).best.tolist() == [OWN_ACTION]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 9), st.floats(1, 9), st.floats(0, 1)),
        min_size=1,
        max_size=20,
    )
)
def test_sums_are_those_of_a_loop_in_python(decisions: list[tuple[int, int, int, float, float]]) -> None:
    evidence = _store(3)
    counts, totals = np.zeros((3, N_ACTIONS)), np.zeros((3, N_ACTIONS))
    square, freedom = np.zeros(3), np.zeros(3)
    last, fastest = np.full(3, np.nan), np.full(3, np.inf)
    for row, action, samples, mean, deviation in decisions:
        _measured(evidence, row, action, samples, mean, deviation)
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
    evidence = _store(1)
    _measured(evidence, 0, pair(5), 2, 2.5)
    _measured(evidence, 0, OWN_ACTION, 4, 3.0, begin=True)
    _measured(evidence, 0, int(flat_action(5, 2, 3)), 2, 2.7)
    ratio = evidence.ratio(np.array([0]))[0]
    assert (ratio[5, 0], ratio[5, 2], ratio[OWN_PAIR, 0]) == (pytest.approx(-0.5), pytest.approx(-0.3), 0)
    estimates = evidence.estimates(np.array([0]))
    (time, sure), (time_by_chunk, sure_by_chunk) = estimates.channels, estimates.chunks
    assert (time[0, 5, 0], time[0, 5, 2]) == (pytest.approx(-0.5), pytest.approx(-0.3))
    assert (time_by_chunk[0, 5, 0], time_by_chunk[0, 5, 3]) == (pytest.approx(-0.5), pytest.approx(-0.3))
    assert sure[0, OWN_PAIR, 0] > sure[0, 5, 0] > 0 == sure[0, 5, 1]
    assert sure_by_chunk[0, 5, 0] > 0 == sure_by_chunk[0, 5, 1]


def test_what_one_key_measures_is_lent_to_its_neighbour_as_a_ratio() -> None:
    evidence = _store(2)
    _measured(evidence, 0, OWN_ACTION, 4, 3.0, begin=True)
    _measured(evidence, 0, pair(5), 4, 2.8)
    # Of another time, and even before it has one.
    for baseline in (None, 7.0):
        if baseline is not None:
            _measured(evidence, 1, OWN_ACTION, 4, baseline, begin=True)
        time, sure = evidence.estimates(np.array([1])).channels
        assert time[0, 5, 0] == pytest.approx(-0.2, abs=1e-6)
        assert sure[0, 5, 0] > 0


def test_after_a_shift_a_hint_is_left_that_one_collective_outweighs() -> None:
    evidence = _store(2)
    for row in (0, 1):
        _measured(evidence, row, OWN_ACTION, 4, 3.0, begin=True)
        _measured(evidence, row, pair(5), 100, 2.5, 100 * 0.05**2)
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
    _measured(evidence, 0, OWN_ACTION, 4, 4.0, begin=True)
    assert evidence.baseline[0] == pytest.approx(4.0)
    assert evidence.ratio(np.array([0]))[0, 5, 0] == pytest.approx(-0.5)
    estimates = evidence.estimates(np.array([0]))
    (time, _), (by_chunk, _) = estimates.channels, estimates.chunks
    assert (time[0, 5, 0], by_chunk[0, 5, 0]) == (pytest.approx(-0.5, abs=1e-5), pytest.approx(-0.5, abs=1e-5))
    # One collective goes before the hint.
    _measured(evidence, 0, pair(5), 1, 4.2)
    assert evidence.ratio(np.array([0]))[0, 5, 0] > (0.2 - 0.5) / 2
    assert (evidence.by_channels[1] == untouched).all()


def test_a_hint_does_not_grow_old_twice_over_and_survives_a_second_shift() -> None:
    evidence = _store(1)
    rows = np.array([0])
    _measured(evidence, 0, OWN_ACTION, 4, 3.0, begin=True)
    _measured(evidence, 0, pair(5), 100, 2.5)
    evidence.shift(rows)
    hint = evidence.by_channels[0, 5, 0]
    # A second one, before the baseline was measured anew, and a third one after that.
    evidence.shift(rows)
    _measured(evidence, 0, OWN_ACTION, 4, 5.0, begin=True)
    evidence.shift(rows)
    _measured(evidence, 0, OWN_ACTION, 4, 6.0, begin=True)
    assert 0 < evidence.by_channels[0, 5, 0] <= hint
    assert evidence.ratio(rows)[0, 5, 0] == pytest.approx(-0.5)


def test_a_later_measurement_of_nccls_own_choice_moves_the_baseline_and_no_time() -> None:
    evidence = _store(1)
    _measured(evidence, 0, OWN_ACTION, 4, 3.0, begin=True)
    _measured(evidence, 0, pair(5), 4, 2.5)
    _measured(evidence, 0, OWN_ACTION, 4, 3.2)
    assert evidence.baseline[0] == pytest.approx(3.1)
    assert evidence.ratio(np.array([0]))[0, 5, 0] == pytest.approx(-0.6)


def test_what_contends_is_judged_by_both_means() -> None:
    evidence = _store(2)
    # At noise 0.02 two standard errors are 0.028 of two collectives, and 0.0018 of a thousand.
    for row, behind in enumerate((0.02, 0.04)):
        for action, samples, mean in ((OWN_ACTION, 1000, 3 + behind), (pair(1), 2, 3.0), (pair(2), 1000, 3 + behind)):
            _measured(evidence, row, action, samples, mean, 0.02**2 * (samples - 1))
    contest = _contest(evidence)
    assert contest.best.tolist() == [pair(1), pair(1)]
    assert contest.least.tolist() == [pair(1), pair(1)]
    assert contest.behind.tolist() == [[1, OWN_ACTION], [1, pair(2)]]
    # The best has been measured well, and what was measured little may be as good.
    _measured(evidence, 0, pair(1), 1000, 3.0, 0.02**2 * 1000)
    _measured(evidence, 0, pair(3), 2, 3.02)
    contest = _contest(evidence)
    assert (contest.best[0], contest.least[0]) == (pair(1), pair(3))


def test_what_is_not_allowed_is_neither_the_best_nor_behind() -> None:
    evidence = _store(1)
    small = int(flat_action(2, 0, 4))
    for action, mean in ((OWN_ACTION, 3.0), (pair(1), 2.0), (small, 2.5), (pair(3), 4.0)):
        _measured(evidence, 0, action, 50, mean)
    for without, without_chunk, best, behind in (
        ((), (), pair(1), [OWN_ACTION, small, pair(3)]),
        ((pair(1),), (), small, [OWN_ACTION, pair(1), pair(3)]),
        ((pair(1),), (small,), OWN_ACTION, [pair(1), small, pair(3)]),
        ((pair(1), pair(3), OWN_ACTION), (small,), OWN_ACTION, [OWN_ACTION, pair(1), small, pair(3)]),
    ):
        contest = _contest(evidence, without=without, without_chunk=without_chunk)
        assert (contest.best[0], contest.least[0]) == (best, best)
        assert sorted(contest.behind.tolist()) == sorted([0, action] for action in behind)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_the_contest_is_that_of_a_loop_in_python(seed: int) -> None:
    rng = np.random.default_rng(seed)
    evidence, of = _store(4), rng.choice(N_ACTIONS, 6, replace=False)
    for row, action in rng.integers((0, 0), (4, 6), (12, 2)):
        samples = int(rng.integers(1, 9))
        _measured(evidence, row, int(of[action]), samples, 3 + 0.05 * rng.standard_normal(), 0.02**2 * samples)
    allowed = rng.random((4, N_ACTIONS)) < 0.8
    rows = np.array([3, 0, 2])
    contest = evidence.contest(rows, allowed[rows], 5)
    behind = []
    for i, row in enumerate(rows.tolist()):
        measured = [action for action in sorted(of.tolist()) if evidence.samples[row, action]]
        means = {a: evidence.total[row, a] / evidence.samples[row, a] for a in measured if allowed[row, a]}
        behind += [[i, a] for a in measured if a not in means]
        if not means:
            assert (contest.best[i], contest.least[i]) == (OWN_ACTION, OWN_ACTION)
            continue
        best = min(means, key=means.__getitem__)
        doubt = {a: 2 * evidence.noise[row] * np.sqrt((1 / evidence.samples[row, [a, best]]).sum()) for a in means}
        contends = [a for a in means if means[a] - means[best] <= doubt[a]]
        assert contest.best[i] == best
        assert contest.least[i] == min(contends, key=lambda a: evidence.samples[row, a])
        behind += [[i, a] for a in means if a not in contends]
    assert sorted(contest.behind.tolist()) == sorted(behind)


def test_noise_is_what_one_action_varies_by_and_not_what_actions_differ_by() -> None:
    evidence, rng = _store(1), np.random.default_rng(0)
    for i in range(200):
        times = 3 + i % 2 + rng.normal(0, 0.1, 8)
        _measured(evidence, 0, pair(i % 2), 8, times.mean(), ((times - times.mean()) ** 2).sum())
    assert evidence.noise[0] == pytest.approx(0.1, rel=0.05)


def test_keys_that_are_kept_move_together_and_lend_to_each_other_as_before() -> None:
    evidence = _store(4)
    for row in range(4):
        _measured(evidence, row, OWN_ACTION, 4, 3.0 + row, begin=True)
    _measured(evidence, 1, pair(5), 4, 3.5)
    evidence.keep(np.array([False, True, False, True]))
    evidence.grow([1], [4], [2 * MIB], nothing_expected(1), nothing_expected(1))
    assert evidence.baseline[:2].tolist() == [4.0, 6.0]
    time, sure = evidence.estimates(np.arange(3)).channels
    assert time[:2, 5, 0].tolist() == pytest.approx([-0.5, -0.5], abs=1e-6)
    assert sure[0, 5, 0] > sure[1, 5, 0] > sure[2, 5, 0] == 0


def test_a_model_that_was_wrong_about_what_was_tried_is_believed_less_of_what_was_not() -> None:
    expected = nothing_expected(2)
    expected[:, 1:9] = -0.3
    surer = []
    for ratio in (-0.3, 0.7):
        evidence = _store(2, expected)
        for row in range(2):
            _measured(evidence, row, OWN_ACTION, 4, 3.0, begin=True)
        for tried in range(1, 6):
            _measured(evidence, 0, pair(tried), 4, 3.0 + ratio)
        time, sure = evidence.estimates(np.arange(2)).channels
        assert time[0, 8, 0] == pytest.approx(-0.3), "nothing else is known of it"
        assert time[0, 1, 0] == pytest.approx(ratio, abs=0.01)
        surer.append(float(sure[0, 8, 0]))
    assert surer[0] > 3 * surer[1] > 0


def test_what_a_model_rules_out_cannot_be_the_best() -> None:
    expected = nothing_expected(2)
    expected[:, 1], expected[:, 2], expected[:, 3] = 0.6, 0.2, -0.2
    evidence = _store(2, expected)
    for row in range(2):
        _measured(evidence, row, OWN_ACTION, 8, 3.0, begin=True)
    _measured(evidence, 0, pair(4), 8, 4.0)
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
    evidence = _store(1, expected)
    _measured(evidence, 0, OWN_ACTION, 8, 3.0, begin=True)
    row, allowed = np.array([0]), np.ones((1, N_PAIRS, N_CHUNKS), np.bool_)

    def tried_with() -> tuple[list[int], list[int]]:
        chunk, promising = evidence.with_its_chunk(row, allowed, evidence.estimates(row))
        return chunk[0, :5].tolist(), promising[0].nonzero()[0].tolist()

    assert not evidence.may_be_best(row, allowed[:, :, :N_CHANNELS], evidence.estimates(row))[0, [1, 2, 4]].any()
    assert tried_with() == ([0, 1, 2, 0, 0], [1]), "the second is behind NCCL's own choice, the third's are alike"
    allowed[0, 1, 1] = False
    assert tried_with() == ([0, 0, 2, 0, 0], [])
    allowed[0, 1, 1] = True
    _measured(evidence, 0, flat_action(1, 3, 0), 8, 4.0)
    assert tried_with() == ([0, 1, 2, 0, 0], [1]), "it was tried, but not with that chunk"
    known = copy.deepcopy(evidence)
    _measured(evidence, 0, flat_action(1, 0, 1), 8, 2.9)
    assert tried_with()[1] == []
    evidence = known
    _measured(evidence, 0, pair(5), 8, 2.5)
    assert tried_with()[1] == [], "that is faster"


def test_where_nccls_own_choice_is_off_what_is_expected_beside_the_best_may_be_better_still() -> None:
    """As on 4 nodes of p5en at 4 MiB, where NCCL's own choice took eight times as long as anything about it said."""
    expected = nothing_expected(9)
    expected[:, 1], expected[:, 2], expected[:, 3] = 0.4, 0.3, 1.2
    evidence = _store(9, expected)
    for row in range(9):
        _measured(evidence, row, OWN_ACTION, 8, 3.0, begin=True)
        _measured(evidence, row, pair(1), 8, 1.5 if row == 0 else 3.3)
    rows = np.arange(2)
    may = evidence.may_be_best(rows, np.ones((2, N_PAIRS, N_CHANNELS), np.bool_), evidence.estimates(rows))
    assert may[:, 1:4, 0].tolist() == [[True, True, False], [False, True, False]]


def test_a_hint_from_before_a_shift_rules_nothing_out() -> None:
    evidence = _store(1)
    _measured(evidence, 0, OWN_ACTION, 8, 3.0, begin=True)
    _measured(evidence, 0, pair(4), 8, 4.0)
    evidence.shift(np.array([0]))
    _measured(evidence, 0, OWN_ACTION, 8, 3.5, begin=True)
    only = np.zeros((1, N_PAIRS, N_CHANNELS), np.bool_)
    only[:, :, 0] = True
    assert evidence.may_be_best(np.array([0]), only, evidence.estimates(np.array([0])))[0, 4, 0]


def test_keys_that_are_kept_keep_what_is_expected_of_them() -> None:
    expected = nothing_expected(3)
    expected[:, 5] = np.array([0.1, 0.2, 0.3])[:, None, None][:, 0]
    evidence = _store(3, expected)
    evidence.keep(np.array([False, True, True]))
    time, _ = evidence.estimates(np.arange(2)).channels
    assert time[:, 5, 0].tolist() == pytest.approx([0.2, 0.3])


def test_a_rare_key_does_not_hide_what_stands_out_beside_it() -> None:
    evidence = _store(4)
    for row, baseline in ((0, 1.0), (1, 5.0), (3, 4.0)):
        _measured(evidence, row, OWN_ACTION, 4, baseline, begin=True)
    # A third of the way from 1 to 4.
    assert evidence.excess(np.array([1, 2])).tolist() == [pytest.approx(3.0), 0]


def test_the_state_goes_through_a_file_and_back() -> None:
    evidence, rng = _store(3), np.random.default_rng(0)
    for action in rng.choice(N_ACTIONS, 20, replace=False).tolist():
        _measured(evidence, int(rng.integers(3)), action, 3, 3.0 + rng.random(), 0.01)
    evidence.shift(np.array([1]))
    file = io.BytesIO()
    np.savez(file, **evidence.state())
    file.seek(0)
    again = _store(3)
    again.restore(dict(np.load(file, allow_pickle=False)))
    for name, value in evidence.state().items():
        np.testing.assert_array_equal(again.state()[name], value, err_msg=name)
    rows = np.arange(3)
    np.testing.assert_array_equal(again.ratio(rows), evidence.ratio(rows))
    assert sum(value.nbytes for value in evidence.state().values()) < 20_000, "zeros are left out"
