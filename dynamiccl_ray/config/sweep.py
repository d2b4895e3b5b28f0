"""The sweep YAML: which settings of an experiment or a curriculum are tried, how they are drawn, what is compared."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from dynamiccl_ray import shipped
from dynamiccl_ray.errors import ConfigError, nearest
from dynamiccl_ray.settings import Count, Name, NotNegative, Positive, Section, Share, beside, is_file, read_yaml

MOST_TRIALS: Final = 10_000
_EXPONENT: Final = re.compile(r"[+-]?\d+e[+-]?\d+")
TARGETS: Final = ("experiment", "curriculum")

Values = dict[str, Any]
"""Of a trial: dotted key -> value."""


class Space(Section):
    """The values of one key: exactly one of these."""

    grid: Annotated[tuple[Any, ...], Field(min_length=1)] | None = None
    """Each of these, with the sampler ``grid``. A list alone means ``grid`` or ``choice``, as the sampler needs."""
    choice: Annotated[tuple[Any, ...], Field(min_length=1)] | None = None
    """One of these at random."""
    uniform: tuple[float, float] | None = None
    """Least and most."""
    loguniform: tuple[Positive, Positive] | None = None
    """Least and most; the logarithm is uniform."""
    int_: Annotated[tuple[int, int] | None, Field(alias="int")] = None
    """Least and most, both included."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [
            name for name in ("grid", "choice", "uniform", "loguniform", "int_") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError("give exactly one of grid, choice, uniform, loguniform and int")
        if self.between is not None and not self.between[0] < self.between[1]:
            raise ValueError(f"{given[0].strip('_')}: the first must be less than the second")
        return self

    @property
    def listed(self) -> tuple[Any, ...] | None:
        """The values, where there are only so many."""
        return self.grid if self.grid is not None else self.choice

    @property
    def between(self) -> tuple[float, float] | None:
        """The least and the most of a range."""
        return self.uniform or self.loguniform or self.int_

    @property
    def examples(self) -> tuple[Any, ...]:
        """Values that must be valid: all of a list, the ends of a range."""
        return self.listed if self.listed is not None else self.between or ()

    def draw(self, rng: np.random.Generator) -> Any:
        """A value at random."""
        if self.int_ is not None:
            return int(rng.integers(self.int_[0], self.int_[1] + 1))
        if self.uniform is not None:
            return float(rng.uniform(*self.uniform))
        if self.loguniform is not None:
            return float(np.exp(rng.uniform(*np.log(self.loguniform))))
        values = self.listed or ()
        return values[int(rng.integers(len(values)))]


class _Schedule(Section):
    def reports(self) -> int:
        """Reports that a trial must make before this can do anything."""
        return 1


class NoScheduler(_Schedule):
    """Every trial runs to its end."""

    kind: Literal["none"] = "none"


class Asha(_Schedule):
    """Stops what is behind at each rung (Li et al. 2020, arXiv:1810.05934). A curriculum reports at each validation."""

    kind: Literal["asha"]
    grace: Count = 1
    """Reports that every trial makes."""
    reduction: Annotated[int, Field(ge=2)] = 3
    """One of so many goes on from each rung to the next, which has as many times the reports."""

    def reports(self) -> int:
        return self.grace + 1


class Pbt(_Schedule):
    """Trials that are behind go on from a better one's weights with changed settings (Jaderberg et al. 2017,
    arXiv:1711.09846)."""

    kind: Literal["pbt"]
    every: Count = 1
    """Reports between changes."""
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    """Share of the trials that are replaced, and from which they are."""
    resample: Share = 0.25
    """How likely a setting is drawn anew instead of changed by a fifth."""

    def reports(self) -> int:
        return self.every + 1


class Resources(Section):
    """What a trial asks Ray for."""

    cpu: Positive = 1.0
    gpu: NotNegative = 0.0


class Limits(Section):
    """When a sweep ends before all trials have."""

    seconds: Positive | None = None
    """No trial starts after this long, and those that run are ended."""


class Mlflow(Section):
    """Where trials are tracked with MLflow."""

    uri: str | None = None
    """Of the tracking server or store; absent: what MLFLOW_TRACKING_URI says."""
    experiment: str | None = None
    """Absent: the sweep's name."""


class Wandb(Section):
    """Where trials are tracked with Weights & Biases, whose own environment variables hold too."""

    project: str = "dynamiccl"
    group: str | None = None
    """Absent: the sweep's name."""


def _space(given: Any) -> Any:
    if isinstance(given, dict):
        return {name: [_number(v) for v in of] if isinstance(of, list) else of for name, of in given.items()}
    return {"grid": [_number(v) for v in given]} if isinstance(given, list) else given


