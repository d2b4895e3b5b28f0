"""What says that the network of a key may have changed: its detector, its communicator, a surprise, a neighbour."""

from __future__ import annotations

from typing import Final

import numpy as np

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.arrays import Bool, Float64, Int64
from dynamiccl_ray.control import check
from dynamiccl_ray.control.columns import Closed
from dynamiccl_ray.control.length import SAME, Length
from dynamiccl_ray.control.state import Phase
from dynamiccl_ray.control.trigger import BATCH

TOGETHER: Final = 64
"""Samples of a key within which others say something of the same network."""
# Where NCCL's own choice has become faster by so much, as a log, for a key, those that are near are told, and are
# checked if it would be ahead by so much.
_FASTER: Final = 0.3
_AHEAD: Final = 0.03
# Standard errors by which it has become faster, if a key looks aside.
_SURE: Final = 3.0
# What is measured first while a key compares, and is ahead of all else by so much, as a log, is checked.
_LEAP: Final = 0.3


class Signs(Length):
    """Of K keys."""

    def _off(self, of: Closed, least: float) -> Bool:
        """(R,) whether the action of decisions takes another time now than it has taken, by at least so much."""
        known = self.evidence.samples[of.rows, of.actions]
        error = self.evidence.noise[of.rows] * np.sqrt(1 / np.maximum(known, 1) + 1 / of.samples)
        off = np.abs(of.mean - self.evidence.mean(of.rows, of.actions))
        return np.asarray((known > 0) & (off > np.maximum(SAME * error, least)))

    def _watch(self, of: Closed, counts: Int64, log_us: Float64) -> Int64:
        """(R,) index among a decision's samples, so many ``counts`` (R,) each, of the one that raised an alarm, -1
        without one.

        What is watched is how far each decision is off from what was known of its very action: the recursive residuals
        of Brown, Durbin and Evans (Journal of the Royal Statistical Society B, 1975). Without a change they are
        independent and of one deviation, whichever actions come, and whenever.
        """
        # What the samples of a decision share, because keys do something else than before, is noise, too.
        most = np.where(self._stirred[of.rows] > 0, BATCH, counts)
        place = np.arange(len(log_us)) - np.repeat(np.cumsum(counts) - counts, counts)
        skipped = np.maximum(counts - most, 0)
        log_us, counts = log_us[place >= np.repeat(skipped, counts)], counts - skipped
        known = self.evidence.samples[of.rows, of.actions]
        weight = np.sqrt(known / (known + np.minimum(counts, BATCH)))
        residual = log_us - np.repeat(self.evidence.mean(of.rows, of.actions), counts)
        alarm = self.cusum.update(of.rows, counts, residual * np.repeat(weight, counts))
        raised = alarm >= 0
        heard = self.checks.heard(of.rows, self.measured[of.rows], raised) | (raised & self.cusum.sudden(of.rows))
        return np.where(heard, skipped + np.where(raised, alarm, counts - 1), -1)

    def _watch_together(self, of: Closed) -> Int64:
        """Of decisions that exploit: keys to check because their communicator as a whole is not as it was."""
        if not (self.cusum.watches and len(of.rows)):
            return of.rows[:0]
        known, samples = self.evidence.mean(of.rows, of.actions), self.evidence.samples[of.rows, of.actions]
        error = self.evidence.noise[of.rows] * np.sqrt(1 / samples + 1 / of.samples)
        alarm = self.watch.add(of.rows, (of.mean - known) / error, self.evidence.skew[of.rows])
        settled = self.measured < self.checks.calm_until
        return np.flatnonzero(alarm & (self.phase == Phase.EXPLOIT) & ~settled)

    def _found_ahead(self, of: Closed) -> Bool:
        """(R,) whether what these keys have measured first, while they exploit or compare, is ahead of all that is
        known. On a network that has become faster all is, and NCCL's own choice may look hopeless for that: turns show
        whether it is."""
        phase, drawn = self.phase[of.rows], self.decisions[of.rows] <= self.draws()[of.rows]
        compares = ((phase == Phase.LEARN) | (phase == Phase.ADAPT)) & ~drawn
        ahead = self._best[of.rows] - of.mean
        found = ((phase == Phase.EXPLOIT) & (ahead > 0)) | (compares & (ahead > _LEAP))
        new = self.evidence.samples[of.rows, of.actions] == 0
        return np.asarray(found & new & self.cusum.watches)

    def _own_ahead(self, of: Closed) -> Bool:
        """(R,) whether NCCL's own choice, which keys that exploit something else have measured once, has become faster
        than it was, and is ahead of the best now."""
        known, now = self.evidence.samples[of.rows, OWN_ACTION], self._aside(of.rows)
        error = self.evidence.noise[of.rows] * np.sqrt(1 / np.maximum(known, 1) + 1 / of.samples)
        faster = self.evidence.baseline[of.rows] - of.mean > _SURE * error
        return np.asarray(now & faster & (of.mean < self._best[of.rows]))

    def _tell_near(self, rows: Int64, before: Float64) -> None:
        """Where NCCL's own choice, which keys (R,) have measured, has become far faster than ``before`` (K,), it may
        have for those that are near, exploit something else, and neither know that yet nor were checked for it."""
        faster_by = before[rows] - self.evidence.baseline[rows]
        rows, faster_by = rows[faster_by > _FASTER], faster_by[faster_by > _FASTER]
        self._told_at[rows] = self.measured[rows]
        at, other, _ = self.evidence.near(rows)
        exploits = (self.phase == Phase.EXPLOIT) & (self.wanted != OWN_ACTION) & ~self.hopeless_earlier
        new = (exploits & (self.measured - self._told_at > TOGETHER))[other]
        np.fmin.at(self._own_near, other[new], self.evidence.baseline[other[new]] - faster_by[at[new]])

    def _left_behind(self, of: Closed) -> Bool:
        """(R,) whether NCCL's own choice is ahead of the action in force of these keys, which takes what it took, if it
        has become as much faster as it has for one that is near."""
        behind = of.mean - self._own_near[of.rows] > _AHEAD
        return np.asarray(behind & ~self._off(of, check.STAYED) & self.cusum.watches)
