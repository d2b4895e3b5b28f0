"""One method on one scenario, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.actions import OWN_ACTION, action_of
from dynamiccl_ray.baselines.method import Factory, Float64, Int64
from dynamiccl_ray.fabric.dynamics import Noise, noise
from dynamiccl_ray.keys import bytes_name
from dynamiccl_ray.simulation.scenario import Scenario

_NOISE: Final = 0
_METHOD: Final = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """What one run did. S steps of K keys."""

    scenario: Scenario
    seed: int
    actions: NDArray[np.int16]
    """(S, K) flat."""
    noise: Noise
    """Of (S, K): the same for every method that ran on the scenario with this seed."""
    offline_us: float
    """Spent before the first step."""

    @cached_property
    def phases(self) -> Int64:
        """(S,)"""
        return self.scenario.phase_at(np.arange(len(self.actions)))

    @cached_property
    def clean_us(self) -> Float64:
        """(S, K) times without noise."""
        keys = np.arange(self.actions.shape[1])
        return self.scenario.flat_us[self.phases[:, None], keys, self.actions].astype(np.float64)

    @property
    def time_us(self) -> Float64:
        """(S, K) as observed."""
        return self.clean_us * self._factors(self.actions.astype(np.int64))

    @property
    def default_us(self) -> Float64:
        """(S, K) what NCCL's own choice would have taken under the same noise."""
        own = np.full(self.actions.shape[1], OWN_ACTION)
        return self.scenario.default_us[self.phases].astype(np.float64) * self._factors(own)

    @property
    def oracle_us(self) -> Float64:
        """(S, K) what the best action would have taken under the same noise."""
        return self.scenario.oracle_us[self.phases].astype(np.float64) * self._factors(
            self.scenario.oracle[self.phases]
        )

    @cached_property
    def regret_us(self) -> Float64:
        """(S,) time above the oracle's without noise, each key weighted by its calls."""
        return np.asarray((self.clean_us - self.scenario.oracle_us[self.phases]) @ self.scenario.weight)

    @property
    def cumulative_regret_us(self) -> Float64:
        """(S,) what was spent before the job included."""
        return self.offline_us + np.cumsum(self.regret_us)

    def _factors(self, actions: Int64) -> Float64:
        return self.noise.factors(self.scenario.sigma[np.arange(actions.shape[-1]), actions])


def run(scenario: Scenario, factory: Factory, steps: int, seed: int) -> Trace:
    """Plays ``steps`` collectives of each key. Runs on one scenario with the same seed meet the same noise, whatever
    the method; runs on others meet another.

    Raises ValueError where the method chooses what the mask forbids.
    """
    keys = np.arange(len(scenario.nbytes))
    rng = np.random.default_rng((seed, _NOISE, scenario.stamp))
    drawn = noise(rng, (steps, len(keys)), scenario.tail, scenario.wander)
    method = factory(scenario, np.random.default_rng((seed, _METHOD)))
    actions = np.zeros((steps, len(keys)), np.int16)
    phases = scenario.phase_at(np.arange(steps))
    for step in range(steps):
        chosen = method.choose(step)
        allowed = scenario.valid[keys, chosen]
        if not allowed.all():
            k = int(np.flatnonzero(~allowed)[0])
            raise ValueError(
                f"{type(method).__name__} chose {action_of(int(chosen[k])).name!r} for key {k} "
                f"({bytes_name(int(scenario.nbytes[k]))}), which is masked; choose where scenario.valid is true"
            )
        actions[step] = chosen
        factors = drawn.at(step).factors(scenario.sigma[keys, chosen])
        method.observe(chosen, scenario.flat_us[phases[step], keys, chosen].astype(np.float64) * factors)
    return Trace(scenario=scenario, seed=seed, actions=actions, noise=drawn, offline_us=method.offline_us)