def _number(value: Any) -> Any:
    """YAML takes 1e-3 for a word."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _scheduler(given: Any) -> Any:
    return {"kind": given} if isinstance(given, str) else given


def _target(given: Any, info: ValidationInfo) -> Any:
    if not isinstance(given, str | Path):
        return given
    known = {name: kind for kind in TARGETS for name in shipped.names(kind)}
    if str(given) in known:
        return shipped.folder(known[str(given)]) / f"{given}.yaml"
    path = beside(given, info)
    if not is_file(path):
        raise ValueError(
            f"no such file, and none that is shipped{nearest(str(given), known) or ';'} give the path of an experiment "
            f"or a curriculum, or one of {', '.join(known)}"
        )
    return path


_SpaceIn = Annotated[Space, BeforeValidator(_space, json_schema_input_type=Space | list[Any])]
_Schedulers = Annotated[NoScheduler | Asha | Pbt, Field(discriminator="kind")]
_SchedulerIn = Annotated[
    _Schedulers,
    BeforeValidator(_scheduler, json_schema_input_type=_Schedulers | Literal["none", "asha", "pbt"]),
]


class Sweep(Section):
    """One sweep. The first trial is always the target as it is, so that there is something to beat."""

    name: Name
    of: Annotated[Path, BeforeValidator(_target)]
    """An experiment on a played job, or a curriculum: a path relative to this file, or the name of one that is
    shipped."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Dotted key -> value, for every trial: what ``--set`` does for one run."""
    space: Annotated[dict[str, _SpaceIn], Field(min_length=1)]
    """Dotted key -> the values to try."""
    sampler: Literal["grid", "random", "optuna"] = "grid"
    """``grid``: all combinations; ``random``; ``optuna``: its tree-structured Parzen estimator."""
    samples: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = None
    """Trials that are drawn beside the first; not for ``grid``."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of what is drawn."""
    scheduler: _SchedulerIn = NoScheduler()
    metric: str
    """What is compared: docs/sweeps.md."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(min_length=1)] = (0,)
    """Of the target. A trial is the mean over them."""
    confirm: Annotated[int, Field(ge=0, le=1000)] = 0
    """Seeds that no trial had, with which the best and the target as it is run once more: the best of many owes
    something to luck."""
    concurrent: Count | None = None
    """Trials at a time; absent: as many as there is room for."""
    resources: Resources = Resources()
    stop: Limits = Limits()
    mlflow: Mlflow | None = None
    """Settings and results of every trial go there too."""
    wandb: Wandb | None = None
    """As ``mlflow``."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for key, space in self.space.items():
            if self.sampler == "grid" and space.listed is None:
                raise ValueError(f"space.{key}: a range has no grid; list its values, or use sampler: random or optuna")
            if self.sampler == "grid" and space.choice is not None:
                raise ValueError(f"space.{key}: choice is for the samplers random and optuna; give a list")
        if self.mlflow is not None and isinstance(self.scheduler, Pbt):
            raise ValueError("mlflow: it refuses settings that change in a trial, as with pbt; use wandb, or remove it")
        if self.sampler == "grid" and self.samples is not None:
            raise ValueError("samples: a grid has as many as it has; remove it, or use sampler: random or optuna")
        if self.sampler != "grid" and self.samples is None:
            raise ValueError(f"samples: sampler {self.sampler} needs their number")
        if self.sampler == "grid" and (count := math.prod(len(s.examples) for s in self.space.values())) > MOST_TRIALS:
            raise ValueError(f"space: {count} combinations; {MOST_TRIALS} at most")
        if isinstance(self.scheduler, Pbt) and self.sampler != "random":
            raise ValueError("scheduler: pbt changes what it begins with by itself; use sampler: random")
        if len(self.seeds) != len({*self.seeds}):
            raise ValueError("seeds: one is given twice")
        keys = sorted([*self.space, *self.set])
        for one, other in itertools.pairwise(keys):
            if other == one or other.startswith(f"{one}."):
                raise ValueError(f"{one!r} and {other!r} set the same; remove one")
        return self

    def planned(self, default: Values) -> list[Values]:
        """The trials that are known before any has run, the one of the target's own values first."""
        rest: Sequence[Values]
        if self.sampler == "grid":
            listed = [space.listed or () for space in self.space.values()]
            rest = [dict(zip(self.space, values, strict=True)) for values in itertools.product(*listed)]
        elif self.sampler == "random":
            rng = np.random.default_rng(self.seed)
            rest = [{key: space.draw(rng) for key, space in self.space.items()} for _ in range(self.samples or 0)]
        else:
            rest = []
        return [default, *(values for values in rest if values != default)]

    @property
    def fresh_seeds(self) -> tuple[int, ...]:
        """Those of ``confirm``."""
        return tuple(range(max(self.seeds) + 1, max(self.seeds) + 1 + self.confirm))


METRICS: Final[Mapping[str, Mapping[str, Literal["min", "max"]]]] = {
    "experiment": {"lost": "min", "regret": "min", "vs_oracle": "min", "gain": "max"},
    "curriculum": {"held_out_regret": "min", "held_out_vs_oracle": "min", "vs_oracle": "min", "gap_closed": "max"},
}
"""Kind of target -> metric -> which is better."""


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Reads a sweep YAML, with ``overrides`` as in ``read_yaml``. Raises ConfigError. The target is another matter:
    ``sweep_target.find_target``."""
    sweep = read_yaml(path, Sweep, "sweep", overrides)
    if not any(sweep.metric in known for known in METRICS.values()):
        every = list(dict.fromkeys(name for known in METRICS.values() for name in known))
        close = nearest(sweep.metric, every)
        raise ConfigError(f"{path}: metric = {sweep.metric!r}: must be one of {', '.join(every)}{close}")
    return sweep
