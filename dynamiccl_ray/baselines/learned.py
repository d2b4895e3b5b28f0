"""A trained policy beside the baselines."""

from __future__ import annotations

import functools
from typing import Final

import numpy as np

from dynamiccl_ray.agent import policy
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.baselines.in_loop import InLoop
from dynamiccl_ray.baselines.method import Factory
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.control.drawing import Drawer
from dynamiccl_ray.control.loop import Due
from dynamiccl_ray.cores import one_core
from dynamiccl_ray.simulation.scenario import Scenario


def learned(net: policy.PolicyNetwork, control: Control) -> Factory:
    """How a run makes a ``LearnedPolicy`` that decides by ``net``, which is only read, in a loop with these settings.

    From here on this process computes with one thread (``cores.one_core``).
    """
    one_core()
    return functools.partial(LearnedPolicy, net=net, control=control)


class LearnedPolicy(InLoop):
    """Draws from the network, without updates of the weights."""

    def __init__(
        self, scenario: Scenario, rng: np.random.Generator, net: policy.PolicyNetwork, control: Control
    ) -> None:
        super().__init__(scenario, rng, control)
        self._drawer: Final = Drawer(net, seed=int(rng.integers(1 << 31)), sequence=control.learning.sequence)

    def drawn(self, due: Due) -> Int64:
        return self._drawer.draw(due).actions
