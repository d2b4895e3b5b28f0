"""Tables of several runs as one."""

from __future__ import annotations

import numpy as np
import pytest
from test_blocks import block_of

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.static.merging import merge

KEY = key_of(4, 1 << 20, False)
RING, TREE = (1, 2, 4, 0), (0, 1, 2, 16)


def test_blocks_of_different_communicators_stand_beside_each_other() -> None:
    blocks = [block_of({KEY: RING}), block_of({KEY: TREE}, "dp"), block_of({KEY: TREE}, ranks=16)]
    merged = merge([("a", blocks[:1]), ("b", blocks[1:])])
    assert [of.shape for of in merged] == [(8, 2, ""), (8, 2, "dp"), (16, 2, "")]
    assert [of.digest for of in merged] == [of.digest for of in blocks]


def test_keys_of_one_communicator_are_joined() -> None:
    a, b = block_of({KEY: RING, KEY + 1: TREE}), block_of({KEY: RING, KEY + 2: TREE})
    (merged,) = merge([("a", [a]), ("b", [b])])
    assert merged.digest == block_of({KEY: RING, KEY + 1: TREE, KEY + 2: TREE}).digest


def test_a_contradiction_names_both() -> None:
    tables = [("a", [block_of({KEY: RING})]), ("b", [block_of({KEY + 1: RING})])]
    tables.append(("c", [block_of({KEY: TREE, KEY + 1: TREE})]))
    with pytest.raises(ConfigError) as refused:
        merge(tables)
    assert str(refused.value) == (
        "a and b and c, 8 ranks on 2 nodes: they differ on all_reduce/1MiB (and 1 more): ring/simple 4ch and "
        "tree/ll128 2ch chunk 64KiB; leave one out, or take the first of each with --prefer first"
    )
    (merged,) = merge(tables, prefer_first=True)
    assert merged.digest == block_of({KEY: RING, KEY + 1: RING}).digest


def test_other_channels_are_a_contradiction_too() -> None:
    few, many = block_of({KEY + 1: RING}, max_channels=4), block_of({KEY: RING, KEY + 2: (1, 2, 8, 0)}, max_channels=16)
    with pytest.raises(ConfigError, match="max_channels is 4 and 16"):
        merge([("a", [few]), ("b", [many])])
    (merged,) = merge([("a", [few]), ("b", [many])], prefer_first=True)
    assert (merged.max_channels, np.flatnonzero(merged.entries["set"]).tolist()) == (4, [KEY, KEY + 1])
