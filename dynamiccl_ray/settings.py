"""What every YAML of the project shares: strict sections, and one way to read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from dynamiccl_ray.errors import ConfigError, short
from dynamiccl_ray.overrides import apply_overrides, parse_overrides
from dynamiccl_ray.validation import explain

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1)]
"""Of learning: beyond, weights are soon no numbers."""
Deviation = Annotated[float, Field(ge=0, le=2)]
"""Standard deviation of logs. Beyond, times leave what a float or a cluster can be."""
Name = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Of a run: its directory has it."""
MOST: Final = 1_000_000
Count = Annotated[int, Field(ge=1, le=MOST)]
"""Of what takes memory or processes each. A number beyond is a mistake, and would end in neither time nor memory."""

Nodes = Annotated[int, Field(ge=1, le=65_536)]
MOST_ACTORS: Final = 256

MOST_HIDDEN: Final = 4096
MOST_EXPERTS: Final = 64
"""Of a policy."""

DIRECTORY: Final = "directory"
"""Key of the validation context: where the YAML lies, for the files that it names."""

MOST_BYTES: Final = 1 << 22
MOST_VALUES: Final = 100_000
"""Of a YAML file, as it is without aliases."""

MOST_BRACKETS: Final = 100
"""Open at once."""


class Section(BaseModel):
    """Unknown keys are refused; nothing changes after loading. Docstrings of fields are in the JSON Schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Ppo(Section):
    """Hyperparameters of PPO that mean the same beside a job and on the model; how fast to learn is each one's own."""

    gamma: Annotated[float, Field(ge=0, lt=1)] = 0.3
    lambda_: Share = 0.9
    clip: Positive = 0.2
    grad_clip: Positive = 0.5
    lr: Rate
    epochs: Count
    """Passes over what a round brought."""
    entropy: NotNegative
    """At first; falls linearly to ``entropy_end``."""
    entropy_end: NotNegative = 0.001
    hidden: Annotated[int, Field(ge=1, le=MOST_HIDDEN)] = 64

    @model_validator(mode="after")
    def _entropy_falls(self) -> Self:
        if self.entropy_end > self.entropy:
            raise ValueError(f"entropy_end is {self.entropy_end:g}; it must be at most entropy, {self.entropy:g}")
        return self


_Model = TypeVar("_Model", bound=Section)


def read_yaml(path: Path, model: type[_Model], what: str, overrides: Sequence[str] = ()) -> _Model:
    """Reads a YAML file into ``model``; ``what`` names it in errors: "experiment", "cluster". ``overrides`` are
    settings to use instead of the file's, each as KEY=VALUE with a dotted key; paths in them are relative to the file.

    Raises ConfigError naming the file, the line, the field, the value and what is valid.
    """
    node, raw = _parse(str(path), read_text(path, what))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(raw).__name__}")
    given = parse_overrides(overrides, lambda said, text: _parse(f"--set {short(said)}", text)[1])
    apply_overrides(raw, given)
    try:
        return model.model_validate(raw, context={DIRECTORY: path.parent})
    except ValidationError as e:
        raise ConfigError(explain(e, path, model, raw, node, given, what)) from None


def beside(given: Any, info: ValidationInfo) -> Any:
    """A path in a YAML is relative to that file; absolute here, because runners work elsewhere."""
    if not isinstance(given, str | Path):
        return given
    return ((info.context or {}).get(DIRECTORY, Path()) / given).absolute()


def exists(path: Path) -> bool:
    """False, too, for what cannot be a path: a name that is too long."""
    try:
        return path.exists()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """As ``exists``; False for a directory."""
    try:
        return path.is_file()
    except OSError:
        return False


def existing(missing: str, there: Callable[[Path], bool] = exists) -> BeforeValidator:
    """Of a path in a YAML: as ``beside``, and an error that ends with ``missing`` where it is not ``there``."""

    def checked(given: Any, info: ValidationInfo) -> Any:
        path = beside(given, info)
        if isinstance(path, Path) and not there(path):
            raise ValueError(f"{path} {missing}")
        return path

    return BeforeValidator(checked)


def read_text(path: Path, what: str) -> str:
    """A file of settings. Raises ConfigError for one that is too large, is not UTF-8, or cannot be read."""
    try:
        with path.open("rb") as file:
            # A device has no size, and no end.
            raw = file.read(MOST_BYTES + 1)
    # A path with a null byte is a ValueError.
    except (OSError, ValueError) as e:
        raise ConfigError(f"{short(str(path))}: cannot read the {what}: {getattr(e, 'strerror', None) or e}") from None
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{path}: a file of settings may have {MOST_BYTES} bytes, and this one has more")
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8: {e.reason} at byte {e.start}") from None


class _Loader(yaml.SafeLoader):
    """YAML's scanner looks at each open bracket for each that it reads: a line of brackets would take it seconds."""

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= MOST_BRACKETS:
            raise RecursionError
        super().fetch_flow_collection_start(token)


def _parse(source: str, text: str) -> tuple[yaml.Node, Any]:
    """The nodes, which know their lines, and plain values. A few lines of aliases can stand for more values than fit
    into memory, so they are counted first.

    Raises ConfigError for all that is no YAML, and for keys that are given twice.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return yaml.ScalarNode("tag:yaml.org,2002:null", ""), None
            if _size(node, {}) > MOST_VALUES:
                raise ConfigError(f"{source}: more than {MOST_VALUES} values, each alias counted as what it stands for")
            _refuse_twice(source, node)
            return node, loader.construct_document(node)
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    except yaml.MarkedYAMLError as e:
        line = "" if e.problem_mark is None or "\n" not in text else f":{e.problem_mark.line + 1}"
        raise ConfigError(f"{source}{line}: not YAML: {_sentence(e.context, e.problem)}") from None
    # The others come of dates and numbers that are none.
    except (yaml.YAMLError, ValueError, OverflowError, TypeError, AttributeError) as e:
        raise ConfigError(f"{source}: not YAML: {_sentence(str(e))}") from None


def _sentence(*parts: str | None) -> str:
    return short(", ".join(" ".join(part.split()) for part in parts if part))


def _refuse_twice(source: str, root: yaml.Node) -> None:
    """YAML's reader would take the last of two equal keys without a word."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                waiting += (key, value)
                if isinstance(key, yaml.ScalarNode):
                    line = key.start_mark.line + 1
                    if key.value in lines:
                        first = lines[key.value]
                        raise ConfigError(
                            f"{source}:{line}: {short(key.value)!r} is given twice, first in line {first}; remove one"
                        )
                    lines[key.value] = line
        else:
            waiting += node.value


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Values of a node with all that is below it; infinite for one that holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = inf
        below = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_size(part, known) for part in below)
    return known[id(node)]
