"""Keys, bins, actions and the table format."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from dynamiccl_ray.actions import Action
from dynamiccl_ray.keys import N_BINS, N_KEYS, bin_bytes, key_name, key_of, key_parts, size_bin
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_PAIRS, OWN_PAIR, Collective
from dynamiccl_ray.table import DecisionTable

actions = st.builds(
    Action,
    pair=st.integers(0, N_PAIRS - 1),
    channels=st.integers(0, len(CHANNEL_VALUES) - 1),
    chunk=st.integers(0, len(CHUNK_VALUES) - 1),
)


@given(st.integers(0, 2**45), st.integers(0, 2**45))
def test_bins_are_monotonic_and_at_most_an_eighth_wide(a: int, b: int) -> None:
    if a <= b:
        assert size_bin(a) <= size_bin(b)
    low = bin_bytes(size_bin(a))
    if size_bin(a) < N_BINS - 1:
        assert low <= a <= low * 9 // 8


def test_bin_bytes_inverts_size_bin() -> None:
    assert [size_bin(bin_bytes(i)) for i in range(N_BINS)] == list(range(N_BINS))


@given(st.sampled_from(Collective), st.integers(0, 2**40), st.booleans())
def test_keys_are_distinct_and_say_what_they_are(collective: Collective, nbytes: int, pipelined: bool) -> None:
    key = key_of(collective, nbytes, pipelined)
    assert 0 <= key < N_KEYS
    assert key_parts(key) == (collective, pipelined, bin_bytes(size_bin(nbytes)))
    assert collective.name.lower() in key_name(key)


@given(st.dictionaries(st.integers(0, N_KEYS - 1), actions, max_size=50), st.integers(1, 2**40), st.booleans())
def test_a_table_survives_its_bytes(decisions: dict[int, Action], version: int, apply: bool) -> None:
    table = DecisionTable.of(version, decisions, max_channels=32, apply=apply)
    again = DecisionTable.from_bytes(table.to_bytes())
    assert again.actions() == decisions
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
    assert Action().pair == OWN_PAIR
    assert np.array_equal(np.frombuffer(table.to_bytes()[32:], "u1"), np.zeros(N_KEYS * 8, "u1"))
