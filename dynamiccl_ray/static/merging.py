"""Static tables of several runs as one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.keys import key_name
from dynamiccl_ray.static.blocks import Block, entry_text


def merge(tables: Iterable[tuple[str, list[Block]]], *, prefer_first: bool = False) -> list[Block]:
    """All blocks of all tables, which come with their names; those of one communicator become one.

    Where two say different things of a key, or of the number of channels, the first table is right with
    ``prefer_first``; otherwise raises ConfigError that names both.
    """
    merged: dict[tuple[int, int, str], Block] = {}
    said_by: dict[tuple[int, int, str], list[str]] = {}
    for name, blocks in tables:
        for block in blocks:
            known = merged.get(block.shape)
            if known is not None and not prefer_first:
                _refuse_contradictions(known, said_by[block.shape], block, name)
            merged[block.shape] = block if known is None else _joined(known, block)
            said_by.setdefault(block.shape, []).append(name)
    return list(merged.values())


def _joined(first: Block, second: Block) -> Block:
    entries = np.where(first.entries["set"], first.entries.view("<u8"), second.entries.view("<u8"))
    # A count that the first communicator could not have has no effect there, and none in what is merged.
    usable = (first.entries["set"] != 0) | (second.entries["channels"] <= first.max_channels)
    return Block(
        ranks=first.ranks, nodes=first.nodes, name=first.name, max_channels=first.max_channels,
        entries=np.where(usable, entries, 0).astype("<u8").view(first.entries.dtype),
    )  # fmt: skip


def _refuse_contradictions(known: Block, names: list[str], block: Block, name: str) -> None:
    sources = " and ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"
    where = f"{sources} and {name}, {block.about}"
    fix = "leave one out, or take the first of each with --prefer first"
    if known.max_channels != block.max_channels:
        raise ConfigError(f"{where}: max_channels is {known.max_channels} and {block.max_channels}; {fix}")
    ours, theirs = known.entries.view("<u8"), block.entries.view("<u8")
    differing = np.flatnonzero((ours != 0) & (theirs != 0) & (ours != theirs))
    if differing.size:
        key = int(differing[0])
        actions = " and ".join(entry_text(of.entries[key]) for of in (known, block))
        more = f" (and {differing.size - 1} more)" if differing.size > 1 else ""
        raise ConfigError(f"{where}: they differ on {key_name(key)}{more}: {actions}; {fix}")
