"""A sweep from beginning to end, or from where a killed one was."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ray import tune
from ray.tune.logger import JsonLoggerCallback
from ray.tune.schedulers import AsyncHyperBandScheduler, PopulationBasedTraining, TrialScheduler
from rich.console import Console

from dynamiccl_ray.config.curriculum import Curriculum
from dynamiccl_ray.config.sweep import METRICS, Asha, NoScheduler, Pbt, Space, Sweep, Values
from dynamiccl_ray.config.sweep_target import Target, default_values, reports
from dynamiccl_ray.errors import ConfigError, RunError
from dynamiccl_ray.trainers.common.cluster import start_ray
from dynamiccl_ray.trainers.online.outputs import SWEEP, register
from dynamiccl_ray.trainers.sweep.results import Row, best_of, document, rows_of
from dynamiccl_ray.trainers.sweep.search import optuna_search
from dynamiccl_ray.trainers.sweep.trackers import trackers
from dynamiccl_ray.trainers.sweep.trials import TRIALS
from dynamiccl_ray.trainers.sweep.watch import Watch, callback

ABOUT: Final = "sweep.json"
_TUNE: Final = {
    # Seconds between two times that Tune saves what it knows; with its own choice, 10, a kill loses more.
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
    # ``_run_config`` says which loggers there are, and ``Watch`` shows the trials.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}
"""Tune has no other way to be told."""


def run_sweep(sweep: Sweep, target: Target, out: Path, console: Console) -> dict[str, Any]:
    """Runs what is not yet done of a sweep in ``out`` and returns what came of it (``results.document``), also as
    results.json.

    ``out`` gets sweep.json, tune/ (what Ray Tune keeps) and, of an experiment, trials/ with the directory of each run.
    Raises ConfigError where ``out`` holds another sweep, and RunError where no trial came to its end.
    """
    import ray

    trackers(sweep)
    _claim(sweep, target, out)
    os.environ.update(_TUNE)
    # Trials that fail are in the results, with their reasons.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    started = not ray.is_initialized()
    if started:
        start_ray(math.ceil((sweep.concurrent or 1) * sweep.resources.cpu))
    try:
        register(sweep.name, out, SWEEP)
        _require(sweep)
        watch = Watch(sweep, console)
        default = default_values(sweep, target)
        planned = sweep.planned(default)
        with watch.over(f"{sweep.name}: {len(planned) if sweep.sampler != 'optuna' else 1 + _samples(sweep)} trials"):
            rows = _Search(sweep, target, out, "search", sweep.seeds).fit(planned)
        best = best_of(sweep, target, rows)
        if best is None:
            why = next((row.failure for row in rows if row.failure), "none came to its end")
            raise RunError(f"no trial of {sweep.name} has a result: {why}; the same --out goes on")
        again: list[Row] = []
        if sweep.confirm and best.values != default and _complete(rows):
            with watch.over(f"{sweep.name}: the best and the target as it is, with {sweep.confirm} fresh seeds"):
                once_more = sweep.model_copy(update={"scheduler": NoScheduler(), "sampler": "grid"})
                again = _Search(once_more, target, out, "confirm", sweep.fresh_seeds).fit([default, best.values])
    finally:
        if started:
            ray.shutdown()
    result = document(sweep, target, default, rows, best, again)
    (out / "results.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    return result


def _samples(sweep: Sweep) -> int:
    assert sweep.samples is not None
    return sweep.samples


def _complete(rows: Sequence[Row]) -> bool:
    return all(row.status != "unfinished" for row in rows)


def _claim(sweep: Sweep, target: Target, out: Path) -> None:
    """What another sweep left is not gone on from."""
    about = json.dumps(
        {
            "sweep": sweep.model_dump(mode="json", exclude={"mlflow", "wandb"}),
            "target": target.load({}).model_dump(mode="json"),
        },
        indent=1,
    )
    path = out / ABOUT
    if path.exists() and path.read_text() != about:
        raise ConfigError(
            f"--out {out}: it holds another sweep, or this one with other settings of it or of its target; name another"
        )
    path.write_text(about)


def _require(sweep: Sweep) -> None:
    """Raises RunError where there is no room for a single trial: Tune would wait for ever."""
    import ray

    has = ray.cluster_resources()
    for name, asked in (("CPU", sweep.resources.cpu), ("GPU", sweep.resources.gpu)):
        if asked > has.get(name, 0):
            raise RunError(
                f"resources.{name.lower()} = {asked:g}: the cluster has {has.get(name, 0):g}; ask for less or add nodes"
            )


class _Search:
    """One of Tune's experiments: that of the sweep, or the one that confirms its best."""

    def __init__(self, sweep: Sweep, target: Target, out: Path, name: str, seeds: Sequence[int]) -> None:
        self._sweep, self._target, self._name, self._seeds = sweep, target, name, list(seeds)
        self._mode = METRICS[target.kind][sweep.metric]
        self._out, self._storage = out.resolve(), out.resolve() / "tune"

    def fit(self, planned: list[Values]) -> list[Row]:
        """Runs what is not done yet of these trials, and of what Optuna adds."""
        asked = {"CPU": self._sweep.resources.cpu, "GPU": self._sweep.resources.gpu}
        trainable = tune.with_resources(TRIALS[self._target.kind], asked)
        space = self._space(planned)
        directory = str(self._storage / self._name)
        if tune.Tuner.can_restore(directory):
            tuner = tune.Tuner.restore(directory, trainable=trainable, param_space=space, restart_errored=True)
        else:
            tuner = tune.Tuner(
                trainable, param_space=space, tune_config=self._tune_config(planned), run_config=self._run_config()
            )
        return rows_of(self._sweep, tuner.fit())

    def _space(self, planned: list[Values]) -> dict[str, Any]:
        trial = {
            "target": str(self._target.path),
            "kind": self._target.kind,
            "fixed": list(self._target.fixed),
            "seeds": self._seeds,
            "out": str(self._out),
        }
        values = {} if self._sweep.sampler == "optuna" else {"values": tune.grid_search(planned)}
        return {**values, "trial": trial}

    def _tune_config(self, planned: list[Values]) -> tune.TuneConfig:
        sweep = self._sweep
        optuna = sweep.sampler == "optuna"
        return tune.TuneConfig(
            metric=sweep.metric,
            mode=self._mode,
            search_alg=optuna_search(sweep, planned[0], self._mode) if optuna else None,
            num_samples=1 + _samples(sweep) if optuna else 1,
            scheduler=self._scheduler(),
            # A population takes turns in what room there is; limited so, one trial would end before the next begins.
            max_concurrent_trials=None if isinstance(sweep.scheduler, Pbt) else sweep.concurrent,
            time_budget_s=sweep.stop.seconds,
            trial_dirname_creator=_directory,
            # A new process takes seconds to import what a trial needs.
            reuse_actors=True,
        )

    def _scheduler(self) -> TrialScheduler | None:
        settings = self._sweep.scheduler
        if isinstance(settings, Asha):
            base = self._target.load({})
            assert isinstance(base, Curriculum)
            return AsyncHyperBandScheduler(
                grace_period=settings.grace, reduction_factor=settings.reduction, max_t=reports(base)
            )
        if isinstance(settings, Pbt):
            return PopulationBasedTraining(
                time_attr="training_iteration",
                perturbation_interval=settings.every,
                quantile_fraction=settings.quantile,
                resample_probability=settings.resample,
                hyperparam_mutations={"values": {key: _mutation(of) for key, of in self._sweep.space.items()}},
                custom_explore_fn=_Within(self._sweep.space),
            )
        return None

    def _run_config(self) -> tune.RunConfig:
        # A run of an experiment starts anew; its seeds that are done are read.
        goes_on = self._target.kind == "curriculum"
        return tune.RunConfig(
            name=self._name,
            storage_path=str(self._storage),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=int(goes_on), checkpoint_at_end=goes_on),
            callbacks=[JsonLoggerCallback(), *trackers(self._sweep), callback()],
            verbose=0,
        )


def _directory(trial: Any) -> str:
    return str(trial.trial_id)


def _mutation(space: Space) -> Any:
    """As population based training takes it."""
    if space.int_ is not None:
        return tune.randint(space.int_[0], space.int_[1] + 1)
    if space.between is not None:
        return (tune.loguniform if space.loguniform else tune.uniform)(*space.between)
    return list(space.listed or ())


class _Within:
    """Keeps what was changed by a fifth in its range."""

    def __init__(self, space: dict[str, Space]) -> None:
        self._between = {key: of.between for key, of in space.items() if of.between is not None}

    def __call__(self, config: dict[str, Any]) -> dict[str, Any]:
        values = dict(config["values"])
        for key, (least, most) in self._between.items():
            values[key] = min(max(values[key], least), most)
        return {**config, "values": values}
