"""The state of a run with any damage: a coordinator takes it up, or refuses it with an error of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fuzzing import JSON_JUNK, cuts, damaged, edited, edits, ends_well, often, overwritten, search
from hypothesis import strategies as st
from small import small_experiment
from test_coordinator import COMM, KEY, OTHER, TERM, Run

from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.actors.durability import pack, unpack
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.control.agreement import MemoryStore
from dynamiccl_ray.errors import RunError


@functools.cache
def _state() -> bytes:
    """What a coordinator saved that had measured two keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynamiccl_ray.actors.coordinator.new_term", lambda above=0: above + TERM)
        run = Run().join()
        run.us[OTHER] = run.us[KEY]
        for _ in range(6):
            run.epoch()
    raw = run.store.get("r/state")
    assert raw is not None
    said, arrays = unpack(raw)
    assert said["membership"]["comms"][0]["example"]["comm"] == COMM
    assert len(arrays["wanted"]) == 2
    return raw


def _take_up(raw: bytes) -> None:
    store = MemoryStore()
    store.put("r/state", raw)
    ends_well(lambda: Coordinator(Plan(run="r", experiment=small_experiment("unit")), store))


@often(150, 20_000)
def test_damaged_bytes(examples: int) -> None:
    search(examples, cuts(), lambda done: _take_up(damaged(_state(), done)))


@often(150, 20_000)
def test_bytes_overwritten(examples: int) -> None:
    search(examples, cuts(), lambda done: _take_up(overwritten(_state(), done)))


@often(100, 20_000)
def test_values_of_another_kind(examples: int) -> None:
    said, arrays = unpack(_state())
    search(examples, edits(JSON_JUNK), lambda done: _take_up(pack(edited(said, done), arrays)))


@often(100, 20_000)
def test_arrays_of_another_shape_or_type(examples: int) -> None:
    said, arrays = unpack(_state())
    kinds = st.sampled_from(["i8", "f8", "u1", "f4", "?", "U3", "c16", "M8[s]"])
    change = st.tuples(st.sampled_from(sorted(arrays)), kinds, st.integers(0, 9))
    # Of each array one change: three characters of a number need not be one.
    changes = st.lists(change, min_size=1, max_size=3, unique_by=lambda done: done[0])

    def holds(done: list[tuple[str, str, int]]) -> None:
        changed: dict[str, Any] = dict(arrays)
        for name, kind, shape in done:
            other = changed[name].reshape(-1)[:: 1 + shape % 3]
            # A time that is not known, NaN, is no integer: NumPy warns of that.
            with np.errstate(invalid="ignore"):
                changed[name] = other.astype(kind) if shape < 6 else changed[name][None]
        _take_up(pack(said, changed))

    search(examples, changes, holds)


# ---- what was found ----


def _renamed(raw: bytes) -> bytes:
    """A header of the archive that differs from its list, which zipfile shows at length."""
    at = raw.index(b"most_channels.npy")
    return raw[: at - 4] + b"\xff\x0f" + raw[at - 2 :]


def _in_list(raw: bytes, at: int, value: int) -> bytes:
    """Another byte in the first entry of the archive's list."""
    entry = raw.index(b"PK\x01\x02")
    return raw[: entry + at] + bytes([value]) + raw[entry + at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_renamed, id="another name"),
        pytest.param(functools.partial(_in_list, at=6, value=64), id="a later version of zip"),
        pytest.param(functools.partial(_in_list, at=8, value=1), id="encrypted"),
        pytest.param(functools.partial(_in_list, at=10, value=1), id="another compression"),
        pytest.param(lambda raw: _with(raw, "reward", {"reporters": None, "baseline": [], "loss": None}), id="reward"),
    ],
)
def test_what_ended_otherwise(damage: Callable[[bytes], bytes]) -> None:
    store = MemoryStore()
    store.put("r/state", damage(_state()))
    with pytest.raises(RunError, match="damaged") as found:
        Coordinator(Plan(run="r", experiment=small_experiment("unit")), store)
    assert len(str(found.value)) < 1000


def _with(raw: bytes, name: str, value: Any) -> bytes:
    """Something else said of the first communicator."""
    said, arrays = unpack(raw)
    said["membership"]["comms"][0][name] = value
    return pack(said, arrays)
