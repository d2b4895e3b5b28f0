"""What every runner is told of each communicator: what is wanted of its keys, and what is to be decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import numpy as np

from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.actors.messages import CommContext
from dynamiccl_ray.actors.reduction import positions
from dynamiccl_ray.arrays import Bool, Float, Int64
from dynamiccl_ray.control.loop import Due, Loop, Phase

# Epochs without a collective of it after which no epoch waits for a key.
_WAITED_FOR: Final = 3
NONE: Final = np.zeros(0, np.int64)


def of_comm(loop: Loop, due: Due, comm: Communicator) -> Int64:
    """Which of the keys that are due are a communicator's."""
    return np.flatnonzero(loop.keys.group[due.row] == comm.number)


def learns(loop: Loop, comm: Communicator, held: Bool) -> bool:
    """Some key of it that runs and is not ``held`` (K,) has not learned yet, or nothing is known of it."""
    runs = loop.idle[comm.rows] <= _WAITED_FOR
    return not len(comm.rows) or bool((runs & (loop.phase[comm.rows] != Phase.EXPLOIT) & ~held[comm.rows]).any())


def comm_contexts(
    loop: Loop,
    due: Due,
    comms: Mapping[int, Communicator],
    rewards: Mapping[int, Float],
    *,
    held: Bool,
    wanted: Int64,
    duties: Mapping[int, int],
) -> tuple[CommContext, ...]:
    """Of these communicators, and of those of their keys that are due. The loop does not decide on keys that are
    ``held`` (K,); ``wanted`` (K,) is what is wanted of each. ``duties`` by communicator.
    """
    due = due.part(np.flatnonzero(~held[due.row]))
    waited_for = (loop.idle <= _WAITED_FOR) & (loop.measured > 0) & (loop.phase != Phase.EXPLOIT) & ~held
    need = np.where(waited_for, loop.need, 0)
    contexts = []
    for comm_id, comm in comms.items():
        mine = NONE if comm.off else of_comm(loop, due, comm)
        part = due.part(mine)
        at = positions(comm.rows, part.row)
        needed = need[comm.rows]
        needed[at] = np.where(waited_for[part.row], part.takes, 0)
        # Until one of its decisions is over: what takes more goes on in the next epoch. Else what is looked at once
        # would be in force for as long as what others compare.
        needed = np.minimum(needed, needed[needed > 0].min(initial=np.iinfo(np.int64).max))
        contexts.append(
            CommContext(
                comm=comm_id,
                keys=comm.keys.copy(),
                wanted=wanted[comm.rows],
                offered=loop.offers.known[comm.rows],
                need=needed,
                in_force=comm.in_force,
                version_in_force=comm.version,
                applied=comm.version not in comm.recorded,
                due=dataclasses.replace(part, row=at),
                # Nobody was told of a decision that came to its end before all ranks were served.
                reward=rewards.get(comm_id, np.full(len(of_comm(loop, due, comm)), np.nan))[: len(mine)],
                max_channels=comm.max_channels,
                in_band=comm.in_band,
                off=bool(comm.off),
                duty=duties[comm_id],
            )
        )
    return tuple(contexts)
