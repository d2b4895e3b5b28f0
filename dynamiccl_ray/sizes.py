"""Bytes in a YAML: a number, or a number with a unit."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema

_UNITS: Final = {"B": 1, "kB": 10**3} | {
    name: base**power
    for base, names in ((1000, ("KB", "MB", "GB", "TB")), (1024, ("KiB", "MiB", "GiB", "TiB")))
    for power, name in enumerate(names, 1)
}
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)\s*")
_BITS: Final = re.compile(r"[kKMGT]i?b|[a-z]*bits?", re.ASCII)
MOST_BYTES: Final = 1 << 40
"""Of one message."""


def parse_bytes(given: Any) -> Any:
    """``64MiB`` as a number of bytes; what is no size is for pydantic to judge. Raises ValueError for other units."""
    found = _SIZE.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        return given
    number, unit = found[1], found[2] or "B"
    if unit not in _UNITS:
        why = "counts bits" if _BITS.fullmatch(unit) else "is no unit of bytes"
        raise ValueError(f"{unit!r} {why}; units are B, KB, MB, GB, TB (1000) and KiB, MiB, GiB, TiB (1024)")
    nbytes = float(number) * _UNITS[unit]
    if not nbytes.is_integer():
        raise ValueError("no whole number of bytes")
    return int(nbytes)


def _schema(least: int) -> WithJsonSchema:
    units = r"^[0-9]+(\.[0-9]+)?([eE]\+?[0-9]+)? *(B|kB|[KMGT]i?B)?$"
    number = {"type": "integer", "minimum": least, "maximum": MOST_BYTES}
    return WithJsonSchema({"anyOf": [number, {"type": "string", "pattern": units}]})


Bytes = Annotated[int, Field(ge=1, le=MOST_BYTES), BeforeValidator(parse_bytes), _schema(1)]
BytesOrNone = Annotated[int, Field(ge=0, le=MOST_BYTES), BeforeValidator(parse_bytes), _schema(0)]
"""0 means something else than a size."""
