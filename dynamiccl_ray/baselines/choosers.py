"""Rivals of the policy in its own place: all but what is drawn is the control loop's, so the choice is what differs."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiccl_ray.actions import N_ACTIONS, N_CHANNELS, OWN_ACTION, flat_action
from dynamiccl_ray.agent.lending import deviation
from dynamiccl_ray.agent.observation import part
from dynamiccl_ray.arrays import Float64, Int64
from dynamiccl_ray.baselines.in_loop import InLoop
from dynamiccl_ray.baselines.method import sweep
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.control.loop import Due
from dynamiccl_ray.knobs import N_PAIRS
from dynamiccl_ray.simulation.scenario import Scenario

# NCCL's belief, as a log over its cheapest, counts for no more than this: much slower is much slower.
_MOST_BELIEVED = 2.0
# Standard deviations by which two estimates are apart of which the slower is surely not the best.
_APART = 2.0


class Thompson(InLoop):
    """Thompson sampling (Thompson 1933) from what the policy sees: own and lent times, what a described cluster's model
    expects, and NCCL's own costs where there is nothing else. An action is drawn as often as it may be the best.
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator, control: Control | None = None) -> None:
        super().__init__(scenario, rng, control or Control())
        self._rng = rng

    def drawn(self, due: Due) -> Int64:
        seen = due.observation[due.draw]
        sampled = self._sample(*believed(seen), part(seen, "valid_channels"))
        pair, channels = np.divmod(sampled.reshape(len(seen), N_PAIRS * N_CHANNELS).argmin(-1), N_CHANNELS)
        time, sure = np.moveaxis(part(seen, "chunks"), -1, 0)
        chunk = self._sample(time, deviation(sure), part(seen, "valid_chunks"))[np.arange(len(seen)), pair].argmin(-1)
        return flat_action(pair, channels, chunk)

    def _sample(self, mean: Any, error: Any, valid: Any) -> Float64:
        return np.where(valid > 0, mean + error * self._rng.standard_normal(mean.shape), np.inf)


class Elimination(InLoop):
    """Successive elimination (Even-Dar, Mannor and Mansour 2006) from what the policy sees: of what may be the best of
    a key's pairs and channels by all that is known, what was measured least is drawn, at first the most promising.
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator, control: Control | None = None) -> None:
        super().__init__(scenario, rng, control or Control())

    def drawn(self, due: Due) -> Int64:
        seen = due.observation[due.draw]
        time, error = believed(seen)
        valid = part(seen, "valid_channels") > 0
        most = np.where(valid, time + _APART * error, np.inf).min((1, 2), keepdims=True)
        left = valid & (time - _APART * error <= most)
        samples = np.where(left, self.loop.evidence.by_channels[due.row[due.draw]], np.inf)
        left &= samples == samples.min((1, 2), keepdims=True)
        first = np.where(left, time, np.inf).reshape(len(seen), N_PAIRS * N_CHANNELS).argmin(-1)
        pair, channels = np.divmod(first, N_CHANNELS)
        chunk = np.where(part(seen, "valid_chunks") > 0, part(seen, "chunks")[..., 0], np.inf)
        return flat_action(pair, channels, chunk[np.arange(len(seen)), pair].argmin(-1))


class LastTable(InLoop):
    """The table of the session before: draws nothing else, and what the loop makes of it is the loop's. Better than it
    can be: all actions were measured on this very network before its first change, and nobody pays for it. So it is no
    baseline of an evaluation, where a sweep is charged for.
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator, control: Control | None = None) -> None:
        super().__init__(scenario, rng, control or Control())
        found, _ = sweep(scenario, rng, np.ones(N_ACTIONS, np.bool_))
        self._table = np.asarray(found.argmin(-1), np.int64)

    def drawn(self, due: Due) -> Int64:
        rows = due.row[due.draw]
        allowed = self.loop.allowed(rows).reshape(len(rows), N_ACTIONS)
        table = self._table[rows - self.first]
        return np.where(allowed[np.arange(len(rows)), table], table, OWN_ACTION)


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


def believed(seen: Any) -> tuple[Any, Any]:
    """Of observations (R, SIZE): log times over NCCL's own (R, N_PAIRS, N_CHANNELS) and their standard deviations; what
    nobody has measured, and no model speaks of, is as NCCL predicts it."""
    time, sure = np.moveaxis(part(seen, "channels"), -1, 0)
    cost = part(seen, "pairs")[..., 1] * 4  # as ``encode`` scales it
    guess = np.where(sure == 0, np.minimum(cost, _MOST_BELIEVED)[..., None], 0.0)
    return time + guess, deviation(sure)
