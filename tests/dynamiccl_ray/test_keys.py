"""Keys: bins that are narrow, numbers that are distinct, names that say what they are."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dynamiccl_ray.keys import N_BINS, N_KEYS, bin_bytes, bytes_name, key_name, key_of, key_parts, size_bin
from dynamiccl_ray.knobs import Collective


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


def test_the_largest_key_is_the_last() -> None:
    assert key_of(max(Collective), 1 << 60, True) == N_KEYS - 1


@pytest.mark.parametrize(
    ("nbytes", "name"), [(12, "12B"), (1024, "1KiB"), (65536, "64KiB"), (3 << 19, "1.5MiB"), (8 << 30, "8GiB")]
)
def test_names_of_sizes(nbytes: int, name: str) -> None:
    assert bytes_name(nbytes) == name


def test_a_name_says_that_a_key_is_pipelined() -> None:
    names = [key_name(key_of(Collective.ALL_REDUCE, 1 << 16, pipelined)) for pipelined in (False, True)]
    assert names == ["all_reduce/64KiB", "all_reduce/64KiB/pipelined"]
