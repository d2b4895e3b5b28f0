"""What every YAML of the project shares: strict sections, and one way to read them and to complain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dynamiccl_ray.errors import ConfigError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]

DIRECTORY: Final = "directory"
"""Key of the validation context: where the YAML lies, for the files that it names."""


class Section(BaseModel):
    """Unknown keys are refused; nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Ppo(Section):
    """Hyperparameters of PPO that mean the same beside a job and on the model; how fast to learn is each one's own."""

    gamma: Annotated[float, Field(ge=0, lt=1)] = 0.3
    lambda_: Share = 0.9
    clip: Positive = 0.2
    grad_clip: Positive = 0.5
    lr: Positive
    epochs: Count
    """Passes over what a round brought."""
    entropy: NotNegative
    """At first; falls linearly to ``entropy_end``."""
    entropy_end: NotNegative = 0.001
    hidden: Count = 64


_Model = TypeVar("_Model", bound=Section)


def read_yaml(path: Path, model: type[_Model], what: str) -> _Model:
    """Reads a YAML file into ``model``; ``what`` names it in errors: "experiment", "cluster".

    Raises ConfigError naming the file, the field, the value and what is valid.
    """
    try:
        text = path.read_text()
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the {what}: {e.strerror}") from None
    try:
        raw: Any = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}: not YAML: {e}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(raw).__name__}")
    try:
        return model.model_validate(raw, context={DIRECTORY: path.parent})
    except ValidationError as e:
        raise ConfigError(f"{path}: " + "; ".join(_explain(error, what) for error in e.errors())) from None


def _explain(error: Any, what: str) -> str:
    where = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {where!r} (value {error['input']!r}); remove it or check its spelling"
    if error["type"] == "missing":
        return f"{where!r} is required"
    return f"{where or what} = {error['input']!r}: {error['msg'].removeprefix('Value error, ')}"
