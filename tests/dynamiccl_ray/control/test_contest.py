"""Which of a key's actions is the best by what was measured, and what is to be measured next."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from evidenced import measured, store
from hypothesis import given, settings
from looped import pair

from dynamiccl_ray.actions import N_ACTIONS, N_CHANNELS, N_CHUNKS, OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.control.contest import Contest, compared, contest, overlooked, promising, rechunked
from dynamiccl_ray.control.evidence import Evidence
from dynamiccl_ray.knobs import N_PAIRS, OWN_PAIR


def _contest(evidence: Evidence, *, without: tuple[int, ...] = (), without_chunk: tuple[int, ...] = ()) -> Contest:
    """Of all keys, without some flat actions' pair and channels, or their pair and chunk."""
    allowed = np.ones((len(evidence), N_PAIRS, N_CHANNELS, N_CHUNKS), np.bool_)
    for action in without:
        of_pair, channels, _ = action_parts(action)
        allowed[:, of_pair, channels] = False
    for action in without_chunk:
        of_pair, _, chunk = action_parts(action)
        allowed[:, of_pair, :, chunk] = False
    return contest(evidence.means(np.arange(len(evidence))), allowed.reshape(len(evidence), -1), 8)


def test_what_contends_is_judged_by_both_means() -> None:
    evidence = store(2)
    # At noise 0.02 two standard errors are 0.028 of two collectives, and 0.0018 of a thousand.
    for row, behind in enumerate((0.02, 0.04)):
        for action, samples, mean in ((OWN_ACTION, 1000, 3 + behind), (pair(1), 2, 3.0), (pair(2), 1000, 3 + behind)):
            measured(evidence, row, action, samples, mean, 0.02**2 * (samples - 1))
    found = _contest(evidence)
    assert found.best.tolist() == [pair(1), pair(1)]
    assert found.behind.tolist() == [[1, OWN_ACTION], [1, pair(2)]]


def test_what_is_not_allowed_is_neither_the_best_nor_behind() -> None:
    evidence = store(1)
    small = int(flat_action(2, 0, 4))
    for action, mean in ((OWN_ACTION, 3.0), (pair(1), 2.0), (small, 2.5), (pair(3), 4.0)):
        measured(evidence, 0, action, 50, mean)
    for without, without_chunk, best, behind in (
        ((), (), pair(1), [OWN_ACTION, small, pair(3)]),
        ((pair(1),), (), small, [OWN_ACTION, pair(1), pair(3)]),
        ((pair(1),), (small,), OWN_ACTION, [pair(1), small, pair(3)]),
        ((pair(1), pair(3), OWN_ACTION), (small,), OWN_ACTION, [OWN_ACTION, pair(1), small, pair(3)]),
    ):
        found = _contest(evidence, without=without, without_chunk=without_chunk)
        assert found.best[0] == best
        assert sorted(found.behind.tolist()) == sorted([0, action] for action in behind)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_the_contest_is_that_of_a_loop_in_python(seed: int) -> None:
    rng = np.random.default_rng(seed)
    evidence, of = store(4), rng.choice(N_ACTIONS, 6, replace=False)
    for row, action in rng.integers((0, 0), (4, 6), (12, 2)):
        samples = int(rng.integers(1, 9))
        measured(evidence, row, int(of[action]), samples, 3 + 0.05 * rng.standard_normal(), 0.02**2 * samples)
    allowed = rng.random((4, N_ACTIONS)) < 0.8
    rows = np.array([3, 0, 2])
    found = contest(evidence.means(rows), allowed[rows], 5)
    behind = []
    for i, row in enumerate(rows.tolist()):
        known = [action for action in sorted(of.tolist()) if evidence.samples[row, action]]
        means = {a: evidence.total[row, a] / evidence.samples[row, a] for a in known if allowed[row, a]}
        behind += [[i, a] for a in known if a not in means]
        if not means:
            assert found.best[i] == OWN_ACTION
            continue
        best = min(means, key=means.__getitem__)
        doubt = {a: 2 * evidence.noise[row] * np.sqrt((1 / evidence.samples[row, [a, best]]).sum()) for a in means}
        contends = [a for a in means if means[a] - means[best] <= doubt[a]]
        assert found.best[i] == best
        behind += [[i, a] for a in means if a not in contends]
    assert sorted(found.behind.tolist()) == sorted(behind)


