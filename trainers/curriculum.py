"""Runs a curriculum: PPO on the fabric model, stage after stage, each promoted by what it measurably closed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from tensorboardX import SummaryWriter

from actors.fabric_runner import FabricRunner
from dynamiccl_ray import policy
from dynamiccl_ray.curriculum import Curriculum
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.scenario import Scenario
from dynamiccl_ray.simulation import Simulation
from dynamiccl_ray.splits import stage_scenarios
from trainers.fabric_learning import curriculum_config
from trainers.progress import gap_closed

CHECKPOINT: Final = "checkpoint.pt"
POLICY: Final = "policy.pt"
_TRAINING, _VALIDATION, _ROUND = 1, 2, 3

Progress = Callable[[dict[str, Any]], None]


def run_curriculum(
    curriculum: Curriculum, out: Path, *, resume: Path | None = None, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Trains to the end of the last stage; returns the summary that ``out``/summary.json holds.

    ``out`` gets a checkpoint after every validation, the policy, and TensorBoard events. ``resume`` is the directory of
    an earlier run: it goes on from its checkpoint as if it had never stopped. Raises ConfigError for a checkpoint of
    another curriculum.
    """
    out.mkdir(parents=True, exist_ok=True)
    run = _Run(curriculum, out)
    if resume is not None:
        run.restore(resume / CHECKPOINT)
    started = time.monotonic()
    while not run.done:
        run.round()
        progress(run.status(time.monotonic() - started))
    policy.save(run.net, out / POLICY)
    summary = {**run.status(time.monotonic() - started), "policy": str(out / POLICY)}
    (out / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False))
    return summary


class _Run:
    def __init__(self, curriculum: Curriculum, out: Path) -> None:
        torch.manual_seed(curriculum.seed)
        self._curriculum, self._out = curriculum, out
        self._stage, self._stage_rounds, self._rounds, self._steps = 0, 0, 0, 0
        self._stages: list[dict[str, Any]] = []
        self._history: list[dict[str, Any]] = []
        self._config = curriculum_config(curriculum, self._simulation)
        self._runner = FabricRunner(config=self._config)
        self._learner = self._config.build_learner(spaces=self._runner.get_spaces())
        self._writer = SummaryWriter(str(out / "tensorboard"))
        self._scenarios = lru_cache(maxsize=None)(self._sample)
        self._sync()

    @property
    def net(self) -> policy.PolicyNetwork:
        net: policy.PolicyNetwork = self._runner.module.net
        return net

    @property
    def done(self) -> bool:
        return self._stage >= len(self._curriculum.stages)

    def _sample(self, stage: int, kind: int, count: int) -> list[Scenario]:
        seed = (self._curriculum.seed, kind, stage)
        learning = kind == _TRAINING
        return stage_scenarios(self._curriculum.stages[stage], self._curriculum, seed, count, learning=learning)

    def _simulation(self, index: int, number: int) -> Simulation:
        """A round's streams: half of them from the stage, half from all stages so far, so that none is forgotten."""
        streams = self._curriculum.streams
        rng = np.random.default_rng((self._curriculum.seed, _ROUND, index, number))
        stages = [
            self._stage if rng.random() < 0.5 else int(rng.integers(self._stage + 1)) for _ in range(streams.scenarios)
        ]
        pools = {stage: self._scenarios(stage, _TRAINING, streams.pool) for stage in set(stages)}
        drawn = [pools[stage][int(rng.integers(streams.pool))] for stage in stages]
        return Simulation(
            drawn,
            epochs=streams.epochs,
            collectives=streams.collectives,
            seed=int(rng.integers(1 << 31)),
            reward=self._curriculum.reward,
        )

    def _sync(self) -> None:
        self._runner.set_state(self._learner.get_state(components=COMPONENT_RL_MODULE, inference_only=True))

    def round(self) -> None:
        """Samples, updates, and every so often validates, promotes and saves."""
        began = time.monotonic()
        learning = self._curriculum.learning
        episodes = self._runner.sample()
        self._learner.update(
            episodes=episodes,
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self._rounds},
            num_epochs=learning.epochs,
            minibatch_size=max(1, sum(len(e) for e in episodes) // learning.minibatches),
            shuffle_batch_per_epoch=False,
        )
        self._sync()
        steps = sum(len(e) for e in episodes)
        self._rounds, self._stage_rounds, self._steps = self._rounds + 1, self._stage_rounds + 1, self._steps + steps
        reward = float(np.mean([np.mean(e.rewards) for e in episodes]))
        self._writer.add_scalar("reward", reward, self._steps)
        for name, value in self._runner.reward_terms.items():
            self._writer.add_scalar(f"reward/{name}", value, self._steps)
        self._writer.add_scalar("steps_per_s", steps / (time.monotonic() - began), self._steps)
        if self._rounds % self._curriculum.validation.every_rounds == 0:
            self._validate(reward)

    def _validate(self, reward: float) -> None:
        stage = self._curriculum.stages[self._stage]
        scenarios = self._scenarios(self._stage, _VALIDATION, self._curriculum.validation.scenarios)
        gap = gap_closed(self.net, scenarios, self._curriculum.streams)
        entry = {"round": self._rounds, "stage": stage.name, "steps": self._steps, "reward": reward, **gap.summary()}
        self._history.append(entry)
        for name, value in gap.summary().items():
            self._writer.add_scalar(f"{stage.name}/{name}", value, self._steps)
        promoted = gap.closed >= stage.promote and self._stage_rounds >= stage.least_rounds
        if promoted or self._stage_rounds >= stage.most_rounds:
            self._stages.append(
                {"name": stage.name, "promoted": promoted, "rounds": self._stage_rounds, **gap.summary()}
            )
            self._stage, self._stage_rounds = self._stage + 1, 0
        self._save()

    def status(self, seconds: float) -> dict[str, Any]:
        """Where the run is: JSON."""
        stages = self._curriculum.stages
        return {
            "name": self._curriculum.name,
            "round": self._rounds,
            "stage": stages[self._stage].name if not self.done else "done",
            "steps": self._steps,
            "seconds": seconds,
            "stages": self._stages,
            "history": self._history,
            "reward": {"off": self._curriculum.reward.off, "terms": self._runner.reward_terms},
        }

    def _save(self) -> None:
        state = {
            "curriculum": self._curriculum.model_dump(mode="json"),
            "learner": self._learner.get_state(),
            "runner": self._runner.get_state(),
            "torch": torch.get_rng_state(),
            **{name: getattr(self, f"_{name}") for name in _COUNTERS},
        }
        torch.save(state, self._out / CHECKPOINT)

    def restore(self, path: Path) -> None:
        """Goes on from a checkpoint. Raises ConfigError where it is missing or of another curriculum."""
        if not path.exists():
            raise ConfigError(f"{path} does not exist; --resume takes the directory of a run of `dynamiccl train`")
        state = torch.load(path, weights_only=False)
        if state["curriculum"] != self._curriculum.model_dump(mode="json"):
            raise ConfigError(
                f"{path} is of another curriculum, or of other settings; resume with the one it began with"
            )
        self._learner.set_state(state["learner"])
        self._runner.set_state(state["runner"])
        torch.set_rng_state(state["torch"])
        for name in _COUNTERS:
            setattr(self, f"_{name}", state[name])
        self._sync()


_COUNTERS: Final = ("stage", "stage_rounds", "rounds", "steps", "stages", "history")
