"""What every YAML of the project shares: strict sections, and one way to read them and to complain."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dynamiccl_ray.errors import ConfigError, short

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]

MOST_HIDDEN: Final = 4096
MOST_EXPERTS: Final = 64
"""Of a policy."""

DIRECTORY: Final = "directory"
"""Key of the validation context: where the YAML lies, for the files that it names."""

MOST_BYTES: Final = 1 << 22
MOST_VALUES: Final = 100_000
"""Of a YAML file, as it is without aliases."""
_MOST_ERRORS: Final = 5


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
    hidden: Annotated[int, Field(ge=1, le=MOST_HIDDEN)] = 64


_Model = TypeVar("_Model", bound=Section)


def read_yaml(path: Path, model: type[_Model], what: str) -> _Model:
    """Reads a YAML file into ``model``; ``what`` names it in errors: "experiment", "cluster".

    Raises ConfigError naming the file, the field, the value and what is valid.
    """
    raw = _parse(path, _read_text(path, what))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(raw).__name__}")
    try:
        return model.model_validate(raw, context={DIRECTORY: path.parent})
    except ValidationError as e:
        errors = e.errors()
        said = [_explain(error, what) for error in errors[:_MOST_ERRORS]]
        more = [f"and {len(errors) - len(said)} more"] if len(errors) > len(said) else []
        raise ConfigError(f"{path}: " + "; ".join(said + more)) from None


def exists(path: Path) -> bool:
    """False, too, for what cannot be a path: a name that is too long."""
    try:
        return path.exists()
    except OSError:
        return False


def _read_text(path: Path, what: str) -> str:
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the {what}: {e.strerror}") from None
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{path}: has {len(raw)} bytes; a file of settings may have {MOST_BYTES}")
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8: {e.reason} at byte {e.start}") from None


def _parse(path: Path, text: str) -> Any:
    """Plain values. A few lines of aliases can stand for more values than fit into memory, so they are counted first.

    Raises ConfigError for all that is no YAML.
    """
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is not None and _size(node, {}) <= MOST_VALUES:
                return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    # The others come of dates and numbers that are none.
    except (yaml.YAMLError, ValueError, OverflowError, TypeError, AttributeError) as e:
        raise ConfigError(f"{path}: not YAML: {short(str(e))}") from None
    if node is not None:
        raise ConfigError(f"{path}: more than {MOST_VALUES} values, each alias counted as what it stands for")
    return None


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Values of a node with all that is below it; infinite for one that holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = inf
        below = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_size(part, known) for part in below)
    return known[id(node)]


def _explain(error: Any, what: str) -> str:
    where = short(".".join(str(p) for p in error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"unknown key {where!r} (value {short(repr(error['input']))}); remove it or check its spelling"
    if error["type"] == "missing":
        return f"{where!r} is required"
    message = short(error["msg"].removeprefix("Value error, "))
    return f"{where or what} = {short(repr(error['input']))}: {message}"
