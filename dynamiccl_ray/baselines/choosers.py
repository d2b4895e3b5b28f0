"""Rivals of the policy in its own place: all but what is drawn is the control loop's, so the choice is what differs."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiccl_ray.actions import N_CHANNELS, flat_action
from dynamiccl_ray.agent.lending import deviation
from dynamiccl_ray.agent.observation import part
from dynamiccl_ray.arrays import Float64, Int64
from dynamiccl_ray.baselines.in_loop import InLoop
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.control.loop import Due
from dynamiccl_ray.knobs import N_PAIRS
from dynamiccl_ray.simulation.scenario import Scenario

# NCCL's belief, as a log over its cheapest, counts for no more than this: much slower is much slower.
_MOST_BELIEVED = 2.0


class Thompson(InLoop):
    """Thompson sampling (Thompson 1933) from what the policy sees: own and lent times, what a described cluster's model
    expects, and NCCL's own costs where there is nothing else. An action is drawn as often as it may be the best.
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator, control: Control | None = None) -> None:
        super().__init__(scenario, rng, control or Control())
        self._rng = rng

    def drawn(self, due: Due) -> Int64:
        seen = due.observation[due.draw]
        time, sure = np.moveaxis(part(seen, "channels"), -1, 0)
        cost = part(seen, "pairs")[..., 1] * 4  # as ``encode`` scales it
        guess = np.where(sure == 0, np.minimum(cost, _MOST_BELIEVED)[..., None], 0.0)
        sampled = self._sample(time + guess, sure, part(seen, "valid_channels"))
        pair, channels = np.divmod(sampled.reshape(len(seen), N_PAIRS * N_CHANNELS).argmin(-1), N_CHANNELS)
        time, sure = np.moveaxis(part(seen, "chunks"), -1, 0)
        chunk = self._sample(time, sure, part(seen, "valid_chunks"))[np.arange(len(seen)), pair].argmin(-1)
        return flat_action(pair, channels, chunk)

    def _sample(self, mean: Any, sure: Any, valid: Any) -> Float64:
        return np.where(valid > 0, mean + deviation(sure) * self._rng.standard_normal(mean.shape), np.inf)


class Uniform(InLoop):
    """Draws whatever may be chosen, each alike: what the loop is worth alone."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator, control: Control | None = None) -> None:
        super().__init__(scenario, rng, control or Control())
        self._rng = rng

    def drawn(self, due: Due) -> Int64:
        seen = due.observation[due.draw]
        pair = self._any(part(seen, "pairs")[..., 0])
        rows = np.arange(len(seen))
        channels = self._any(part(seen, "valid_channels")[rows, pair])
        return flat_action(pair, channels, self._any(part(seen, "valid_chunks")[rows, pair]))

    def _any(self, valid: Any) -> Int64:
        """Of each row (R, N) one that is valid."""
        return np.asarray(np.where(valid > 0, self._rng.random(valid.shape), -1.0).argmax(-1), np.int64)
