"""Actions as numbers, and as tables hold them."""

from __future__ import annotations

import numpy as np

from dynamiccl_ray.actions import (
    N_ACTIONS,
    N_CHANNELS,
    N_CHUNKS,
    OWN_ACTION,
    Action,
    action_of,
    action_parts,
    flat_action,
)
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_PAIRS, OWN_PAIR, Algorithm, Protocol, pair_index


def test_every_combination_has_a_number_of_its_own_the_chunk_fastest() -> None:
    grid = np.meshgrid(np.arange(N_PAIRS), np.arange(N_CHANNELS), np.arange(N_CHUNKS), indexing="ij")
    flat = flat_action(*grid)
    assert flat.ravel().tolist() == list(range(N_ACTIONS))
    for part, expected in zip(action_parts(flat), grid, strict=True):
        np.testing.assert_array_equal(part, expected)


def test_indices_are_broadcast() -> None:
    assert flat_action([0, 1], 0, 2).tolist() == [2, N_CHANNELS * N_CHUNKS + 2]


def test_an_action_and_its_number_are_the_same() -> None:
    for flat in range(0, N_ACTIONS, 7):
        action = action_of(flat)
        assert action.flat == flat
        assert (action.pair, action.channels, action.chunk) == tuple(int(part) for part in action_parts(flat))


def test_what_is_nccls_own_is_left_out_of_a_name() -> None:
    assert Action().flat == OWN_ACTION
    assert Action().pair == OWN_PAIR
    assert Action().name == "nccl"
    tree = pair_index(Algorithm.TREE, Protocol.LL)
    assert Action(pair=tree).name == "tree/ll"
    assert Action(pair=tree, channels=CHANNEL_VALUES.index(4), chunk=CHUNK_VALUES.index(1 << 16)).name == (
        "tree/ll 4ch chunk 64KiB"
    )
    assert Action(chunk=CHUNK_VALUES.index(1 << 20)).name == "nccl chunk 1MiB"
