"""Methods on scenarios, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.actions import OWN_ACTION, action_of
from dynamiccl_ray.baselines.in_loop import InLoop, Together
from dynamiccl_ray.baselines.method import Factory, Float64, Int64, Method
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
    method = factory(scenario, np.random.default_rng((seed, _METHOD)))
    (trace,) = _played([scenario], method, [method], steps, [seed])
    return trace


def run_together(scenarios: Sequence[Scenario], factory: Factory, steps: int, seeds: Sequence[int]) -> list[Trace]:
    """``run`` of each scenario with its seed, in less time where methods share the control loop: see ``Together``."""
    methods = [factory(s, np.random.default_rng((seed, _METHOD))) for s, seed in zip(scenarios, seeds, strict=True)]
    in_loop = [method for method in methods if isinstance(method, InLoop)]
    if len(in_loop) == len(methods):
        return _played(scenarios, Together(in_loop), methods, steps, seeds)
    alone = zip(scenarios, methods, seeds, strict=True)
    return [trace for s, method, seed in alone for trace in _played([s], method, [method], steps, [seed])]


def _played(
    scenarios: Sequence[Scenario],
    player: Method | Together,
    methods: Sequence[Method],
    steps: int,
    seeds: Sequence[int],
) -> list[Trace]:
    """The traces of ``methods``, one for each scenario; ``player`` chooses for the keys of all, in this order."""
    drawn, phases = [], []
    for scenario, seed in zip(scenarios, seeds, strict=True):
        rng = np.random.default_rng((seed, _NOISE, scenario.stamp))
        drawn.append(noise(rng, (steps, len(scenario.nbytes)), scenario.tail, scenario.wander))
        phases.append(scenario.phase_at(np.arange(steps)))
    first = np.cumsum([0, *(len(scenario.nbytes) for scenario in scenarios)])
    actions = np.zeros((steps, first[-1]), np.int16)
    for step in range(steps):
        chosen, time_us = player.choose(step), np.empty(first[-1])
        actions[step] = chosen
        for i, scenario in enumerate(scenarios):
            of = slice(first[i], first[i + 1])
            mine, keys = chosen[of], np.arange(len(scenario.nbytes))
            _allowed(scenario, mine, methods[i])
            us = scenario.flat_us[phases[i][step], keys, mine].astype(np.float64)
            time_us[of] = us * drawn[i].at(step).factors(scenario.sigma[keys, mine])
        player.observe(chosen, time_us)
    return [
        Trace(
            scenario=scenario,
            seed=seeds[i],
            actions=actions[:, first[i] : first[i + 1]],
            noise=drawn[i],
            offline_us=methods[i].offline_us,
        )
        for i, scenario in enumerate(scenarios)
    ]


def _allowed(scenario: Scenario, chosen: Int64, method: Method) -> None:
    allowed = scenario.valid[np.arange(len(chosen)), chosen]
    if not allowed.all():
        k = int(np.flatnonzero(~allowed)[0])
        raise ValueError(
            f"{type(method).__name__} chose {action_of(int(chosen[k])).name!r} for key {k} "
            f"({bytes_name(int(scenario.nbytes[k]))}), which is masked; choose where scenario.valid is true"
        )
