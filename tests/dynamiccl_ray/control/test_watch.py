"""What is watched of a communicator as a whole: seldom a false alarm, and what no key shows by itself is found."""

from __future__ import annotations

import numpy as np
import pytest
from looped import exploiting, own_channels, pair, play, some_keys
from numpy.typing import NDArray
from scipy.signal import lfilter

from dynamiccl_ray.control.loop import Measured, Phase
from dynamiccl_ray.control.watch import CLASSES, SIZE, USUAL, Autoencoder, Watch

Float64 = NDArray[np.float64]
KEYS = 12
SIZES = 16384 << np.arange(KEYS)
"""Of all classes."""


def _watch(communicators: int, arl0: float = 1e6) -> Watch:
    watch = Watch(arl0)
    group = np.repeat(np.arange(communicators), KEYS)
    watch.know(group, np.tile(SIZES, communicators))
    return watch


def _noise(kind: str, rng: np.random.Generator, keys: int, rounds: int) -> Float64:
    """(keys, rounds) of standard deviation 1: what decisions are off by while nothing changes."""
    x = rng.standard_normal((keys, rounds + 50))
    if kind == "heavy tails":
        return np.asarray(rng.standard_t(3, (keys, rounds)) / np.sqrt(3))
    if kind.startswith("common"):
        x = np.sqrt(0.5) * (x + np.repeat(x[::KEYS], KEYS, 0))
    phi = 0.5 if kind.endswith("correlated") else 0.0
    return np.asarray(lfilter([np.sqrt(1 - phi**2)], [1, -phi], x, axis=-1)[:, 50:])


