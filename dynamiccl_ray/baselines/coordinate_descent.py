"""Coordinate descent while the job runs, after AutoCCL (Xu et al., NSDI 2025)."""

from __future__ import annotations

from typing import Final

import numpy as np

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.baselines.method import Float64, Int64, Method
from dynamiccl_ray.knobs import N_PAIRS, OWN_PAIR
from dynamiccl_ray.simulation.scenario import Scenario

# Values along each coordinate of a subspace.
_LENGTH: Final = np.array([N_CHANNELS, N_CHUNKS])


class CoordinateDescent(Method):
    """Splits each key's configurations into subspaces, one for each pair, goes down in each along one coordinate after
    the other, and keeps the best of all.

    As published: algorithm and protocol divide the space; along a coordinate the time is taken to have one valley, so
    a search ends at the first step up; it tunes in the job's own calls and is frozen afterwards, so that it goes
    stale. What differs: transport and threads are no actions here, which leaves channels and chunk as coordinates; a
    search starts from NCCL's own of both and tries values from the largest down; how often a point is measured, and
    what counts as a gain under noise, are chosen here.
    """

    PROBES: Final = 3
    """Collectives spent on each point."""
    MATTERS: Final = 0.01
    """Difference of log times below which two points are alike."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        super().__init__(scenario, rng)
        k = self.n_keys
        self._grid: Final = self.valid.reshape(k, N_PAIRS, N_CHANNELS, N_CHUNKS)
        # Where a key stands in its subspace: the lowest point, and the search along a coordinate through it.
        self._pair: Final = np.full(k, OWN_PAIR)
        self._point: Final = np.zeros((k, 2), np.int64)
        self._point_log: Final = np.full(k, np.inf)
        self._axis: Final = np.zeros(k, np.int64)
        self._at: Final = np.zeros(k, np.int64)
        self._last_log: Final = np.full(k, np.inf)
        self._moved: Final = np.zeros(k, np.bool_)
        # Coordinates along which the lowest point is known to be lowest.
        self._axes_done: Final = np.zeros(k, np.int64)
        self._first: Final = np.ones(k, np.bool_)
        # What is measured now, and the best of all subspaces.
        self._trial: Final = np.full(k, OWN_ACTION)
        self._sum: Final = np.zeros(k)
        self._n: Final = np.zeros(k, np.int64)
        self._best: Final = np.full(k, OWN_ACTION)
        self._best_log: Final = np.full(k, np.inf)
        self._done: Final = np.zeros(k, np.bool_)

    def choose(self, step: int) -> Int64:
        return np.where(self._done, self._best, self._trial)

    def observe(self, actions: Int64, time_us: Float64) -> None:
        self._sum[:] += np.log(time_us)
        self._n[:] += 1
        known = np.flatnonzero((self._n == self.PROBES) & ~self._done)
        if not known.size:
            return
        log_us = self._sum[known] / self.PROBES
        self._sum[known], self._n[known] = 0.0, 0
        best = log_us < self._best_log[known]
        self._best[known[best]], self._best_log[known[best]] = self._trial[known[best]], log_us[best]
        self._conclude(known, log_us)
        self._advance(known)

    def _conclude(self, keys: Int64, log_us: Float64) -> None:
        """The trials of ``keys`` were measured: each is the new lowest point, or not, or ends the search."""
        first = self._first[keys]
        lower = first | (log_us < self._point_log[keys] - self.MATTERS)
        self._point[keys[lower]] = np.stack(action_parts(self._trial[keys[lower]])[1:], -1)
        self._point_log[keys[lower]] = log_us[lower]
        self._moved[keys[lower & ~first]] = True
        self._at[keys[~first & (log_us > self._last_log[keys] + self.MATTERS)]] = 0
        self._last_log[keys] = np.where(first, np.inf, log_us)
        self._first[keys] = False

    def _advance(self, keys: Int64) -> None:
        """The next trial of each key: further down its coordinate, else the other one, else the next subspace."""
        while keys.size:
            self._at[keys] -= 1
            ended = self._at[keys] < 0
            self._turn(keys[ended])
            # A key that has just turned, or entered a subspace, looks for its trial in the next round.
            along = keys[~ended]
            there = self._point[along]
            here = there.copy()
            here[np.arange(len(along)), self._axis[along]] = self._at[along]
            new = self._grid[along, self._pair[along], here[:, 0], here[:, 1]] & (here != there).any(-1)
            self._trial[along[new]] = flat_action(self._pair[along[new]], here[new, 0], here[new, 1])
            waiting = keys[ended]
            keys = np.concatenate([along[~new], waiting[~self._first[waiting] & ~self._done[waiting]]])

    def _turn(self, keys: Int64) -> None:
        """The search along a coordinate is over."""
        self._axes_done[keys] = np.where(self._moved[keys], 1, self._axes_done[keys] + 1)
        self._moved[keys] = False
        self._axis[keys] = 1 - self._axis[keys]
        self._at[keys] = _LENGTH[self._axis[keys]]
        self._last_log[keys] = np.inf
        out = keys[self._axes_done[keys] == len(_LENGTH)]
        later = self._grid[out, :, 0, 0] & (np.arange(N_PAIRS) > self._pair[out, None])
        self._done[out[~later.any(-1)]] = True
        out, later = out[later.any(-1)], later[later.any(-1)]
        self._pair[out] = later.argmax(-1)
        self._trial[out] = flat_action(self._pair[out], 0, 0)
        self._axis[out], self._at[out], self._axes_done[out], self._first[out] = 0, N_CHANNELS, 0, True
