"""Decision tables: what is written can be read, and damage is noticed."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from dynamiccl_ray.actions import OWN_ACTION, Action
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.keys import N_KEYS
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_PAIRS

actions = st.builds(
    Action,
    pair=st.integers(0, N_PAIRS - 1),
    channels=st.integers(0, len(CHANNEL_VALUES) - 1),
    chunk=st.integers(0, len(CHUNK_VALUES) - 1),
)


@given(st.dictionaries(st.integers(0, N_KEYS - 1), actions, max_size=50), st.integers(1, 2**40), st.booleans())
def test_a_table_survives_its_bytes(decisions: dict[int, Action], version: int, apply: bool) -> None:
    table = DecisionTable.of(version, decisions, max_channels=32, apply=apply)
    again = DecisionTable.from_bytes(table.to_bytes())
    assert again.actions() == decisions
    flat = again.flat()
    assert {key: int(flat[key]) for key in decisions} == {key: action.flat for key, action in decisions.items()}
    assert np.delete(flat, list(decisions)).tolist() == [OWN_ACTION] * (N_KEYS - len(decisions))
    assert (again.version, again.max_channels, again.apply) == (version, 32, apply)
    assert again.digest == table.digest


@given(st.integers(0, 24991), st.integers(1, 255))
def test_a_damaged_table_is_refused(position: int, flip: int) -> None:
    raw = bytearray(DecisionTable.of(3, {5: Action(pair=4)}, max_channels=8).to_bytes())
    raw[position] ^= flip
    with pytest.raises(ValueError, match="decision table"):
        DecisionTable.from_bytes(bytes(raw))


def test_the_digest_covers_version_entries_limits_and_mode() -> None:
    base = DecisionTable.of(1, {5: Action(pair=4)}, max_channels=8)
    others = [
        base.with_version(2),
        DecisionTable.of(1, {5: Action(pair=5)}, max_channels=8),
        DecisionTable.of(1, {6: Action(pair=4)}, max_channels=8),
        DecisionTable.of(1, {5: Action(pair=4)}, max_channels=9),
        DecisionTable.of(1, {5: Action(pair=4)}, max_channels=8, apply=False),
    ]
    assert len({base.digest, *(o.digest for o in others)}) == 6


def test_an_empty_table_leaves_every_key_alone() -> None:
    table = DecisionTable.of(1, {}, max_channels=1)
    assert not table.entries["set"].any()
    assert np.array_equal(np.frombuffer(table.to_bytes()[32:], "u1"), np.zeros(N_KEYS * 8, "u1"))
