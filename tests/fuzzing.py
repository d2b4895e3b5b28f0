"""Damage for files that people and other processes write, and what must come of reading them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamiccl_ray.errors import DynamicclError

LONGEST_MESSAGE = 8000
MOST_LINES = 12

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.integers(),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30, 10**400]),
    st.floats(),
    st.text(max_size=20),
    st.dates(min_value=date(1900, 1, 1)),
    st.sampled_from(["default", ".", "..", "/", "a\0b", "x" * 5000, "dgx-h100-ndr", "measured", "1e999", "nccl", ""]),
)
JUNK = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4),
    max_leaves=8,
)
"""Any plain value."""
JSON_JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 20), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def often(default: int, slow: int) -> Any:
    """A test's argument ``examples``: so many by default, and so many in ``make test-all``."""
    return pytest.mark.parametrize("examples", [default, pytest.param(slow, marks=[pytest.mark.slow, LONG])])


LONG = pytest.mark.timeout(1800)


def search(examples: int, strategy: st.SearchStrategy[Any], holds: Callable[[Any], None]) -> None:
    """Looks for a value for which ``holds`` raises; the same values each time."""

    @settings(
        max_examples=examples,
        deadline=timedelta(seconds=20),
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(strategy)
    def check(value: Any) -> None:
        holds(value)

    check()


def ends_well(read: Callable[[], object]) -> None:
    """It succeeds, or says what is wrong in a few lines: anything else is a traceback to the user."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()
    except DynamicclError as e:
        said = str(e)
        assert 0 < len(said) < LONGEST_MESSAGE, said[:1000]
        assert said.count("\n") <= MOST_LINES, said


Edit = tuple[int, str, Any]


def edits(junk: st.SearchStrategy[Any] = JUNK, most: int = 3) -> st.SearchStrategy[list[Edit]]:
    """What ``edited`` does to a document."""
    kinds = st.sampled_from(["replace", "remove", "rename", "repeat"])
    return st.lists(st.tuples(st.integers(0, 10_000), kinds, junk), min_size=1, max_size=most)


def edited(document: Any, done: list[Edit]) -> Any:
    """A document of dicts and lists with other values, without some, and with more of some."""
    document = copy.deepcopy(document)
    for at, kind, value in done:
        places = list(_places(document))
        if not places:
            break
        holder, key = places[at % len(places)]
        if kind == "replace":
            holder[key] = value
        elif kind == "remove":
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            holder[str(value)[:20]] = holder.pop(key)
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
    return document


def _places(value: Any) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)


Cut = tuple[float, int, bytes]


def cuts(most: int = 4) -> st.SearchStrategy[list[Cut]]:
    """What ``damaged`` does to bytes."""
    return st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=12)), min_size=1, max_size=most)


def damaged(raw: bytes, done: list[Cut]) -> bytes:
    """Bytes of which some are gone, and others there instead."""
    for place, gone, instead in done:
        at = int(place * len(raw))
        raw = raw[:at] + instead + raw[at + gone :]
    return raw


def overwritten(raw: bytes, done: list[Cut]) -> bytes:
    """The same length, so that what says where things lie stays right."""
    new = bytearray(raw)
    for place, _, instead in done:
        at = int(place * len(raw))
        new[at : at + len(instead)] = instead[: len(raw) - at]
    return bytes(new)
