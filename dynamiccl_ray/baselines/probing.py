"""Exhaustive probing while the job runs, after STAR-MPI (Faraj, Yuan, Lowenthal, ICS 2006)."""

from __future__ import annotations

from typing import Final

import numpy as np

from dynamiccl_ray.actions import N_ACTIONS, action_parts
from dynamiccl_ray.baselines.method import Bool, Float64, Int64, Method
from dynamiccl_ray.simulation.scenario import Scenario

_CHUNK: Final = action_parts(np.arange(N_ACTIONS))[2]


class ExhaustiveProbing(Method):
    """Probes every candidate of a key in turn, keeps the fastest, and probes anew when that one has become slower.

    As published: a measuring stage in the program's own calls, so that all exploration is regret; a monitoring stage
    over windows of calls; another measuring stage when performance deteriorates. What differs: the candidates are
    NCCL's pairs and channel counts in place of MPI algorithms, with NCCL's own chunk (with chunks a round would take
    some seven times as long). A window's median is compared with that of the first one after the probing: the fastest
    of few noisy probes looks better than it is, and a mean takes rare outliers for a change. An improvement of the
    network never restarts it.
    """

    PROBES: Final = 3
    """Collectives spent on each candidate."""
    WINDOW: Final = 20
    """Collectives over which the kept one is watched."""
    WORSE: Final = float(np.log(1.1))
    """Change of the log time over a window that starts the probing anew."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        super().__init__(scenario, rng)
        candidates = self.valid & (_CHUNK == 0)
        self._n: Final = candidates.sum(-1)
        # Each key's candidates first.
        self._candidates: Final = np.argsort(~candidates, axis=-1, kind="stable")[:, : self._n.max()]
        self._log_us: Final = np.zeros(self._candidates.shape)
        self._probes: Final = np.zeros(self.n_keys, np.int64)
        self._kept: Final = np.zeros(self.n_keys, np.int64)
        self._watched: Final = np.zeros(self.n_keys, np.int64)
        self._window: Final = np.zeros((self.WINDOW, self.n_keys))
        self._expected: Final = np.full(self.n_keys, np.nan)

    def choose(self, step: int) -> Int64:
        probed = self._probes // self.PROBES
        column = np.where(probed < self._n, np.minimum(probed, self._n - 1), self._kept)
        return np.asarray(self._candidates[self.rows, column])

    def observe(self, actions: Int64, time_us: Float64) -> None:
        log_us = np.log(time_us)
        last = self._n * self.PROBES
        probing = self._probes < last
        column = np.minimum(self._probes // self.PROBES, self._n - 1)
        self._log_us[self.rows, column] += np.where(probing, log_us, 0.0)
        self._probes[probing] += 1
        done = probing & (self._probes == last)
        if done.any():
            tried = np.arange(self._candidates.shape[1]) < self._n[:, None]
            self._kept[done] = np.where(tried, self._log_us, np.inf).argmin(-1)[done]
            self._log_us[done] = 0.0
        self._watch(~probing, log_us)

    def _watch(self, keys: Bool, log_us: Float64) -> None:
        self._window[self._watched[keys], self.rows[keys]] = log_us[keys]
        self._watched[keys] += 1
        full = self._watched == self.WINDOW
        if not full.any():
            return
        usual = np.median(self._window, 0)
        again = full & (usual > self._expected + self.WORSE)
        first = full & np.isnan(self._expected)
        self._expected[first] = usual[first]
        self._watched[full] = 0
        self._probes[again], self._expected[again] = 0, np.nan