# NCCL's own choice is only to be left alone.
ALL = (np.arange(N_ACTIONS) == OWN_ACTION)[None] | (action_parts(np.arange(N_ACTIONS))[0] != OWN_PAIR)
NO_MODEL = np.zeros((1, N_ACTIONS))
KEY = np.array([0])


def _drawn(noise: float = 0.05) -> Evidence:
    """A key that has drawn: NCCL's own choice, pair 2 that is slower on any channels, and pair 3 that is faster."""
    evidence = store(1)
    measured(evidence, 0, OWN_ACTION, 4, 3.0, 3 * noise**2, begin=True)
    for channels in range(1, 6):
        measured(evidence, 0, int(flat_action(2, channels, 0)), 1, 3.3)
        measured(evidence, 0, int(flat_action(3, channels, 0)), 1, 2.8)
    # Degrees of freedom for what one time varies by.
    evidence.square[0], evidence.freedom[0] = 100 * noise**2, 100
    return evidence


def test_luck_is_not_the_best_and_is_not_measured_again() -> None:
    evidence = _drawn(noise=0.1)
    lucky, like = int(flat_action(2, 3, 1)), int(flat_action(2, 3, 0))
    measured(evidence, 0, lucky, 1, 2.78)
    measured(evidence, 0, like, 20, 3.3)
    assert contest(evidence.means(KEY), ALL, 4).best[0] == lucky
    best, following = compared(evidence.means(KEY), ALL, NO_MODEL, 8)
    assert action_parts(best)[0] == action_parts(following)[0] == 3


def test_what_may_not_be_chosen_is_not_compared() -> None:
    evidence, allowed = _drawn(), ALL.copy()
    allowed.reshape(N_PAIRS, -1)[3] = False
    best, following = compared(evidence.means(KEY), allowed, NO_MODEL, 8)
    assert best[0] == following[0] == OWN_ACTION
    nothing = compared(evidence.means(KEY), np.zeros_like(ALL), NO_MODEL, 8)
    assert [x.tolist() for x in nothing] == [[OWN_ACTION], [OWN_ACTION]]


