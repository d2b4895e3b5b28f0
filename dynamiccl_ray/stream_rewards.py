"""The model's side of the reward: the inputs of many streams at once. Beside a job it is ``actors/rewards.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.actions import N_ACTIONS, N_CHANNELS, N_CHUNKS, OWN_ACTION
from dynamiccl_ray.knobs import N_PAIRS, OWN_PAIR
from dynamiccl_ray.reward import Floats, Inputs, Reward, terms, tier_penalty
from dynamiccl_ray.scenario import Scenario

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


class StreamRewards:
    """B streams, one for each key of each scenario in turn. Times are logs of microseconds, (B,)."""

    def __init__(self, weights: Reward, scenarios: Sequence[Scenario]) -> None:
        counts = [len(s.nbytes) for s in scenarios]
        n = sum(counts)
        self._weights: Final = weights
        self._rows: Final = np.arange(n)
        self._scenario: Final = np.repeat(np.arange(len(scenarios)), counts)
        self._calls: Final = np.concatenate([s.weight for s in scenarios])
        self._tier: Final = np.concatenate([_tier(s) for s in scenarios])
        self._sm: Final = np.concatenate([_sm(s) for s in scenarios])
        self._tried = np.zeros((n, N_ACTIONS), np.bool_)
        self._last = np.full(n, OWN_ACTION)
        self._fastest: Floats = np.zeros(n, np.float32)

    def begin(self, baseline: Floats) -> None:
        """An episode: all that has been measured is NCCL's own choice, at ``baseline``."""
        self._tried[:] = False
        self._tried[:, OWN_ACTION] = True
        self._last, self._fastest = np.full(len(self._rows), OWN_ACTION), baseline

    def shift(self, rows: Bool, baseline: Floats) -> None:
        """The network of these streams (a mask) has changed, and NCCL's own choice has been measured anew.

        As beside a job, that choice was in force meanwhile, and what has been tried stays tried.
        """
        self._last = np.where(rows, OWN_ACTION, self._last)
        self._fastest = np.where(rows, baseline, self._fastest)

    def terms(self, actions: Int64, measured: Floats, baseline: Floats) -> dict[str, Floats]:
        """Name -> (B,) of an epoch under flat actions (B,). The model has no loss and no faults."""
        # What a job waits for, if nothing overlaps: the times of its scenario's keys, as often as they are called.
        spent, usual = (np.bincount(self._scenario, self._calls * np.exp(x)) for x in (measured, baseline))
        self._fastest = np.minimum(self._fastest, measured)
        inputs = Inputs(
            log_speedup=baseline - measured,
            switched=actions != self._last,
            probed=~self._tried[self._rows, actions],
            congestion=measured - self._fastest,
            tier=self._tier[self._rows, actions // (N_CHANNELS * N_CHUNKS)],
            sm_share=self._sm[self._rows, actions // N_CHUNKS],
            iteration=(spent / usual - 1)[self._scenario],
        )
        self._tried[self._rows, actions] = True
        self._last = actions
        return terms(self._weights, inputs)


def _tier(scenario: Scenario) -> Floats:
    """(K, N_PAIRS) tier penalty; NCCL's own pair counts as the one that it chooses."""
    pairs = np.tile(np.arange(N_PAIRS), (len(scenario.nbytes), 1))
    pairs[:, OWN_PAIR] = scenario.own_pair
    return tier_penalty(pairs, scenario.tier, scenario.nodes).astype(np.float32)


def _sm(scenario: Scenario) -> Floats:
    """(K, N_PAIRS * N_CHANNELS) share of the SMs; NaN where it is not known."""
    if scenario.sm_share is None:
        return np.full((len(scenario.nbytes), N_PAIRS * N_CHANNELS), np.nan, np.float32)
    return scenario.sm_share.reshape(len(scenario.nbytes), -1)
