"""What chooses configurations: the interface of every baseline, and of a learned policy beside them.

All keys are decided at once, one collective of each key per step. A method may look at what a job can see of its
scenario: keys, weights, the mask, NCCL's costs. Only the oracle and the offline sweeps look at times that they did not
observe; a sweep is charged for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.actions import N_ACTIONS
from dynamiccl_ray.fabric.dynamics import noise
from dynamiccl_ray.simulation.scenario import Scenario

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

SWEEP_REPEATS: Final = 5
"""Collectives that an offline sweep spends on each candidate and key."""


class Method(ABC):
    """Something that chooses; made anew for each run."""

    offline_us: float = 0.0
    """Machine time of a sweep before the job: all of it is regret, because it moves nobody's data."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """``rng`` is the method's own; the noise of the fabric comes from elsewhere."""
        self.valid: Final = scenario.valid
        self.n_keys: Final = len(scenario.nbytes)
        self.rows: Final = np.arange(self.n_keys)

    @abstractmethod
    def choose(self, step: int) -> Int64:
        """(K,) valid flat actions for the next collective of each key."""

    def observe(self, actions: Int64, time_us: Float64) -> None:  # noqa: B027
        """What they took: both (K,). A method that never learns leaves this."""


Factory = Callable[[Scenario, np.random.Generator], Method]
"""How a run makes its method; a class of this package is one."""


def sweep(scenario: Scenario, rng: np.random.Generator, candidates: Bool) -> tuple[Float64, float]:
    """Time of the candidates (N_ACTIONS,) on the idle fabric: medians (K, N_ACTIONS) in us, and what it took in us.

    Each is tried ``SWEEP_REPEATS`` times under noise; what is masked or no candidate is infinity and costs nothing.
    """
    tried = scenario.valid & candidates
    key, action = np.nonzero(tried)
    drawn = noise(rng, (SWEEP_REPEATS, len(key)), scenario.tail, scenario.wander)
    samples = scenario.flat_us[0, key, action] * drawn.factors(scenario.sigma[key, action])
    found = np.full((len(scenario.nbytes), N_ACTIONS), np.inf)
    found[key, action] = np.median(samples, 0)
    return found, float(samples.sum())
