"""What a check says of actions that were measured in a burst, or before one: it is no other network for that."""

from __future__ import annotations

import numpy as np
import pytest
from checked import all_turns, drawn_far
from looped import loop_of, own_channels, pair, play

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.control import check
from dynamiccl_ray.control.loop import Phase


def _differs(
    by: float,
    own: float,
    then: float = 0.4,
    samples: int = 6,
    *,
    known: int = 100,
    deviation: float = 0.005,
    new: bool = False,
) -> bool:
    """What is in force, of which so many are ``known``, takes longer by ``by``; NCCL's own choice was behind it by
    ``then``, in so many ``samples``, and is by ``own``. The key may be ``new``."""
    loop, row = drawn_far(), np.array([0])
    for action, log_us, count in ((OWN_ACTION, 2.9 + then, samples), (pair(1), 2.9, known)):
        loop.evidence.samples[0, action], loop.evidence.total[0, action] = count, count * log_us
    loop._check(row)
    checks = loop.checks
    assert checks.actions[0, :3].tolist() == [pair(1), OWN_ACTION, -1]
    checks.off[0, 0], checks.off[0, 1], checks.turns[0, :2] = 2.9 + by, own, check.TURNS
    return bool(checks.differs(row, loop.evidence, np.array([deviation]), np.array([new]))[0])


@pytest.mark.parametrize("by", [0.26, -0.26])
@pytest.mark.parametrize(("own", "then"), [(0.14, 0.4), (0.4, 0.14)])
def test_what_was_measured_in_a_burst_is_off_by_the_burst(by: float, own: float, then: float) -> None:
    """It takes what it took then, or a check has moved it by the burst once more."""
    assert not _differs(by, own, then)


@pytest.mark.parametrize(
    ("by", "own", "samples", "known"),
    [
        # What is in force has moved by another factor; by more than bursts do; or the other one is known well; or
        # neither is: then the network may have changed while the key learned.
        (0.15, 0.14, 6, 100),
        (0.4, 0.02, 6, 100),
        (0.26, 0.14, 24, 100),
        (0.26, 0.14, 6, 23),
        # It is ahead.
        (0.26, -0.1, 6, 100),
    ],
)
def test_what_has_moved_otherwise_is_of_another_network(by: float, own: float, samples: int, known: int) -> None:
    assert _differs(by, own, own + 0.26 if by < 0.4 else 0.42, samples, known=known)


@pytest.mark.parametrize(("deviation", "differs"), [(0.005, True), (0.03, False)])
def test_it_is_off_by_the_burst_also_where_noise_says_otherwise(deviation: float, differs: bool) -> None:
    assert _differs(0.25, 0.07, 0.4, deviation=deviation) == differs


@pytest.mark.parametrize(
    ("by", "own", "then", "differs"),
    [
        (0.0, 0.14, 0.4, False),
        (0.0, -0.1, 0.2, False),
        (0.26, -0.1, 0.16, False),
        (0.0, 0.04, 0.4, True),
        (0.0, -0.1, 0.3, True),
        (0.4, 0.14, 0.4, True),
    ],
)
def test_of_a_new_key_only_what_no_burst_does_counts(by: float, own: float, then: float, differs: bool) -> None:
    """Some of what it knows may be of a burst, whichever, and whether or not there is one now."""
    assert _differs(by, own, then, known=6, new=True) == differs
    assert _differs(by, own, then, known=6)


@pytest.mark.parametrize("burst", [0.0, 0.26])
@pytest.mark.parametrize(("shifts", "faster", "anew"), [(0, 0.26, False), (0, 0.5, True), (1, 0.26, True)])
def test_a_key_that_learned_on_two_networks_begins_anew_but_for_what_may_be_a_burst_at_first(
    burst: float, shifts: int, faster: float, anew: bool
) -> None:
    """NCCL's own choice was measured on the first, all else on the second. Whether that was a burst, nobody knows."""
    loop, row = loop_of(own_channels(1), compares=8), np.array([0])
    for _ in range(shifts):
        loop.shift(row)
    for _ in range(5):
        before = loop.phase[0] == Phase.BASELINE
        times = lambda _, action, of=before: 3.0 if action == OWN_ACTION and of else 3.02  # noqa: E731
        play(loop, 1, times, drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    learning = Phase.ADAPT if shifts else Phase.LEARN
    assert (loop.phase[0], loop.decisions[0]) == (learning, 5)
    loop._check(row)
    now = lambda _, action: burst + (3.0 if action == OWN_ACTION else 3.02 - faster)  # noqa: E731
    drifts = all_turns(loop, now)
    assert [drift.anew for drift in drifts] == [anew]
    assert loop.shifts[0] == shifts + anew
    if not anew:
        assert loop.phase[0] == learning
        assert loop.evidence.ratio(row)[0, 1, 0] == pytest.approx(0.02 - faster, abs=0.1), "as the check has measured"
