"""False alarms as rare as asked for, shifts found fast: both by simulation."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scipy.signal import lfilter

from dynamiccl_ray.control.trigger import Cusum, threshold


def _detector(arl0: float, keys: int = 1) -> Cusum:
    detector = Cusum(arl0)
    detector.grow(keys)
    return detector


def _fed(detector: Cusum, *samples: np.ndarray) -> list[int]:
    """The samples of key 0, of key 1 and so on: the alarm of each."""
    counts = np.array([len(x) for x in samples])
    return detector.update(np.arange(len(samples)), counts, np.concatenate(samples)).tolist()


def test_false_alarms_come_as_rarely_as_asked() -> None:
    rng, runs, chunk = np.random.default_rng(1), 300, 256
    detector = _detector(800, runs)
    lengths, running = np.zeros(runs), np.arange(runs)
    while len(running):
        samples = rng.normal(5.0, 0.05, chunk * len(running))
        alarm = detector.update(running, np.full(len(running), chunk), samples)
        lengths[running] += np.where(alarm >= 0, alarm + 1, chunk)
        running = running[alarm < 0]
    # The threshold is a bound: alarms may be rarer, but not so rare that shifts would be missed for nothing.
    assert 800 < np.mean(lengths) < 6 * 800


def _series(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """(keys, samples) of log times without any change."""
    normal = rng.standard_normal((shape[0], shape[1] + 100))
    if kind.startswith("AR"):
        phi = float(kind.split()[1])
        return np.asarray(lfilter([0.05 * np.sqrt(1 - phi**2)], [1, -phi], normal, axis=-1)[:, 100:])
    normal = normal[:, 100:]
    if kind == "heavy tails":
        return 0.02 * rng.standard_t(3, shape)
    if kind == "rare and slow":
        return 0.03 * normal + (rng.random(shape) < 0.01) * rng.exponential(0.5, shape)
    assert kind == "two modes"
    return 0.02 * normal + np.log(1.2) * (rng.random(shape) < 0.3)


@pytest.mark.parametrize("kind", ["AR 0", "AR 0.3", "AR 0.5", "AR 0.7", "heavy tails", "rare and slow", "two modes"])
def test_noise_as_it_is_raises_no_more_alarms_than_asked(kind: str) -> None:
    """A million samples, at one in a million."""
    detector = _detector(1e6, 250)
    samples = _series(kind, np.random.default_rng(11), (250, 4000))
    assert sum(alarm >= 0 for alarm in _fed(detector, *samples)) <= 4


@pytest.mark.parametrize(
    ("kind", "shift", "known", "within"),
    [
        ("AR 0", 0.2, 24, 50),
        ("AR 0.5", 0.2, 40, 50),
        ("AR 0.5", 0.2, 150, 50),
        ("AR 0.5", -0.2, 150, 50),
        ("AR 0.5", 0.05, 400, 1000),
        ("AR 0", -0.05, 100, 1000),
    ],
)
def test_shifts_are_found_in_noise_as_it_is(kind: str, shift: float, known: int, within: int) -> None:
    rng, runs = np.random.default_rng(12), 200
    detector = _detector(1e6, runs)
    samples = _series(kind, rng, (runs, known + within))
    samples[:, known:] += np.log1p(shift)
    alarms = np.array(_fed(detector, *samples))
    assert np.mean((alarms >= known) & (alarms < known + within)) >= 0.95


@pytest.mark.parametrize("ramp", [1, 100, 400])
def test_a_small_shift_is_found_however_slowly_it_comes_and_however_little_was_known(ramp: int) -> None:
    rng, runs = np.random.default_rng(13), 200
    detector = _detector(1e6, runs)
    samples = 0.02 * rng.standard_normal((runs, 1020))
    samples[:, 20:] += 0.05 * np.minimum(1, np.arange(1, 1001) / ramp)
    assert np.mean(np.array(_fed(detector, *samples)) >= 20) >= 0.95


def test_what_is_far_off_is_found_in_one_batch_and_a_short_burst_is_not() -> None:
    rng = np.random.default_rng(14)
    detector = _detector(1e6, 100)
    _fed(detector, *(0.03 * rng.standard_normal((100, 80))))
    burst = 0.03 * rng.standard_normal((100, 80))
    burst[:, 40:43] += np.log(1.3)
    assert sum(alarm >= 0 for alarm in _fed(detector, *burst)) <= 2
    far = 0.5 + 0.03 * rng.standard_normal((100, 8))
    assert _fed(detector, *far) == [7] * 100
    assert detector.sudden(np.arange(100)).all()


@pytest.mark.parametrize("shift", [-0.2, -0.1, 0.1, 0.2])
def test_a_shift_is_found_within_fifty_samples_at_one_false_alarm_in_a_hundred_thousand(shift: float) -> None:
    rng, runs = np.random.default_rng(2), 200
    detector = _detector(100_000, runs)
    assert _fed(detector, *rng.normal(5.0, 0.03, (runs, 60))) == [-1] * runs
    delays = np.array(_fed(detector, *rng.normal(5.0 + shift, 0.03, (runs, 400)))) + 1
    assert delays.min() > 0
    assert np.percentile(delays, 95) <= 50


def test_one_outlier_is_no_alarm() -> None:
    detector = _detector(100_000)
    samples = np.random.default_rng(3).normal(5.0, 0.03, 300)
    samples[150] += 3.0
    assert _fed(detector, samples) == [-1]


def test_threshold_grows_with_the_run_length() -> None:
    assert threshold(100) < threshold(10_000) < threshold(1e8)
    with pytest.raises(ValueError, match="arl0 is 2"):
        threshold(2)


def test_reset_forgets_a_key_and_leaves_the_others() -> None:
    rng = np.random.default_rng(4)
    detector, untouched = _detector(100_000, 2), _detector(100_000)
    one, other, moved = rng.normal(5, 0.03, 50), rng.normal(9, 0.03, 50), rng.normal(6, 0.03, 50)
    other[-1] += 0.1
    assert _fed(detector, one, other) == [-1, -1]
    _fed(untouched, other)
    assert _fed(detector, moved)[0] >= 0
    detector.reset(np.array([0]))
    assert detector.score[0] == 0
    assert _fed(detector, moved) == [-1], "it knows no other mean"
    assert detector.score[1] == untouched.score[0] > 0


def test_what_comes_after_an_alarm_is_not_looked_at() -> None:
    rng = np.random.default_rng(5)
    before, after = rng.normal(5, 0.03, 50), rng.normal(6, 0.03, 50)
    (at,) = _fed(_detector(1000), np.concatenate([before, after]))
    assert at >= 50
    long, short = _detector(1000), _detector(1000)
    _fed(long, np.concatenate([before, after]))
    _fed(short, np.concatenate([before, after[: at - 49]]))
    assert long.score == short.score > 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 99))
def test_how_samples_are_cut_into_calls_makes_no_difference(calls: list[list[int]], seed: int) -> None:
    """Nor do other keys that are fed beside."""
    keys = max(len(counts) for counts in calls)
    rng = np.random.default_rng(seed)
    together, alone = _detector(1e6, keys), [_detector(1e6) for _ in range(keys)]
    for counts in calls:
        samples = [rng.normal(key, 0.1, n) for key, n in enumerate(counts)]
        assert _fed(together, *samples) == [-1] * len(counts)
        for detector, mine in zip(alone, samples, strict=False):
            for x in mine:
                _fed(detector, np.array([x]))
    assert together.score.tolist() == [detector.score[0] for detector in alone]


def test_keys_that_are_kept_move_together_with_all_that_was_seen_of_them() -> None:
    rng = np.random.default_rng(6)
    detector = _detector(1000, 3)
    _fed(detector, *rng.normal(5, 0.03, (3, 40)))
    score = detector.score
    detector.keep(np.array([False, True, True]))
    detector.grow(1)
    assert detector.score.tolist() == [score[1], score[2], 0]
    assert _fed(detector, rng.normal(5.2, 0.03, 40))[0] >= 0


def test_state_survives_a_checkpoint() -> None:
    rng = np.random.default_rng(7)
    one, two = _detector(1000), _detector(1000)
    _fed(one, rng.normal(5, 0.03, 40))
    two.restore(one.state())
    x = rng.normal(5.2, 0.03, 40)
    (at,) = _fed(one, x)
    assert [at] == _fed(two, x)
    assert at >= 0
