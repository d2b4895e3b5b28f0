"""The control loop as it runs beside a job, on a scenario, whoever draws in it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import numpy as np

from dynamiccl_ray.arrays import Float64, Int64
from dynamiccl_ray.baselines.method import Method
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.control.loop import Due, Loop, Measured
from dynamiccl_ray.simulation.sampling import recognised_of
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.streams import keys_of


class InLoop(Method):
    """Baseline, evidence, comparing, guardrail and trigger are the loop's; what is to be drawn is the subclass's."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator, control: Control) -> None:
        super().__init__(scenario, rng)
        self.loop: Final = Loop(control)
        self.loop.grow(keys_of(recognised_of(scenario)))
        self._log_us: list[Float64] = []
        self._until = int(self.loop.need.min())
        self.alarms = 0
        """After which a key learned anew."""
        self.checks = 0
        """After which a choice was checked, and stood."""

    @abstractmethod
    def drawn(self, due: Due) -> Int64:
        """Flat actions of the keys that are to be drawn for (``due.draw``)."""

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
        self.loop.decide(due.row, due.actions(self.drawn(due)))
