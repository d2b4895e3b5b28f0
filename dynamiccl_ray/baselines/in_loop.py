"""The control loop as it runs beside a job, on a scenario, whoever draws in it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
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
        self.loop = Loop(control)
        """Of this job alone, or of all that it is played together with."""
        self.loop.grow(keys_of(recognised_of(scenario)))
        self.first = 0
        """Row of the job's first key there."""
        self._played = Together([self])
        self.alarms = 0
        """After which a key learned anew."""
        self.checks = 0
        """After which a choice was checked, and stood."""

    @abstractmethod
    def drawn(self, due: Due) -> Int64:
        """Flat actions of the keys that are to be drawn for (``due.draw``), which are all of this job."""

    def choose(self, step: int) -> Int64:
        return self._played.choose(step)

    def observe(self, actions: Int64, time_us: Float64) -> None:
        self._played.observe(actions, time_us)


class Together:
    """Several jobs in one loop, each a communicator of its own: as ``Method``, over the keys of all, one job after the
    other. What is decided is what each would decide alone. What takes time is how often NumPy is called, and less so
    for how many keys.
    """

    def __init__(self, methods: Sequence[InLoop]) -> None:
        """All with the same settings, and new."""
        self._methods: Final = methods
        counts = [method.n_keys for method in methods]
        self._job: Final = np.repeat(np.arange(len(methods)), counts)
        if len(methods) > 1:
            loop = Loop(methods[0].loop.control)
            for number, (method, first) in enumerate(zip(methods, np.cumsum([0, *counts]).tolist(), strict=False)):
                keys = method.loop.keys
                identity = keys.identity + np.uint64(number << 32)
                loop.grow(replace(keys, group=np.full(len(keys), number), identity=identity))
                method.loop, method.first, method._played = loop, first, self
            # Each is all that there is of its job.
            loop.budget.weigh(loop.keys.group, np.ones(len(loop), np.float32))
        self._loop: Final = methods[0].loop
        self._log_us: list[Float64] = []
        self._until = int(self._loop.need.min())

    def choose(self, step: int) -> Int64:
        """(K,) of all keys."""
        return self._loop.wanted

    def observe(self, actions: Int64, time_us: Float64) -> None:
        """Both (K,)."""
        self._log_us.append(np.log(time_us))
        if len(self._log_us) < self._until:
            return
        log_us = np.concatenate(self._log_us)
        row = np.tile(np.arange(len(self._job)), len(self._log_us))
        self._log_us.clear()
        drifts = self._loop.observe(
            Measured(row=row, action=self._loop.wanted[row], log_us=log_us, skew=np.zeros(len(row)))
        )
        for drift in drifts:
            method = self._methods[self._job[drift.row]]
            method.alarms += drift.anew
            method.checks += not drift.anew
        self._decide()
        self._until = int(self._loop.need.min())

    def _decide(self) -> None:
        """For every key that is due."""
        due = self._loop.due()
        job = self._job[due.row]
        # Rows are ascending, and so are jobs.
        drawn = [self._methods[at].drawn(due.part(np.flatnonzero(job == at))) for at in np.unique(job[due.draw])]
        self._loop.decide(due.row, due.actions(np.concatenate([np.zeros(0, np.int64), *drawn])))
