"""The model's side of the reward: what a scenario says of an action beside its time. Beside a job it is
``actors/rewards.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS
from dynamiccl_ray.agent.reward import Floats, Inputs, Reward, terms, tier_penalty
from dynamiccl_ray.arrays import Float32, Float64, Int64
from dynamiccl_ray.control.loop import Outcome
from dynamiccl_ray.knobs import N_PAIRS, OWN_PAIR
from dynamiccl_ray.simulation.scenario import Scenario


class StreamRewards:
    """B streams, one for each key of each scenario in turn."""

    def __init__(self, weights: Reward, scenarios: Sequence[Scenario]) -> None:
        counts = [len(s.nbytes) for s in scenarios]
        self._weights: Final = weights
        self._rows: Final = np.arange(sum(counts))
        self._scenario: Final = np.repeat(np.arange(len(scenarios)), counts)
        self._calls: Final = np.concatenate([s.weight for s in scenarios])
        self._tier: Final = np.concatenate([_tier(s) for s in scenarios])
        self._sm: Final = np.concatenate([_sm(s) for s in scenarios])

    def terms(self, outcome: Outcome, actions: Int64, baseline: Float64, found: Floats) -> dict[str, Floats]:
        """Name -> (B,) of a decision of every stream: flat actions, the log of what NCCL's own choice takes, and what
        was found, (B,) each; see ``Inputs``. The model has no loss and no faults.
        """
        measured = baseline - outcome.log_speedup
        # What a job waits for, if nothing overlaps: the times of its scenario's keys, as often as they are called.
        spent, usual = (np.bincount(self._scenario, self._calls * np.exp(x)) for x in (measured, baseline))
        inputs = Inputs(
            log_speedup=outcome.log_speedup,
            switched=outcome.switched,
            probed=outcome.probed,
            congestion=outcome.congestion,
            tier=self._tier[self._rows, actions // (N_CHANNELS * N_CHUNKS)],
            found=found,
            sm_share=self._sm[self._rows, actions // N_CHUNKS],
            iteration=(spent / usual - 1)[self._scenario],
        )
        return terms(self._weights, inputs)


def _tier(scenario: Scenario) -> Float32:
    """(K, N_PAIRS) tier penalty; NCCL's own pair counts as the one that it chooses."""
    pairs = np.tile(np.arange(N_PAIRS), (len(scenario.nbytes), 1))
    pairs[:, OWN_PAIR] = scenario.own_pair
    return tier_penalty(pairs, scenario.tier, scenario.nodes).astype(np.float32)


def _sm(scenario: Scenario) -> Float32:
    """(K, N_PAIRS * N_CHANNELS) share of the SMs; NaN where it is not known."""
    if scenario.sm_share is None:
        return np.full((len(scenario.nbytes), N_PAIRS * N_CHANNELS), np.nan, np.float32)
    return scenario.sm_share.reshape(len(scenario.nbytes), -1)