def _alarms(watch: Watch, off: Float64, skew: Float64) -> NDArray[np.int64]:
    """(communicators,) round of the first alarm of each, -1 for none."""
    first = np.full(len(off) // KEYS, -1)
    for at, (now, apart) in enumerate(zip(off.T, skew.T, strict=True)):
        raised = watch.add(np.arange(len(off)), now, apart)[::KEYS]
        first[raised & (first < 0)] = at
    return first


@pytest.mark.parametrize("kind", ["independent", "correlated", "common", "common, correlated", "heavy tails"])
def test_while_nothing_changes_there_is_hardly_an_alarm(kind: str) -> None:
    rng, communicators, rounds = np.random.default_rng(3), 60, 250
    off = _noise(kind, rng, communicators * KEYS, rounds)
    alarms = _alarms(_watch(communicators), off, 0.05 + 0.02 * _noise("common", rng, communicators * KEYS, rounds))
    # 2,000 collectives of each key, 120,000 of one over all communicators, at one in a million.
    assert np.count_nonzero(alarms >= 0) <= 1


def test_a_change_that_is_small_for_every_key_is_found_in_all_of_them() -> None:
    rng, known = np.random.default_rng(4), 80
    off = _noise("independent", rng, 40 * KEYS, known + 16)
    off[:, known:] += 1.2
    alarms = _alarms(_watch(40), off, np.zeros_like(off))
    assert np.mean(alarms >= known) >= 0.95


@pytest.mark.parametrize("kind", ["independent", "common"])
def test_ranks_that_come_further_apart_are_found_where_no_time_changes(kind: str) -> None:
    rng, known = np.random.default_rng(5), 80
    off = _noise("independent", rng, 40 * KEYS, known + 40)
    skew = 0.05 + 0.02 * _noise(kind, rng, 40 * KEYS, known + 40)
    skew[:, known:] += 0.08
    assert np.mean(_alarms(_watch(40), off, skew) >= known) >= 0.9


def test_what_usually_moves_together_is_the_code_and_what_is_chance_is_none() -> None:
    rng = np.random.default_rng(6)
    alone = [Autoencoder(rng.standard_normal((USUAL, SIZE))).code.shape[1] for _ in range(200)]
    assert np.mean(alone) < 0.6
    frames = rng.standard_normal((USUAL, SIZE))
    frames[:, :CLASSES] += 3 * rng.standard_normal((USUAL, 1))
    autoencoder = Autoencoder(frames)
    assert autoencoder.code.shape[1] == 1
    together = np.zeros((2, SIZE))
    together[0, :CLASSES], together[1, :CLASSES] = 3.0, (3.0, -3.0, 0.0)
    usual, unusual = autoencoder.error(together)
    assert usual < unusual - 1
    # A code goes no further than it usually does.
    assert autoencoder.error(10 * together[:1])[0] > unusual + 1


def test_communicators_come_and_go_and_each_keeps_what_is_its_own() -> None:
    watch, rng = Watch(1e6), np.random.default_rng(7)
    watch.know(np.array([5] * KEYS), SIZES)
    assert watch.scores(9) == {"reconstruction": 0.0, "congestion": 0.0}
    for _ in range(2 * USUAL):
        watch.add(np.arange(KEYS), rng.standard_normal(KEYS), np.zeros(KEYS))
    before = watch.scores(5)
    assert min(before.values()) > 0
    # A communicator with a smaller number comes, its keys are in between, and the first one gets another key.
    group = np.array([2] + [5] * KEYS + [2, 5])
    watch.know(group, 16384 << np.arange(len(group)))
    assert watch.scores(5) == before
    assert watch.scores(2) == {"reconstruction": 0.0, "congestion": 0.0}
    for _ in range(120):
        watch.add(np.flatnonzero(group == 2), rng.standard_normal(2), np.zeros(2))
    assert watch.scores(5) == before
    assert watch.scores(2)["congestion"] > 0
    watch.know(group[group == 5], 16384 << np.arange(KEYS + 1))
    assert watch.scores(5) == before
    watch.forget(np.array([0]))
    assert watch.scores(5) == {"reconstruction": 0.0, "congestion": 0.0}


@pytest.mark.parametrize("left", [slice(None, 8), slice(4, None), slice(None, None, 3)])
def test_keys_that_stop_running_are_no_change(left: slice) -> None:
    """Whichever sizes they are of; and they come back."""
    rng, communicators = np.random.default_rng(9), 40
    watch, raised = _watch(communicators), 0
    every = np.arange(communicators * KEYS)
    some = every.reshape(communicators, KEYS)[:, left].ravel()
    for round_ in range(160):
        rows = some if 60 <= round_ < 110 else every
        # Ranks come further apart for larger messages.
        skew = 0.02 * (rows % KEYS) + 0.01 * rng.standard_normal(len(rows))
        raised += int(watch.add(rows, rng.standard_normal(len(rows)), skew).any())
    assert raised == 0


def test_how_decisions_are_grouped_into_calls_changes_nothing() -> None:
    rng, rounds = np.random.default_rng(10), 200
    off, skew = rng.standard_normal((rounds, KEYS)), 0.05 + 0.02 * rng.standard_normal((rounds, KEYS))
    off[150:] += 2.0
    whole, single, uneven = _watch(1), _watch(1), _watch(1)
    alarms: list[list[int]] = [[], [], []]
    for at, (now, apart) in enumerate(zip(off, skew, strict=True)):
        parts = [[np.arange(KEYS)], np.arange(KEYS)[:, None], np.split(np.arange(KEYS), [1 + at % (KEYS - 1)])]
        for watch, of, raised in zip((whole, single, uneven), parts, alarms, strict=True):
            fed = [bool(watch.add(rows, now[rows], apart[rows]).any()) for rows in of]
            raised += [at] * any(fed)
        assert whole.scores(0) == single.scores(0) == uneven.scores(0)
    assert alarms[0] == alarms[1] == alarms[2]
    assert alarms[0]
    assert alarms[0][0] >= 150


def test_only_keys_that_run_are_checked() -> None:
    watch, rng = _watch(1), np.random.default_rng(11)
    for _ in range(60):
        watch.add(np.arange(KEYS), rng.standard_normal(KEYS), np.zeros(KEYS))
    raised = np.zeros(KEYS, np.bool_)
    for _ in range(20):
        raised |= watch.add(np.arange(10), 4 + rng.standard_normal(10), np.zeros(10))
    assert raised.tolist() == [True] * 10 + [False] * 2


def test_keys_that_exploit_are_checked_where_only_their_ranks_came_apart() -> None:
    loop = exploiting(own_channels(KEYS), compare_samples=8)
    rng, alarms, checked = np.random.default_rng(8), [], 0
    for round_ in range(80):
        row = np.repeat(np.arange(KEYS), loop.need)
        skew = 0.05 + 0.01 * rng.standard_normal(len(row)) + 0.3 * (round_ >= 50)
        log_us = np.where(loop.wanted[row] == pair(1), 2.9, 3.0) + 0.01 * rng.standard_normal(len(row))
        alarms += loop.observe(Measured(row=row, action=loop.wanted[row], log_us=log_us, skew=skew))
        assert round_ >= 50 or (loop.phase == Phase.EXPLOIT).all()
        checked = max(checked, int(np.count_nonzero(loop.phase == Phase.CHECK)))
        due = loop.due()
        loop.decide(due.row, due.actions(np.zeros(due.draw.sum(), np.int64)))
    assert checked == KEYS
    assert [alarm.anew for alarm in alarms] == [False] * KEYS, "nothing is faster than what was chosen"
    assert (loop.wanted == pair(1)).all()


def test_nothing_is_watched_where_nothing_can_be_an_alarm() -> None:
    loop = exploiting(some_keys(KEYS), trigger=1e100)
    play(loop, 40, lambda row, action: 2.9, sigma=0.01)
    assert loop.watch.scores(0) == {"reconstruction": 0.0, "congestion": 0.0}


@pytest.mark.parametrize("after", ["a shift", "a check"])
def test_what_is_usual_is_learned_anew_after(after: str) -> None:
    loop = exploiting(some_keys(KEYS), compare_samples=8)
    play(loop, 60, lambda row, action: 2.9 if action == pair(1) else 3.0, sigma=0.01)
    assert min(loop.watch.scores(0).values()) > 0
    if after == "a shift":
        loop.shift(np.array([0]))
    else:
        loop._check(np.array([0]))
        while loop.phase[0] == Phase.CHECK:
            play(loop, 1, lambda row, action: 2.9 if action == pair(1) else 3.0, sigma=0.01)
    assert loop.watch.scores(0) == {"reconstruction": 0.0, "congestion": 0.0}
