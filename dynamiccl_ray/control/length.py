"""How many samples a decision of a key takes, and which of them measure NCCL's own choice again."""

from __future__ import annotations

from typing import Final

import numpy as np

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.arrays import Bool, Int64
from dynamiccl_ray.control import check
from dynamiccl_ray.control.exploration import Exploration
from dynamiccl_ray.control.state import Phase

# Decisions in which a network may change, so that NCCL's own choice is measured again.
_AGAIN: Final = 8
# Share of its time that a key which exploits something else measures NCCL's own choice for: once the network may have
# changed, and as long as nothing says so; and by how much, as a log, that is behind at least for it.
_ASIDE: Final = 2e-4
_QUIET: Final = 2e-5
_LEAST_BEHIND: Final = 0.05
SAME: Final = 4.0
"""Standard deviations that this may be off if all that was measured between is of one network."""
SURPRISE: Final = 0.2
"""The least that it is then off by, as a log, of what was measured too seldom for an alarm to come soon."""


class Length(Exploration):
    """Of the decisions of K keys."""

    def _takes(self) -> Int64:
        """(K,) samples of each decision."""
        learning = self.control.learning
        every = np.arange(len(self))
        drawn = (self.decisions <= self.draws()) | self._looks_once(every, self.decisions - 1, self.wanted)
        drawn |= self._aside(every) & self._shows(every, self.wanted)
        looks = (drawn & (self.resting == 0)) | self._first(every, self.wanted)
        takes = np.where(looks, learning.draw_samples, learning.compare_samples)
        takes = np.where(self.phase == Phase.BASELINE, self._baseline_samples(), takes)
        takes[self.phase == Phase.CHECK] = 1
        return takes

    def _first(self, rows: Int64, actions: Int64) -> Bool:
        """(R,) whether nothing was measured of these actions since the last shift: then a draw's samples are enough to
        know whether one is worth more."""
        return np.asarray(self.evidence.samples[rows, actions] == 0)

    def _baseline_samples(self) -> Int64:
        """(K,) of NCCL's own choice, to which all else is relative. One is enough where that was hopeless before, in
        this run or in an earlier one."""
        takes = np.full(len(self), self.control.learning.baseline_samples)
        takes[self.hopeless_earlier] = 1
        rows = np.flatnonzero((self.phase == Phase.BASELINE) & (self.shifts > 0))
        hopeless = self.evidence.ratio(rows).min((1, 2), initial=0.0) < -check.HOPELESS
        takes[rows[hopeless]] = 1
        return takes

    def _looks_back(self, rows: Int64, done: Int64) -> Bool:
        """(R,) whether keys with ``done`` (R,) decisions measure NCCL's own choice again: with the last draw, and with
        the last decision that compares."""
        draws = self.draws()[rows]
        last_draw = (done == draws - 1) & (draws >= _AGAIN) & self.cusum.watches
        return np.asarray(last_draw | self._looks_last(rows, done))

    def _looks_last(self, rows: Int64, done: Int64) -> Bool:
        """(R,) as ``_looks_back``, with the last decision that compares alone."""
        compares = self.control.learning.compares
        last = done == self.draws()[rows] + compares - 1
        return np.asarray(last & (compares >= _AGAIN) & self.cusum.watches)

    def _looks_once(self, rows: Int64, done: Int64, actions: Int64) -> Bool:
        """(R,) of keys that look back with the last decision that compares, whether a draw's samples of what that
        measures are enough: they show a network that has changed by ``SURPRISE``, or by as much as NCCL's own choice
        is behind. A lesser change leaves that no better than what is taken for the best.
        """
        return np.asarray(self._looks_last(rows, done) & self._shows(rows, actions))

    def _shows(self, rows: Int64, actions: Int64) -> Bool:
        """(R,) whether a draw's samples of these actions (R,) show a network that has changed by that much."""
        behind = np.where(actions == OWN_ACTION, self.evidence.baseline[rows] - self._best[rows], 0.0)
        return np.asarray(SAME * self.evidence.noise[rows] <= np.fmax(behind, SURPRISE))

    def _aside(self, rows: Int64) -> Bool:
        """(R,) whether keys that exploit something else measure NCCL's own choice once."""
        exploits = (self.phase[rows] == Phase.EXPLOIT) & (self._found[rows] != OWN_ACTION)
        return np.asarray(exploits & (self.wanted[rows] == OWN_ACTION))

    def _looks_aside(self, rows: Int64) -> Bool:
        """(R,) whether keys that exploit have not measured NCCL's own choice for so long that once more takes no more
        than so much of their time. Nothing else would say that it has become faster, if what they exploit has not."""
        behind = np.expm1(np.fmax(self.evidence.baseline[rows] - self._best[rows], _LEAST_BEHIND))
        most = np.where(self._doubted[rows] > 0, _ASIDE, _QUIET)
        wait = self.measured[rows] - self._own_at[rows] >= self._own_ran[rows] * behind / most
        return np.asarray(wait & self.cusum.watches)
