"""False alarms as rare as asked for, shifts found fast: both by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from dynamiccl_ray.trigger import Cusum, threshold


def _run_length(arl0: float, rng: np.random.Generator) -> int:
    detector = Cusum(arl0)
    detector.grow(1)
    seen = 0
    while True:
        at = detector.update(0, rng.normal(5.0, 0.05, 256))
        if at is not None:
            return seen + at + 1
        seen += 256


def test_false_alarms_come_as_rarely_as_asked() -> None:
    rng = np.random.default_rng(1)
    lengths = [_run_length(800, rng) for _ in range(300)]
    # The run length is nearly geometric: its mean over 300 runs is within 6 % of the true one, one deviation.
    assert 0.75 * 800 < np.mean(lengths) < 1.35 * 800


@pytest.mark.parametrize("shift", [-0.2, -0.1, 0.1, 0.2])
def test_a_shift_is_found_within_fifty_samples_at_one_false_alarm_in_a_hundred_thousand(shift: float) -> None:
    rng = np.random.default_rng(2)
    delays = []
    for _ in range(200):
        detector = Cusum(100_000)
        detector.grow(1)
        assert detector.update(0, rng.normal(5.0, 0.03, 60)) is None
        at = detector.update(0, rng.normal(5.0 + shift, 0.03, 400))
        assert at is not None
        delays.append(at + 1)
    assert np.percentile(delays, 95) <= 50


def test_one_outlier_is_no_alarm() -> None:
    rng = np.random.default_rng(3)
    detector = Cusum(100_000)
    detector.grow(1)
    samples = rng.normal(5.0, 0.03, 300)
    samples[150] += 3.0
    assert detector.update(0, samples) is None


def test_threshold_grows_with_the_run_length() -> None:
    assert threshold(100) < threshold(10_000) < threshold(1e8)
    with pytest.raises(ValueError, match="arl0 is 1"):
        threshold(1)


def test_keys_do_not_mix_and_reset_forgets() -> None:
    rng = np.random.default_rng(4)
    detector = Cusum(1000)
    detector.grow(2)
    detector.update(0, rng.normal(5, 0.03, 50))
    assert detector.update(1, rng.normal(9, 0.03, 50)) is None
    assert detector.update(0, rng.normal(6, 0.03, 50)) is not None
    detector.reset()
    assert detector.update(0, rng.normal(6, 0.03, 50)) is None
    assert (detector.score < 1).all()


def test_state_survives_a_checkpoint() -> None:
    rng = np.random.default_rng(5)
    one, two = Cusum(1000), Cusum(1000)
    one.grow(1)
    one.update(0, rng.normal(5, 0.03, 40))
    two.restore(one.state())
    x = rng.normal(5.2, 0.03, 40)
    assert one.update(0, x) == two.update(0, x)
