"""What a sweep is of: an experiment or a curriculum, whose settings every value to try must fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ConfigDict
from pydantic_core import to_jsonable_python

from dynamiccl_ray.config.curriculum import Curriculum, load_curriculum
from dynamiccl_ray.config.experiment import DEFAULT_POLICY, Online, load
from dynamiccl_ray.config.fabrics import PlayedJob
from dynamiccl_ray.config.sweep import METRICS, NoScheduler, Pbt, Sweep, Values
from dynamiccl_ray.errors import ConfigError, nearest
from dynamiccl_ray.settings import Section, read_yaml

_MOST_COMBINATIONS: Final = 64
_OURS: Final = {"name": "the sweep names its trials", "seed": "give seeds", "job": "each trial has a job of its own"}
_UNUSED: Final = ("ray", "ppo.learners", "mode", "stop.keep")
"""Of an experiment: a trial is one process that plays a job."""
_SHAPES: Final = ("ppo.hidden", "ppo.experts", "ppo.rounds")
_CHANGEABLE: Final = ("ppo", "reward")


@dataclass(frozen=True)
class Target:
    """A file, and what every trial sets in it."""

    path: Path
    kind: str
    """``experiment`` or ``curriculum``."""
    fixed: tuple[str, ...]
    """KEY=VALUE."""

    def load(self, values: Values, *more: str) -> Online | Curriculum:
        """Its settings with the values of a trial. Raises ConfigError."""
        overrides = [*self.fixed, *(as_override(*item) for item in values.items()), *more]
        return (load if self.kind == "experiment" else load_curriculum)(self.path, overrides)


def as_override(key: str, value: Any) -> str:
    """KEY=VALUE as ``--set`` takes it."""
    # In brackets, because a plain value would get a line that ends the document.
    written = yaml.safe_dump([to_jsonable_python(value)], default_flow_style=True, width=math.inf, allow_unicode=True)
    return f"{key}={written.strip()[1:-1]}"


class _Kind(Section):
    """Just enough of a YAML to see what it is."""

    model_config = ConfigDict(extra="ignore")

    fabric: Any = None
    stages: Any = None


def find_target(sweep: Sweep, path: Path) -> Target:
    """The target, with all that the sweep says of it checked; ``path`` is the sweep's, for errors.

    Raises ConfigError.
    """
    given = read_yaml(sweep.of, _Kind, "target")
    if (given.fabric is None) == (given.stages is None):
        raise ConfigError(f"{path}: of: {sweep.of} is no experiment, which has a fabric, and no curriculum with stages")
    kind = "experiment" if given.stages is None else "curriculum"
    target = Target(sweep.of, kind, tuple(as_override(*item) for item in sweep.set.items()))
    base = _said(path, "set", target, {})
    _check_settings(sweep, path, kind, base)
    for values in _examples(sweep):
        _said(path, "space", target, values)
    return target


def default_values(sweep: Sweep, target: Target) -> Values:
    """What the target itself has at the keys of the sweep."""
    base = target.load({})
    return {key: _value_at(base, key) for key in sweep.space}


def reports(curriculum: Curriculum) -> int:
    """The most reports of a trial: its validations."""
    every = curriculum.validation.every_rounds
    # A stage ends at a validation.
    return sum(math.ceil(stage.most_rounds / every) for stage in curriculum.stages)


def best_yaml(target: Target, values: Values, comments: Sequence[str]) -> str:
    """The target with these values, as a YAML that may lie anywhere: what it names by a relative path is absolute."""
    document = target.load(values).model_dump(mode="json", exclude_unset=True)
    if document.get("policy") == str(DEFAULT_POLICY):
        document["policy"] = "default"
    head = "".join(f"# {line}\n" for line in comments)
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)


def _said(path: Path, where: str, target: Target, values: Values) -> Online | Curriculum:
    try:
        return target.load(values)
    except ConfigError as e:
        # The reader takes them for words of the command line.
        raise ConfigError(f"{path}: {where}: {str(e).removeprefix('--set ')}") from None


def _examples(sweep: Sweep) -> Iterator[Values]:
    """Each value alone, and then values together, as far as they are few."""
    for key, space in sweep.space.items():
        for value in space.examples:
            yield {key: value}
    if math.prod(len(space.examples) for space in sweep.space.values()) <= _MOST_COMBINATIONS:
        for values in itertools.product(*(space.examples for space in sweep.space.values())):
            yield dict(zip(sweep.space, values, strict=True))


def _check_settings(sweep: Sweep, path: Path, kind: str, base: Online | Curriculum) -> None:
    known = METRICS[kind]
    if sweep.metric not in known:
        close = nearest(sweep.metric, known)
        raise ConfigError(
            f"{path}: metric = {sweep.metric!r}: of {'an' if kind == 'experiment' else 'a'} {kind} it must be one of "
            f"{', '.join(known)}{close}"
        )
    for key in (*sweep.space, *sweep.set):
        if (first := key.split(".")[0]) in _OURS:
            raise ConfigError(f"{path}: {key!r} cannot be set: {_OURS[first]}")
    if isinstance(base, Online):
        _check_experiment(sweep, path, base)
    else:
        _check_curriculum(sweep, path, base)


def _check_experiment(sweep: Sweep, path: Path, base: Online) -> None:
    if not isinstance(base.fabric, PlayedJob):
        raise ConfigError(
            f"{path}: of: {sweep.of} is beside a real job (fabric.kind {base.fabric.kind!r}); trials need a played one"
        )
    if base.mode != "active":
        raise ConfigError(f"{path}: of: mode is {base.mode!r}, in which nothing is used; trials need mode: active")
    if not isinstance(sweep.scheduler, NoScheduler):
        raise ConfigError(
            f"{path}: scheduler = {sweep.scheduler.kind!r}: it needs reports while a trial runs, and an experiment has "
            "its result at its end; use none, or sweep a curriculum"
        )
    for key in (*sweep.space, *sweep.set):
        if any(key == unused or key.startswith(f"{unused}.") for unused in _UNUSED):
            raise ConfigError(f"{path}: {key!r} has no effect in a sweep: a trial plays its job in one process")


def _check_curriculum(sweep: Sweep, path: Path, base: Curriculum) -> None:
    if isinstance(sweep.scheduler, NoScheduler):
        return
    scheduler = sweep.scheduler
    if scheduler.reports() > reports(base):
        raise ConfigError(
            f"{path}: scheduler {scheduler.kind} needs {scheduler.reports()} reports or more, and a trial makes "
            f"{reports(base)} at most; lower validation.every_rounds, or its own settings"
        )
    if len(base.stages) > 1 and not sweep.metric.startswith("held_out"):
        raise ConfigError(
            f"{path}: scheduler {scheduler.kind} compares trials while they run, and {sweep.metric} means another "
            "thing in each stage; use held_out_regret or held_out_vs_oracle, or a curriculum of one stage"
        )
    if isinstance(scheduler, Pbt):
        for key in sweep.space:
            if key.split(".")[0] not in _CHANGEABLE or key in _SHAPES:
                raise ConfigError(
                    f"{path}: space.{key}: pbt changes settings while a trial runs, which only those of "
                    f"{' and '.join(_CHANGEABLE)} can, but not {', '.join(_SHAPES)}"
                )


def _value_at(model: Any, key: str) -> Any:
    """JSON; None where a section on the way is not there."""
    for part in key.split("."):
        if isinstance(model, BaseModel):
            model = getattr(model, part)
        elif isinstance(model, Sequence) and not isinstance(model, str):
            model = model[int(part)]
        elif isinstance(model, dict):
            model = model[part]
        else:
            return None
    return to_jsonable_python(model)
