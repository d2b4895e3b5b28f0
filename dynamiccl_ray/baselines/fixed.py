"""Methods that never learn while the job runs: NCCL itself, what people tune by hand, and the oracle."""

from __future__ import annotations

from typing import Final

import numpy as np

from dynamiccl_ray.actions import N_ACTIONS, OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.baselines.method import Int64, Method, sweep
from dynamiccl_ray.knobs import N_PAIRS
from dynamiccl_ray.simulation.scenario import Scenario

_PAIR, _CHANNELS, _CHUNK = action_parts(np.arange(N_ACTIONS))


class NcclDefault(Method):
    """NCCL's own choice, whatever happens."""

    def choose(self, step: int) -> Int64:
        return np.full(self.n_keys, OWN_ACTION)


class BestStaticPair(Method):
    """One pair for each collective, as NCCL_ALGO and NCCL_PROTO set it for all sizes (NCCL 2.24 and later take one
    per collective): the one with the least weighted time over the job's keys. Pairs that some key does not have are
    out. Found by an offline sweep of all pairs over all keys, with NCCL's own channels and chunk.
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        super().__init__(scenario, rng)
        found, self.offline_us = sweep(scenario, rng, (_CHANNELS == 0) & (_CHUNK == 0))
        by_pair = scenario.weight[:, None] * found[:, flat_action(np.arange(N_PAIRS), 0, 0)]
        same = scenario.collective[:, None] == scenario.collective
        # Infinity times 0 is not a number, so the sum is not a matrix product.
        total = np.where(same[..., None], by_pair, 0.0).sum(1)
        self._actions: Final = flat_action(total.argmin(-1), 0, 0)

    def choose(self, step: int) -> Int64:
        return self._actions


class CsvTable(Method):
    """A table of (collective, size) as NCCL's example tuner reads it from a CSV file (ext-tuner/example in NCCL): pair
    and channels for each key, the fastest of an offline sweep of all of them. The file has no column for the chunk.
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        super().__init__(scenario, rng)
        found, self.offline_us = sweep(scenario, rng, _CHUNK == 0)
        self._actions: Final = np.asarray(found.argmin(-1), np.int64)

    def choose(self, step: int) -> Int64:
        return self._actions


class Oracle(Method):
    """The best valid action of each key in each phase, known without trying."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        super().__init__(scenario, rng)
        self._scenario: Final = scenario

    def choose(self, step: int) -> Int64:
        return np.asarray(self._scenario.oracle[self._scenario.phase_at(step)])
