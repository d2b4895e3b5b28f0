"""The streams of a curriculum's rounds: the same in whichever process, and however many runners share them."""

from __future__ import annotations

from typing import Final

import numpy as np

from dynamiccl_ray.actors.fabric_runner import Share
from dynamiccl_ray.config.curriculum import Curriculum
from dynamiccl_ray.simulation.sampling import Sampling, surprised, told_of
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.splits import stage_scenarios
from dynamiccl_ray.simulation.streams import Simulation

_TRAINING, _VALIDATION, _ROUND, _SURPRISE, _TOLD = 1, 2, 3, 4, 5


class Rounds:
    """Called for the streams of a share; scenarios are sampled where they are first needed, and kept."""

    def __init__(self, curriculum: Curriculum) -> None:
        self._curriculum: Final = curriculum
        self._kept: dict[tuple[int, int], list[Scenario]] = {}

    def __call__(self, share: Share) -> Simulation:
        """Half of a round's scenarios are from its stage, half from all stages so far, so that none is forgotten."""
        streams = self._curriculum.streams
        rng = np.random.default_rng((self._curriculum.seed, _ROUND, share.number))
        stages = [
            share.stage if rng.random() < 0.5 else int(rng.integers(share.stage + 1)) for _ in range(streams.scenarios)
        ]
        pools = {stage: self._scenarios(stage, _TRAINING, streams.pool) for stage in set(stages)}
        drawn = [(stage, pools[stage][int(rng.integers(streams.pool))]) for stage in stages]
        each = streams.scenarios // share.of
        mine = range(share.index * each, (share.index + 1) * each)
        return Simulation(
            [self._surprised(*drawn[i], (share.number, i)) for i in mine],
            control=self._curriculum.control,
            shifted=streams.shifted,
            seed=int(rng.integers(1 << 31, size=share.of)[share.index]),
            reward=self._curriculum.reward,
        )

    def _surprised(self, stage: int, scenario: Scenario, at: tuple[int, int]) -> Scenario:
        """Anew in each place of each round, so that a pool is more than its scenarios."""
        rng = np.random.default_rng((self._curriculum.seed, _SURPRISE, *at))
        return surprised(scenario, rng, self._curriculum.stages[stage].surprise)

    def _told(self, stage: int, scenarios: list[Scenario]) -> list[Scenario]:
        """Some of these jobs do not say which cluster they run on, and some are wrong about it."""
        rng, of = np.random.default_rng((self._curriculum.seed, _TOLD, stage)), self._curriculum.stages[stage]
        out = []
        for scenario in scenarios:
            other, luck = of.places[int(rng.integers(len(of.places)))].cluster, rng.random()
            if luck < of.undescribed:
                out.append(told_of(scenario, None))
            else:
                out.append(told_of(scenario, other) if luck < of.undescribed + of.mistaken else scenario)
        return out

    def validation(self, stage: int) -> list[Scenario]:
        """What a stage's progress is judged by."""
        return self._scenarios(stage, _VALIDATION, self._curriculum.validation.scenarios)

    def _scenarios(self, stage: int, kind: int, count: int) -> list[Scenario]:
        if (stage, kind) not in self._kept:
            seed = (self._curriculum.seed, kind, stage)
            # Shifts that a validation can still adapt to.
            horizon = Sampling.horizon if kind == _TRAINING else max(8, self._curriculum.validation.collectives // 4)
            drawn = stage_scenarios(self._curriculum.stages[stage], self._curriculum, seed, count, horizon)
            self._kept[stage, kind] = self._told(stage, drawn) if kind == _TRAINING else drawn
        return self._kept[stage, kind]
