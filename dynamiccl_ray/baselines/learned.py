"""A trained policy beside the baselines: the control loop as it runs beside a job, on a scenario."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from dynamiccl_ray.agent import policy
from dynamiccl_ray.arrays import Float64, Int64
from dynamiccl_ray.baselines.method import Factory, Method
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.control.drawing import Drawer
from dynamiccl_ray.control.loop import Loop, Measured
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.streams import keys_of


def learned(net: policy.PolicyNetwork, control: Control | None = None) -> Factory:
    """How a run makes a ``LearnedPolicy`` that decides by ``net``, which is only read.

    From here on PyTorch computes with one thread in this process: networks this small lose a hundredfold to more where
    cores are shared.
    """
    torch.set_num_threads(1)
    return lambda scenario, rng: LearnedPolicy(scenario, rng, net, control or Control())


class LearnedPolicy(Method):
    """The control loop without updates of the weights."""

    def __init__(
        self, scenario: Scenario, rng: np.random.Generator, net: policy.PolicyNetwork, control: Control
    ) -> None:
        super().__init__(scenario, rng)
        self.loop: Final = Loop(control)
        self.loop.grow(keys_of(scenario))
        self._drawer: Final = Drawer(net, seed=int(rng.integers(1 << 31)), sequence=control.learning.sequence)
        self._log_us: list[Float64] = []
        self._until = int(self.loop.need.min())
        self.alarms = 0
        """After which a key learned anew."""
        self.checks = 0
        """After which a choice was checked, and stood."""

    def choose(self, step: int) -> Int64:
        return self.loop.wanted

    def observe(self, actions: Int64, time_us: Float64) -> None:
        self._log_us.append(np.log(time_us))
        if len(self._log_us) < self._until:
            return
        log_us = np.concatenate(self._log_us)
        repeats = len(self._log_us)
        self._log_us.clear()
        row = np.tile(self.rows, repeats)
        alarms = self.loop.observe(
            Measured(row=row, action=self.loop.wanted[row], log_us=log_us, skew=np.zeros(len(row)))
        )
        self.alarms += sum(alarm.anew for alarm in alarms)
        self.checks += sum(not alarm.anew for alarm in alarms)
        self.decide()
        self._until = int(self.loop.need.min())

    def decide(self) -> None:
        """For every key that is due."""
        due = self.loop.due()
        self.loop.decide(due.row, due.actions(self._drawer.draw(due).actions))
