"""A contextual bandit: Thompson sampling on log times that knows how actions and sizes are alike."""

from __future__ import annotations

from typing import Final

import numpy as np

from dynamiccl_ray.actions import N_CHANNELS, OWN_ACTION, action_parts
from dynamiccl_ray.baselines.method import Bool, Float64, Int64, Method
from dynamiccl_ray.knobs import N_PAIRS
from dynamiccl_ray.simulation.scenario import Scenario


class Bandit(Method):
    """Thompson sampling (Thompson 1933; Russo et al. 2018, "A tutorial on Thompson sampling") with Gaussian posteriors.

    What is modelled is the log of an action's time over that of NCCL's own choice, at three levels: a pair, its channel
    counts, their chunks. Each level's prior is the level above, so that what is known of a pair says something about a
    configuration of it that was never tried; above the pairs stands NCCL's own cost model. Keys of one collective lend
    each other their measurements, the less the further their sizes are apart. A sample is drawn from the top down.

    A two-sided CUSUM (Page 1954) on the residuals finds shifts, as in change-detection bandits (Liu, Lee, Shroff 2018).
    After one, NCCL's own choice is measured anew, and what was known of others beside it counts for little. The
    constants are the best of some tried on five presets and eight sampled scenarios.
    """

    BASELINE: Final = 5
    """Collectives of NCCL's own choice, whose median it is, at the start and after each shift."""
    PAIR_SIGMA: Final = 0.4
    """Prior standard deviation of log times: of a pair about NCCL's cost model,"""
    CHANNELS_SIGMA: Final = 0.08
    """of its channel counts about it,"""
    CHUNK_SIGMA: Final = 0.02
    """and of their chunks."""
    OWN_BETTER: Final = 0.05
    """How much slower other channel counts, and other chunks, are expected to be than NCCL's own."""
    LENT: Final = 0.3
    """What a measurement counts for a key of nearly the same size, and over how many octaves that falls by 1/e."""
    OCTAVES: Final = 2.0
    LEAST_SIGMA: Final = 0.005
    """Of the noise, which is estimated."""
    STALE_SIGMA: Final = 0.15
    """Of what an action was known to take, after a shift."""
    KNOWN: Final = 8
    """Measurements of an action before the CUSUM compares others with it."""
    ALLOWANCE: Final = 1.0
    THRESHOLD: Final = 8.0
    """Of the CUSUM, in standard deviations of the noise."""
    WINSOR: Final = 4.0
    """Residuals beyond this count as this: one outlier is no shift."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        super().__init__(scenario, rng)
        self._rng: Final = rng
        k = self.n_keys
        # Only what is valid for some key takes part.
        self._flat: Final = np.flatnonzero(self.valid.any(0))
        self._column: Final = np.searchsorted(self._flat, np.arange(self.valid.shape[1]))
        self._masked: Final = np.where(self.valid[:, self._flat], 0.0, np.inf)
        pair, channels, chunk = action_parts(self._flat)
        groups, group = np.unique(pair * N_CHANNELS + channels, return_inverse=True)
        self._group: Final = np.asarray(group, np.int64)
        self._pair: Final = groups // N_CHANNELS
        # (columns, groups) and (groups, pairs): which belongs to which, so that sums are matrix products.
        self._in_group: Final = np.eye(len(groups))[self._group]
        self._in_pair: Final = np.eye(N_PAIRS)[self._pair]
        # What is known before anything is measured: NCCL's cost of a pair, and that its own counts are no bad ones.
        self._group_prior: Final = np.where(groups % N_CHANNELS > 0, self.OWN_BETTER, 0.0)
        self._chunk_prior: Final = np.where(chunk > 0, self.OWN_BETTER, 0.0)
        self._prior: Final = scenario.cost.astype(np.float64)
        octaves = np.log2(scenario.nbytes)
        near = np.exp(-np.abs(octaves[:, None] - octaves) / self.OCTAVES)
        alike = scenario.collective[:, None] == scenario.collective
        self._lend: Final = np.where(np.eye(k, dtype=np.bool_), 1.0, self.LENT * near * alike)
        # Counts and sums of log time ratios, by action.
        self._n: Final = np.zeros((k, len(self._flat)))
        self._y: Final = np.zeros((k, len(self._flat)))
        self._log_baseline = np.zeros(k)
        self._own: list[Float64] = []
        # Of residuals: count and sum of squares; scores of the CUSUM, for slower and for faster.
        self._squares: Final = np.zeros(2)
        self._scores: Final = np.zeros((2, k))

    def choose(self, step: int) -> Int64:
        if len(self._own) < self.BASELINE:
            return np.full(self.n_keys, OWN_ACTION)
        return np.asarray(self._flat[(self._sample() + self._masked).argmin(-1)])

    def observe(self, actions: Int64, time_us: Float64) -> None:
        log_us = np.log(time_us)
        column = self._column[actions]
        if len(self._own) < self.BASELINE:
            self._own.append(log_us)
            self._log_baseline = np.median(self._own, 0)
            self._n[self.rows, column] = len(self._own)
            return
        y = log_us - self._log_baseline
        outlier = self._watch(column, y)
        self._n[self.rows, column] += ~outlier
        self._y[self.rows, column] += np.where(outlier, 0.0, y)

    def _watch(self, column: Int64, y: Float64) -> Bool:
        """Compares log time ratios (K,) of the actions in ``column`` with what was known of them; (K,) outliers."""
        n = self._n[self.rows, column]
        known = n >= self.KNOWN
        residual = np.where(known, y - self._y[self.rows, column] / np.maximum(n, 1), 0.0)
        z = np.clip(residual / (self._noise * np.sqrt(1 + 1 / np.maximum(n, 1))), -self.WINSOR, self.WINSOR)
        self._squares[:] += known.sum(), ((z * self._noise) ** 2).sum()
        moved = self._scores + np.stack([z, -z]) - self.ALLOWANCE
        self._scores[:] = np.where(known, np.maximum(0, moved), self._scores)
        if (self._scores > self.THRESHOLD).any():
            self._shift()
        return np.asarray(np.abs(z) == self.WINSOR)

    def _shift(self) -> None:
        """The network has changed, and with it every key: some have not been seen to yet."""
        kept = (self._noise / self.STALE_SIGMA) ** 2
        scale = kept / np.maximum(self._n, kept)
        self._n[:] *= scale
        self._y[:] *= scale
        # NCCL's own choice is what others are compared with: nothing about it is old.
        own = self._column[OWN_ACTION]
        self._n[:, own] = self._y[:, own] = 0
        self._scores[:] = 0
        self._own.clear()

    @property
    def _noise(self) -> float:
        count, squares = self._squares
        return max(self.LEAST_SIGMA, float(np.sqrt(squares / max(count, 1.0))))

    def _sample(self) -> Float64:
        """(K, columns) one draw of every action's log time ratio."""
        n, y = self._lend @ self._n, self._lend @ self._y
        group_n, group_y = n @ self._in_group, y @ self._in_group
        pair_n, pair_y = group_n @ self._in_pair, group_y @ self._in_pair
        inner = self.CHANNELS_SIGMA**2 + self.CHUNK_SIGMA**2
        pair = self._draw(self._prior, self.PAIR_SIGMA, pair_n, pair_y, inner)
        group = self._draw(
            pair[:, self._pair] + self._group_prior, self.CHANNELS_SIGMA, group_n, group_y, self.CHUNK_SIGMA**2
        )
        return self._draw(group[:, self._group] + self._chunk_prior, self.CHUNK_SIGMA, n, y, self._noise**2)

    def _draw(self, prior: Float64, sigma: float, n: Float64, y: Float64, variance: float) -> Float64:
        """From the posterior of means with prior N(prior, sigma^2), given n samples of sum y and this variance."""
        precision = 1 / sigma**2 + n / variance
        mean = (prior / sigma**2 + y / variance) / precision
        return np.asarray(mean + self._rng.standard_normal(n.shape) / np.sqrt(precision))
