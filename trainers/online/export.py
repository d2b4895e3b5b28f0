"""``dynamiccl export``: what a run has learned, as the blocks of a static table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.actions import OWN_ACTION, action_parts
from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.arrays import Float64, Int64
from dynamiccl_ray.control.loop import Loop
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.keys import N_BINS, N_KEYS
from dynamiccl_ray.knobs import CHANNEL_VALUES
from dynamiccl_ray.static.blocks import MOST_CHANNELS, Block, can_be_named
from dynamiccl_ray.trainers.online.left import left_coordinator

# Bins: two octaves.
_MOST_BETWEEN: Final = 16


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Blocks, and what of the run is not in them."""

    blocks: list[Block]
    warnings: list[str]


@dataclass(frozen=True, kw_only=True)
class _Learned:
    """What one communicator has learned."""

    comm: Communicator
    actions: Int64
    """(N_KEYS,) flat actions; ``OWN_ACTION`` where NCCL decides."""
    samples: Float64
    """(N_KEYS,) how much each of these rests on; 0 for keys that say nothing."""


def export_run(run: Path, *, everything: bool = False, any_name: bool = False, between: bool = False) -> Exported:
    """What the keys exploit, and with ``everything`` also what was in force of those that do not.

    Communicators of the same name, ranks and nodes are one block; with ``any_name`` names count for nothing, and blocks
    are about communicators of any. ``between`` also takes the sizes between two neighbours, at most two octaves apart,
    that settled on the same action. Raises ConfigError if ``run`` is not a run, or has
    nothing to say.
    """
    coordinator = left_coordinator(run)
    warnings: list[str] = []
    by_shape: dict[tuple[int, int, str], list[_Learned]] = {}
    for comm_id, comm in coordinator.comms.items():
        of = comm.example
        what = f"communicator {comm_id:016x}"
        if comm.off:
            warnings.append(f"{what} is left out: its tuning was off: {comm.off}")
        elif not can_be_named(str(of.name)):
            warnings.append(f"{what} is left out: a table cannot say its name {of.name!r}")
        else:
            learned, unsettled = _learned(coordinator.loop, comm, everything)
            by_shape.setdefault((of.ranks, of.nodes, "" if any_name else of.name), []).append(learned)
            if unsettled:
                warnings.append(f"{what}: {unsettled} keys had not settled and are left to NCCL; --all takes them, too")
    blocks = [_block(shape, same, between, warnings) for shape, same in by_shape.items()]
    blocks = [block for block in blocks if block.entries["set"].any()]
    if not blocks:
        others = np.delete(coordinator.loop.evidence.samples, OWN_ACTION, -1).any()
        best = "was the best of every key" if others else "is all that it has measured"
        why = "; ".join(warnings) or f"NCCL's own choice {best}"
        raise ConfigError(f"{run}: nothing to export: {why}")
    return Exported(blocks=blocks, warnings=warnings)


def _learned(loop: Loop, comm: Communicator, everything: bool) -> tuple[_Learned, int]:
    """And how many keys are left out."""
    exploited = loop.exploited()[comm.rows]
    exploits = exploited >= 0
    in_force = np.array([comm.in_force.get(key, OWN_ACTION) for key in comm.keys.tolist()], np.int64)
    taken = exploits | everything
    chosen = np.where(exploits, exploited, np.where(taken, in_force, OWN_ACTION))
    actions, samples = np.full(N_KEYS, OWN_ACTION), np.zeros(N_KEYS)
    actions[comm.keys] = chosen
    # One more, so that what is taken goes before what is not, whatever was measured.
    samples[comm.keys] = np.where(taken, 1 + loop.evidence.samples[comm.rows, chosen], 0)
    return _Learned(comm=comm, actions=actions, samples=samples), int(np.count_nonzero(~taken))


def _block(shape: tuple[int, int, str], same: Iterable[_Learned], between: bool, warnings: list[str]) -> Block:
    """Where communicators differ, what rests on more measurements is right."""
    every = list(same)
    ranks, nodes, name = shape
    actions = np.stack([of.actions for of in every])
    samples = np.stack([of.samples for of in every])
    best = np.take_along_axis(actions, samples.argmax(axis=0)[None], axis=0)[0]
    differing = np.count_nonzero(((actions != best) & (samples > 0)).any(axis=0))
    if between:
        _fill(best, samples.max(axis=0) > 0)
    channels = min(MOST_CHANNELS, *(of.comm.max_channels for of in every))
    keys = np.flatnonzero(best != OWN_ACTION)
    too_many = np.array(CHANNEL_VALUES)[action_parts(best[keys])[1]] > channels
    block = Block(
        ranks=ranks, nodes=nodes, name=name, max_channels=channels,
        entries=DecisionTable.of_flat(1, keys[~too_many], best[keys[~too_many]], max_channels=channels).entries,
    )  # fmt: skip
    if differing:
        warnings.append(
            f"{len(every)} communicators of {block.about} differ on {differing} keys: the action with the most "
            "measurements is taken"
        )
    if too_many.any():
        warnings.append(
            f"{block.about}: {np.count_nonzero(too_many)} keys ask for more than its {channels} channels, "
            "which no rank applied; they are left to NCCL"
        )
    return block


def _fill(actions: Int64, known: NDArray[np.bool_]) -> None:
    """Keys between two known ones of the same collective and kind that have the same action get it, too."""
    keys = np.flatnonzero(known)
    for key, after in pairwise(keys.tolist()):
        near = key // N_BINS == after // N_BINS and after - key <= _MOST_BETWEEN
        if near and actions[key] == actions[after]:
            actions[key:after] = actions[key]
