"""Optuna behind one trial of the target as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.tune.search import Searcher

from dynamiccl_ray.config.sweep import Space, Sweep, Values
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.trainers.sweep.trials import NUMBER


def optuna_search(sweep: Sweep, default: Values, mode: str) -> Searcher:
    """Suggests ``default`` and then what Optuna's sampler draws. Raises ConfigError where Optuna is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigError("sampler = 'optuna': it is not installed; pip install 'dynamiccl-ray[sweep]'") from None
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = {key: _distribution(of) for key, of in sweep.space.items()}
    sampler = optuna.samplers.TPESampler(seed=sweep.seed)
    return DefaultFirst(default, OptunaSearch(space=space, metric=sweep.metric, mode=mode, sampler=sampler))


def _distribution(space: Space) -> Any:
    from optuna import distributions as of

    if space.int_ is not None:
        return of.IntDistribution(*space.int_)
    if space.between is not None:
        return of.FloatDistribution(*space.between, log=space.loguniform is not None)
    return of.CategoricalDistribution(space.listed or ())


class DefaultFirst(Searcher):  # type: ignore[misc]
    """The values of the target itself, which need not lie in the space, then those of another searcher."""

    def __init__(self, default: Values, then: Searcher) -> None:
        super().__init__(metric=then.metric, mode=then.mode)
        self._default, self._then = default, then
        self._first: str | None = None
        self._suggested = 0

    def set_search_properties(self, *_: Any, **__: Any) -> bool:
        # The space and the metric are known.
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        if self._first is None:
            self._first = trial_id
            return {"values": self._default, NUMBER: 0}
        self._suggested += 1
        return {"values": self._then.suggest(trial_id), NUMBER: self._suggested}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if trial_id != self._first:
            self._then.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if trial_id != self._first:
            self._then.on_trial_complete(trial_id, result, error)

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).write_bytes(cloudpickle.dumps(self.__dict__))

    def restore(self, checkpoint_path: str) -> None:
        self.__dict__.update(cloudpickle.loads(Path(checkpoint_path).read_bytes()))