def test_more_actions_than_are_compared_leave_the_fastest_of_them() -> None:
    evidence = store(1)
    for i in range(60):
        measured(evidence, 0, int(flat_action(1 + i % 20, 1 + i // 20, 0)), 50, 4.0 - 0.01 * i, 50 * 0.001**2)
    best, following = compared(evidence.means(KEY), ALL, NO_MODEL, 8)
    assert best[0] == following[0] == flat_action(1 + 59 % 20, 1 + 59 // 20, 0)


def _expected(by: float) -> tuple[int, np.ndarray]:
    """Of pair 3, on channels that nobody has drawn, so far from the best is expected; of all else nothing is known."""
    new, expected = int(flat_action(3, 6, 0)), np.full((1, N_ACTIONS), np.inf, np.float32)
    expected[0, new] = -0.2 + by
    return new, expected


def test_what_promises_to_be_the_best_is_what_is_expected_to_be_nearly_as_good_and_was_not_measured() -> None:
    new, expected = _expected(0.02)
    may = np.arange(N_ACTIONS)[None] == new
    may[0, _drawn().means(KEY).action] = True
    assert promising(_drawn().means(KEY), may, expected, NO_MODEL, 1).tolist() == [new]
    assert promising(_drawn().means(KEY), np.zeros_like(ALL), expected, NO_MODEL, 1).tolist() == [-1]
    assert promising(_drawn().means(KEY), may, _expected(0.1)[1], NO_MODEL, 1).tolist() == [-1], (
        "far behind, by all that is known"
    )
    assert promising(_drawn().means(KEY), may, NOTHING, NO_MODEL, 1).tolist() == [-1], "nothing is known of it"
    evidence = _drawn()
    measured(evidence, 0, new, 1, 2.9)
    assert promising(evidence.means(KEY), may, expected, NO_MODEL, 1).tolist() == [-1], "it was measured"
    # What is like it is known to be slow, and the best is far ahead.
    evidence = _drawn(noise=0.01)
    for channels in (5, 7):
        measured(evidence, 0, int(flat_action(3, channels, 0)), 100, 3.6, 0.01)
    measured(evidence, 0, pair(4), 100, 2.6, 0.01)
    assert promising(
        evidence.means(KEY), may | (np.arange(N_ACTIONS) == pair(4)), expected - 0.2, NO_MODEL, 1
    ).tolist() == [-1]
    nobody = np.zeros(0, np.int64)
    assert promising(_drawn().means(nobody), ALL[:0], expected[:0], NO_MODEL[:0], 1).tolist() == []


NOTHING = np.full((1, N_ACTIONS), np.inf, np.float32)


def test_a_model_that_is_wrong_about_a_pair_as_a_whole_is_right_about_its_channels() -> None:
    """Pair 4 is far faster than was said, with its own channels; with others it is expected to be faster still."""
    evidence, nothing = _drawn(), np.full((1, N_ACTIONS), np.inf, np.float32)
    measured(evidence, 0, pair(4), 1, 2.85)
    modelled, others = np.zeros((1, N_PAIRS, N_CHANNELS, N_CHUNKS)), flat_action(4, np.arange(1, 6), 0)
    modelled[:, 2], modelled[:, 3], modelled[:, 4] = 0.3, -0.2, 0.3
    modelled[:, 4, 1:6] = -0.05
    (action,) = promising(evidence.means(KEY), ALL, nothing, modelled.reshape(1, -1), 1)
    assert action_parts(action)[0] == 4
    assert action_parts(action)[1] in range(1, 6)
    # Where that has proved wrong of some of them, it says less of the others.
    for other in others[:4]:
        measured(evidence, 0, int(other), 1, 3.1)
    assert action_parts(promising(evidence.means(KEY), ALL, nothing, modelled.reshape(1, -1), 1))[0] != 4


def test_what_is_overlooked_is_of_a_pair_that_nobody_tried_and_is_expected_to_be_nearly_as_good() -> None:
    evidence, tried = _drawn(), np.zeros((1, N_PAIRS), np.bool_)
    expected = np.full((1, N_ACTIONS), np.inf, np.float32)
    new, other = int(flat_action(7, 4, 0)), int(flat_action(8, 2, 1))
    expected[0, [new, other, int(flat_action(3, 1, 1))]] = -0.17, -0.1, -0.5  # the best is at -0.2
    tried[0, 3] = True
    assert overlooked(evidence.means(KEY), ALL, expected, tried).tolist() == [new]
    assert overlooked(evidence.means(KEY), ALL, expected + 0.05, tried).tolist() == [-1], "it is expected to be behind"
    assert overlooked(evidence.means(KEY), np.zeros_like(ALL), expected, tried).tolist() == [-1]
    tried[0, 7] = True
    assert overlooked(evidence.means(KEY), ALL, expected, tried).tolist() == [-1]


def test_what_is_one_step_from_the_fastest_is_looked_at_whatever_is_expected_of_it() -> None:
    """Where a model is wrong about channels, nothing that it says leads to the right ones."""
    fastest, beside = int(flat_action(3, 4, 2)), {(3, 3, 2), (3, 5, 2), (3, 4, 1), (3, 4, 3)}
    evidence, alike = store(1), {(2, 4, 2), (4, 4, 2)}
    for action, mean in ((OWN_ACTION, 3.0), (fastest, 2.5), (pair(2), 2.55), (pair(4), 2.56)):
        measured(evidence, 0, action, 4, mean, 3 * 0.02**2)
    # What makes one pair fast may do so for others. Of NCCL's own channels and chunk nobody knows what is beside them.
    assert set(_tried(evidence)) == beside | alike
    assert promising(evidence.means(KEY), ~ALL, NOTHING, NO_MODEL, 1).tolist() == [-1]


def _tried(evidence: Evidence, takes: float = 2.6) -> list[tuple[int, ...]]:
    """What is promising where no model speaks, until nothing is: all of it takes as long."""
    tried = []
    while (action := int(promising(evidence.means(KEY), ALL, NOTHING, NO_MODEL, 1)[0])) >= 0:
        tried.append(tuple(int(part) for part in action_parts(action)))
        measured(evidence, 0, action, 1, takes)
    return tried


def test_where_no_model_speaks_the_fastest_pair_is_tried_with_other_channels_than_nccls_own() -> None:
    """NCCL's own are often too many, and from these no step leads to others."""
    for takes, least, most in ((2.6, 8, 8), (2.9, 2, 8), (3.6, 1, 3)):
        evidence = store(1)
        for action, mean in ((OWN_ACTION, 3.0), (pair(3), 2.55), (pair(2), 2.8)):
            measured(evidence, 0, action, 4, mean, 3 * 0.02**2)
        tried = _tried(evidence, takes)
        assert tried[0] == (3, 4, 0)
        assert {(of, chunk) for of, _, chunk in tried} == {(3, 0)}
        assert least <= len(tried) <= most
        assert max(abs(channels - 4) for _, channels, _ in tried) < len(tried), "step by step"
    few = ALL.reshape(1, N_PAIRS, N_CHANNELS, N_CHUNKS).copy()
    few[:, :, 3:] = few[:, :, 1] = False  # of a communicator with two channels
    evidence = store(1)
    for action, mean in ((OWN_ACTION, 3.0), (pair(3), 2.55), (pair(2), 2.8)):
        measured(evidence, 0, action, 4, mean, 3 * 0.02**2)
    only = promising(evidence.means(KEY), few.reshape(1, -1), NOTHING, NO_MODEL, 1)
    assert only.tolist() == [flat_action(3, 2, 0)]
    flat = np.zeros((1, N_PAIRS, N_CHANNELS, N_CHUNKS))
    flat[0, :, 1:] = 1.0  # a model that knows better
    assert promising(evidence.means(KEY), ALL, NOTHING, flat.reshape(1, -1), 1).tolist() == [-1]


@pytest.mark.parametrize(("channels", "modelled", "tried"), [(0, 0.3, True), (2, 0.3, False)])
def test_the_fastest_with_nccls_own_channels_is_tried_with_those_of_another_although_a_model_puts_them_behind(
    channels: int, modelled: float, tried: bool
) -> None:
    """What has others steps from these."""
    evidence, may, of_model = store(1), np.zeros_like(ALL), np.zeros((1, N_PAIRS, N_CHANNELS, N_CHUNKS))
    fastest, crossed, with_others = (int(flat_action(*of)) for of in ((3, channels, 2), (3, 5, 2), (4, 5, 2)))
    of_model[0, 3, 3:] = modelled
    for action, mean in ((OWN_ACTION, 3.0), (fastest, 2.5), (with_others, 2.6), (int(flat_action(5, 6, 1)), 2.8)):
        measured(evidence, 0, action, 4, mean, 3 * 0.02**2)
        may[0, [action, crossed]] = True
    action = promising(evidence.means(KEY), may, NOTHING, of_model.reshape(1, -1), 1)
    assert action.tolist() == [crossed if tried else -1]


def test_fast_pairs_are_tried_with_what_made_another_fast_although_a_model_puts_them_behind() -> None:
    """Few channels may be right for all pairs on a network that has changed, and nobody drew one of them with few."""
    evidence, of_model = store(1), np.zeros((1, N_PAIRS, N_CHANNELS, N_CHUNKS))
    of_model[0, 1:, 1:4] = 0.3
    fastest, lucky, others = int(flat_action(2, 3, 1)), int(flat_action(1, 3, 1)), [(1, 5, 0), (4, 0, 0)]
    for action, mean in ((OWN_ACTION, 3.0), (fastest, 2.8), *((int(flat_action(*of)), 3.02) for of in others)):
        measured(evidence, 0, action, 4, mean, 3 * 0.05**2)
    may = np.zeros_like(ALL)
    may[0, [lucky, int(flat_action(4, 3, 0)), int(flat_action(7, 3, 1))]] = True
    may[0, evidence.means(KEY).action] = True
    assert promising(evidence.means(KEY), may, NOTHING, of_model.reshape(1, -1), 1).tolist() == [lucky]


def test_what_much_is_expected_of_does_not_crowd_out_what_is_one_step_from_the_fastest() -> None:
    evidence, expected = store(1), np.full((1, N_ACTIONS), -0.5, np.float32)
    fastest = int(flat_action(3, 4, 2))
    beside = [int(flat_action(3, *parts)) for parts in ((3, 2), (5, 2), (4, 1), (4, 3))]
    for action, mean in ((OWN_ACTION, 3.0), (fastest, 2.5), (pair(2), 2.6), (pair(4), 2.7)):
        measured(evidence, 0, action, 4, mean, 3 * 0.02**2)
    expected[0, beside] = 9.0
    for _ in range(12):
        measured(evidence, 0, int(promising(evidence.means(KEY), ALL, expected, NO_MODEL, 1)[0]), 1, 2.6)
    assert (evidence.samples[0, beside] == 1).all()


def test_a_pair_that_was_measured_with_other_chunks_only_is_measured_with_nccls_own() -> None:
    """One chunk says little of another: at its own a pair may be the best."""
    evidence = store(1)
    for action, mean in (
        (OWN_ACTION, 3.0),
        (int(flat_action(2, 0, 3)), 2.9),  # with NCCL's own chunk, too
        (pair(2), 2.8),
        (int(flat_action(3, 4, 1)), 3.2),
        (int(flat_action(3, 0, 2)), 3.4),
        (int(flat_action(4, 0, 2)), 3.25),
        (int(flat_action(5, 0, 2)), 3.35),  # too far behind for a chunk to be the reason
    ):
        measured(evidence, 0, action, 1, mean)
    tried = []
    while (action := int(rechunked(evidence.means(KEY), ALL, 0, 0.5)[0])) >= 0:
        tried.append(action)
        measured(evidence, 0, action, 1, 3.4)
    assert tried == [int(flat_action(3, 4, 0)), pair(4)], "the fastest first"
    assert rechunked(evidence.means(KEY), ~ALL, 0, 0.5)[0] == -1


def test_a_pair_that_was_measured_with_nccls_own_chunk_only_is_measured_with_a_small_one() -> None:
    """Where that is too large for the message, nothing is pipelined, and the pair takes several times as long."""
    evidence = store(1)
    for action, mean in (
        (int(flat_action(2, 0, 3)), 2.9),  # with another chunk, too
        (pair(2), 3.8),
        (pair(3), 4.2),
        (int(flat_action(3, 4, 0)), 4.1),
        (pair(4), 4.0),
        (pair(5), 4.5),  # too far behind for a chunk to be the reason
    ):
        measured(evidence, 0, action, 1, mean)
    tried = []
    while (action := int(rechunked(evidence.means(KEY), ALL, 2, 1.5)[0])) >= 0:
        tried.append(action)
        measured(evidence, 0, action, 1, 4.4)
    assert tried == [int(flat_action(4, 0, 2)), int(flat_action(3, 4, 2))], "the fastest first"
    assert rechunked(evidence.means(KEY), ~ALL, 2, 1.5)[0] == -1
