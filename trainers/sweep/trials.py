"""One trial of a sweep, as Ray Tune runs it: the target with some values, over all seeds."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ray.tune import Trainable
from ray.tune.result import DONE

from dynamiccl_ray.config.curriculum import Curriculum
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.config.sweep import Values
from dynamiccl_ray.config.sweep_target import Target
from dynamiccl_ray.trainers.model.curriculum import CurriculumTrainable
from dynamiccl_ray.trainers.online.run import run_online
from dynamiccl_ray.trainers.sweep.scores import held_out_scenarios, mean_of, score_policy, score_run

SCORE: Final = "score.json"
SEEDS: Final = "by_seed"
"""Of a result: the scores of each seed."""
WHOLE: Final = "whole"
"""Of a result: whether the trial came to its end. Tune says that of one that a scheduler has stopped, too."""
NUMBER: Final = "number"
"""Of a trial that a searcher has suggested, in its config."""
_STATE: Final = "sweep.json"


class _Trial(Trainable):  # type: ignore[misc]
    """Config: ``values`` of the keys of the space; ``trial``: ``target`` (its path), ``kind``, ``fixed``, ``seeds``,
    and ``out``, the directory of the sweep. A result has the mean over seeds of every score."""

    def setup(self, config: dict[str, Any]) -> None:
        given = config["trial"]
        self.values: Values = config["values"]
        self.seeds: list[int] = given["seeds"]
        self.out = Path(given["out"])
        self.target = Target(Path(given["target"]), given["kind"], tuple(given["fixed"]))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next trial in the same process."""
        self.cleanup()
        self.setup(new_config)
        return True

    def result(self, scores: list[dict[str, Any]], *, done: bool) -> dict[str, Any]:
        return {**mean_of(scores), SEEDS: scores, WHOLE: done, DONE: done}


class OnlineTrial(_Trial):
    """A step is a run with one seed, in this process; what was run before is read instead."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self._scores: list[dict[str, Any]] = []

    def step(self) -> dict[str, Any]:
        self._scores.append(self._score(self.seeds[len(self._scores)]))
        return self.result(self._scores, done=len(self._scores) == len(self.seeds))

    def _score(self, seed: int) -> dict[str, Any]:
        name = digest(self.values)
        directory = self.out / "trials" / f"{name}-seed-{seed}"
        path = directory / SCORE
        if path.exists():
            known: dict[str, Any] = json.loads(path.read_text())
            return known
        # Of a run that was killed.
        shutil.rmtree(directory, ignore_errors=True)
        settings = self.target.load(self.values, f"seed={seed}", f"job=sweep-{digest([str(self.out), name])}-{seed}")
        assert isinstance(settings, Online)
        score = score_run(run_online(settings, directory, serial=True), directory)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(score, allow_nan=False))
        unfinished.replace(path)
        return score


class CurriculumTrial(_Trial):
    """A step is one validation of each seed's run, and what the policy is then worth on the held-out clusters."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        base = self.target.load(self.values)
        assert isinstance(base, Curriculum)
        self._curriculum, self._scenarios = base, held_out_scenarios(base)
        self._runs = [
            CurriculumTrainable({"curriculum": base.model_copy(update={"seed": seed}), "out": self.logdir})
            for seed in self.seeds
        ]
        self._scores: list[dict[str, Any]] = [{} for _ in self.seeds]

    def step(self) -> dict[str, Any]:
        for number, run in enumerate(self._runs):
            if not run.done:
                run.step()
                self._scores[number] = score_policy(
                    run.net, self._scenarios, self._curriculum, run.status()["history"][-1]
                )
        return self.result(self._scores, done=all(run.done for run in self._runs))

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        for seed, run in zip(self.seeds, self._runs, strict=True):
            directory = Path(checkpoint_dir) / f"seed-{seed}"
            directory.mkdir()
            run.save_checkpoint(str(directory))
        (Path(checkpoint_dir) / _STATE).write_text(json.dumps(self._scores))

    def load_checkpoint(self, checkpoint: Any) -> None:
        for seed, run in zip(self.seeds, self._runs, strict=True):
            # Population based training goes on from another trial's, with settings of its own.
            run.restore_from(Path(checkpoint) / f"seed-{seed}", same_settings=False)
        self._scores = json.loads((Path(checkpoint) / _STATE).read_text())

    def cleanup(self) -> None:
        for run in self._runs:
            run.stop()


TRIALS: Final[dict[str, type[_Trial]]] = {"experiment": OnlineTrial, "curriculum": CurriculumTrial}
"""By the kind of target."""


def number_of(trial_id: str, config: Mapping[str, Any]) -> int:
    """Of a trial, from 0, in the order in which they were made; Tune's own order changes where a sweep goes on."""
    # What a searcher suggests has an id without a number in it.
    return int(config[NUMBER]) if NUMBER in config else int(trial_id.rpartition("_")[2])


def digest(what: Any) -> str:
    """A name for JSON, the same in every process."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
