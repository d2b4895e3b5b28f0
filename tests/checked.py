"""Keys that are checked, for tests of what a check does."""

from __future__ import annotations

import numpy as np
from looped import Times, loop_of, own_channels, pair, play

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.control.loop import Drift, Loop, Phase

FADED = 32
"""What an action's measurements count for where a check has shown that all have moved alike."""


def alarmed(loop: Loop, times: Times, rounds: int = 30) -> None:
    """Row 0 is checked."""
    for _ in range(rounds):
        play(loop, 1, times, sigma=0.01, rows=[0])
        if loop.phase[0] == Phase.CHECK:
            return
    raise AssertionError("no alarm")


def all_turns(loop: Loop, times: Times, sigma: float = 0.01) -> list[Drift]:
    """All turns of row 0."""
    drifts: list[Drift] = []
    while loop.phase[0] == Phase.CHECK:
        assert loop.need[0] in (0, 1)
        drifts += play(loop, 1, times, sigma=sigma, rows=[0])
    return drifts


def far(by: float = 0.0, ahead: float = -0.35) -> Times:
    """Pair 1 is the best, and takes ``by`` longer; pair 2 was so far behind that it did not contend."""
    return lambda row, action: {OWN_ACTION: 3.0 + by, pair(1): 2.9 + by, pair(2): 2.9 + by - ahead}.get(action, 4.5)


def drawn_far() -> Loop:
    loop = loop_of(own_channels(2), draws=8, draw_samples=1)
    for i in range(20):
        drawn = lambda due, of=1 + i % 2: np.full(due.draw.sum(), pair(of))  # noqa: E731
        play(loop, 1, far(), sigma=0.01, seed=i, rows=[0], drawn=drawn)
    assert (loop.phase[0], loop.wanted[0]) == (Phase.EXPLOIT, pair(1))
    return loop
