"""The trace YAML: the communicators of a job that ran, and the collectives of one step on each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.settings import DIRECTORY, Count, Nodes, Section, read_text, read_yaml
from dynamiccl_ray.shipped import find
from dynamiccl_ray.sizes import Bytes
from dynamiccl_ray.workloads.calls import CALL, Operation, Stream, StreamCommunicator

MOST_CALLS: Final = 10_000
"""Of a communicator in a step, and before it."""


class RecordedCall(Section):
    """One collective, or several in a row that are alike."""

    collective: Literal["broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"]
    bytes: Bytes
    """As NCCL counts them: the full buffer for all-gather and reduce-scatter."""
    times: Count = 1
    """In a row."""
    grouped: bool = False
    """NCCL decided on several collectives of one ncclGroup together: ``bytes`` is their sum. How many is not known."""

    @property
    def type(self) -> Collective:
        return Collective[self.collective.upper()]


class RecordedCommunicator(Section):
    """Communicators of one name, shape and step."""

    name: Annotated[str, Field(min_length=1, max_length=48)]
    """NCCL's; without its number where there are several."""
    count: Annotated[int, Field(ge=1, le=4096)] = 1
    """So many of them."""
    ranks: Annotated[int, Field(ge=2, le=1 << 20)]
    nodes: Nodes
    once: tuple[RecordedCall, ...] = ()
    """Before the first step."""
    step: tuple[RecordedCall, ...] = ()
    """In the order of calls."""
    repeat: Count = 1
    """Its step comes so often in one step of the communicator with the fewest."""
    order: Literal["found", "weighted"] = "found"
    """``weighted``: no order was found that repeats; the calls are as frequent as they were, spread evenly."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.nodes > self.ranks:
            raise ValueError(f"{self.name}: {self.ranks} ranks cannot be on {self.nodes} nodes")
        if not self.once and not self.step:
            raise ValueError(f"{self.name}: give its calls in step or once")
        for name, calls, times in (("step", self.step, self.repeat), ("once", self.once, 1)):
            if (count := sum(call.times for call in calls) * times) > MOST_CALLS:
                raise ValueError(f"{self.name}: {count} calls in {name}; {MOST_CALLS} at most")
        return self

    @property
    def names(self) -> list[str]:
        """Of each of them."""
        return [self.name] if self.count == 1 else [f"{self.name}{i}" for i in range(self.count)]


class Trace(Section):
    """What a job asked of the network in a step, as it was recorded."""

    kind: Literal["trace"]
    name: Annotated[str, Field(min_length=1)]
    communicators: Annotated[tuple[RecordedCommunicator, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        names = Counter(name for comm in self.communicators for name in comm.names)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"communicators: {twice[0]!r} is the name of two; give each its own")
        if not any(comm.step for comm in self.communicators):
            raise ValueError("communicators: none has a step, so there is nothing to repeat")
        return self

    def stream(self) -> Stream:
        """The calls of a step, each kind of communicator's in turn: how they lie between each other is not known."""
        rows: list[tuple[Any, ...]] = [
            (index, Operation[call.type.name], call.bytes, call.bytes, 0, 0, False, False)
            for index, comm in enumerate(self.communicators)
            for call in each(comm.step * comm.repeat)
        ]
        return Stream(
            communicators=tuple(
                StreamCommunicator(
                    role=comm.name if comm.count == 1 else f"{comm.name} x{comm.count}", ranks=tuple(range(comm.ranks))
                )
                for comm in self.communicators
            ),
            calls=np.array(rows, dtype=CALL),
        )


def each(calls: Sequence[RecordedCall]) -> Iterator[RecordedCall]:
    """One by one."""
    for call in calls:
        for _ in range(call.times):
            yield call


def is_trace(path: Path) -> bool:
    """Whether a YAML says that it is a trace. Raises ConfigError where it cannot be read."""
    return re.search(r"^kind:\s*[\"']?trace\b", read_text(path, "workload"), re.MULTILINE) is not None


def load_trace(path: Path, overrides: Sequence[str] = ()) -> Trace:
    """Reads a trace YAML, with ``overrides`` as in ``read_yaml``. Raises ConfigError."""
    return read_yaml(path, Trace, "trace", overrides)


def _named(given: Any, info: ValidationInfo) -> Any:
    """Anything but a name or a path is for Trace to judge."""
    if not isinstance(given, str | Path):
        return given
    return load_trace(find("trace", given, (info.context or {}).get(DIRECTORY, Path())))


class _OrName:
    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


NamedTrace = Annotated[Trace, BeforeValidator(_named), _OrName()]
"""In a YAML: the name of one that is shipped, the path of a trace YAML, relative to that file, or its settings, in
place."""
