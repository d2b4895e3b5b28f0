"""What pydantic says of settings, in words for who wrote them: line, key, value, what is valid, the nearest name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from dynamiccl_ray.errors import nearest
from dynamiccl_ray.overrides import Override

_MOST_ERRORS: Final = 3
_MOST_CHARS: Final = 420
_MOST_VALUE: Final = 60
_CHOICES: Final = ("literal_error", "union_tag_invalid", "enum")

Place = tuple[str | int, ...]


def explain(
    error: ValidationError,
    path: Path,
    model: type[BaseModel],
    document: Any,
    node: yaml.Node,
    overrides: Sequence[Override],
    what: str,
) -> str:
    """A line for one mistake; a few lines for several. ``document`` is what was validated, ``node`` where it stands."""
    errors = _real(error.errors(include_url=False))
    shown = errors[:_MOST_ERRORS]
    most = _MOST_CHARS // len(shown)
    lines = []
    for each in shown:
        place, is_missing = _place(each, document)
        is_unknown, line = each["type"] == "extra_forbidden", _line(node, place)
        source = _source(place, is_unknown or line is None, overrides)
        key = source.path if source and is_unknown else place
        words = _cut(_words(each, key, is_missing, model, what), most)
        if source:
            lines.append(f"--set {_cut(source.said, _MOST_VALUE)}: {words}")
        else:
            lines.append(f"{_at(path, line, alone=len(errors) == 1)}{words}")
    if len(errors) == 1:
        return lines[0]
    more = [f"and {len(errors) - len(lines)} more"] if len(errors) > len(lines) else []
    return "\n  ".join([f"{path}: {len(errors)} mistakes", *lines, *more])


def _real(errors: list[Any]) -> list[Any]:
    """Without what pydantic says of a list only because it leaves out the items that are wrong: it has too few."""
    places = [each["loc"] for each in errors]
    return [
        each
        for each, of in zip(errors, places, strict=True)
        if each["type"] != "too_short" or not any(len(at) > len(of) and at[: len(of)] == of for at in places)
    ]


def _at(path: Path, line: int | None, *, alone: bool) -> str:
    if alone:
        return f"{path}: " if line is None else f"{path}:{line}: "
    return "" if line is None else f"line {line}: "


def _words(error: Any, place: Place, is_missing: bool, model: type[BaseModel], what: str) -> str:
    where = ".".join(map(str, place))
    if error["type"] == "extra_forbidden":
        value = "" if isinstance(error["input"], dict | list) else f" (value {_value(error['input'])})"
        return f"unknown key {_cut(where, 100)!r}{value}" + _suggestion(place, error["loc"], model)
    if is_missing:
        return f"{where!r} is required"
    message, value = error["msg"].removeprefix("Value error, "), error["input"]
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tag = error["ctx"]["discriminator"].strip("'")
        if error["type"] == "union_tag_not_found":
            return f"{f'{where}.{tag}'!r} is required; it must be one of {_tags(error['loc'], model, tag)}"
        value = error["ctx"]["tag"]
    if error["type"] in _CHOICES:
        valid = error["ctx"].get("expected_tags") or error["ctx"]["expected"]
        close = nearest(value, re.findall(r"'([^']*)'", valid)) if isinstance(value, str) else ""
        return f"{where} = {_value(value)}: must be one of {valid.replace(' or ', ', ')}{close}"
    if error["type"] == "value_error" and isinstance(value, dict | list | tuple | BaseModel):
        # It is about several settings, which the message names.
        return f"{where or what}: {message}"
    return f"{where or what} = {_value(value)}: {message}"


def _value(value: Any) -> str:
    if isinstance(value, dict | list) and value:
        return "a mapping" if isinstance(value, dict) else "a list"
    return _cut(repr(value), _MOST_VALUE)


def _cut(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."


def _place(error: Any, document: Any) -> tuple[Place, bool]:
    """Where it is in the document: pydantic's location without the tags of unions; and whether it is not there."""
    place: list[str | int] = []
    at = document
    for part in error["loc"]:
        if (isinstance(at, dict) and part in at) or (isinstance(at, list) and isinstance(part, int) and part < len(at)):
            place.append(part)
            at = at[part]
    if error["type"] == "missing":
        return (*place, error["loc"][-1]), True
    if error["type"] == "union_tag_invalid" and isinstance(at, dict):
        place.append(error["ctx"]["discriminator"].strip("'"))
    return tuple(place), False


def _source(place: Place, may_be_part: bool, overrides: Sequence[Override]) -> Override | None:
    """The last of the command line that has put it there; or, where the file has no such section, a part of it."""
    for override in reversed(overrides):
        n = min(len(override.path), len(place))
        if override.path[:n] == place[:n] and n > 0 and (may_be_part or n == len(override.path)):
            return override
    return None


def _line(node: yaml.Node, place: Place) -> int | None:
    """Counted from 1, of the key or item; of what holds it, if it is not there; None for the whole document."""
    line = None
    for part in place:
        below: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                    below, line = value, key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            below = node.value[part]
            line = below.start_mark.line + 1
        if below is None:
            break
        node = below
    return line


# ---- what the model has ----


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """All models that a value may be, or that a list of values may be of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from _models(get_args(annotation)[0])
    elif get_origin(annotation) is not Literal:
        for inner in get_args(annotation):
            yield from _models(inner)


def _at_location(location: Sequence[str | int], model: type[BaseModel]) -> list[type[BaseModel]]:
    """The models at a location of pydantic's, which names the tag of each union."""
    found = [model]
    for part in location:
        if isinstance(part, int):
            continue
        if fields := [m.model_fields[part] for m in found if part in m.model_fields]:
            found = [inner for field in fields for inner in _models(field.annotation)]
        else:
            found = [m for m in found if any(part in get_args(f.annotation) for f in m.model_fields.values())]
    return found


def _tags(location: Sequence[str | int], model: type[BaseModel], tag: str) -> str:
    kinds = [m.model_fields[tag].annotation for m in _at_location(location, model) if tag in m.model_fields]
    return ", ".join(repr(name) for kind in kinds for name in get_args(kind))


def _paths(model: type[BaseModel], seen: tuple[type[BaseModel], ...] = ()) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        for inner in _models(field.annotation):
            if inner not in seen:
                yield from (f"{name}.{below}" for below in _paths(inner, (*seen, inner)))


def _suggestion(place: Place, location: Sequence[str | int], model: type[BaseModel]) -> str:
    """The nearest name beside it; or where the same name is elsewhere; or all that could stand there."""
    beside = [name for m in _at_location(location[:-1], model) for name in m.model_fields]
    # The location ends with the part that is unknown; of a path of the command line, more may follow.
    if close := nearest(str(location[-1]), beside):
        return close
    whole, last = ".".join(p for p in place if isinstance(p, str)), str(place[-1])
    same = [name for name in sorted(set(_paths(model))) if name.rsplit(".", 1)[-1] == last and name != whole]
    if same:
        return nearest(whole, same) or f"; did you mean {min(same, key=len)!r}?"
    return f"; valid here: {', '.join(beside)}" if beside else "; remove it"
