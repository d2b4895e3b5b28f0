"""Ranks that a control plane left behind are given back to NCCL: ``dynamiccl release``, for a person, without Ray.

Where all that knew a decision are gone, ranks that promised wait until somebody who sees all of them decides.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dynamiccl_ray.actors.messages import Member
from dynamiccl_ray.actors.ranks import Rank
from dynamiccl_ray.control.agreement import Agreement, Answer, Decision, new_term
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import ChannelBusyError, RunError
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.layout import Prepared
from dynamiccl_ray.plugin_bridge.segments import claimed_by, segments

_MARGIN: Final = 64
"""Calls that a hold lies ahead; nothing is on the way between two processes here."""


@dataclass(frozen=True, kw_only=True)
class Released:
    """What became of one communicator."""

    comm: int
    ranks: int
    was_open: int
    """The version that its ranks waited for, or could have; 0 for none."""
    committed: bool
    """That version had been committed: it came into force on all ranks before it was taken back."""
    was_in_force: int
    """Version of the table that is taken back; 0 where it was NCCL's own choice already."""


def release(job: str, *, wait_s: float = 10.0) -> list[Released]:
    """Finishes what is open on the ranks of a job and puts NCCL's own choice in force, by agreement.

    Raises RunError, and has changed nothing, where a rank is served by a control plane, or is not on this machine; and
    where a table is still to come into force after ``wait_s`` because the job stands still.
    """
    with contextlib.ExitStack() as stack:
        comms: dict[int, list[Rank]] = {}
        for path in sorted(segments(job)):
            try:
                channel = stack.enter_context(Channel(path))
            except ChannelBusyError:
                raise RunError(
                    f"{path.name} is served by process {claimed_by(path)}; end that control plane with Ctrl-C or "
                    "SIGTERM: it gives its ranks back itself"
                ) from None
            identity = channel.identity
            if channel.alive and identity.rank is not None:
                comms.setdefault(identity.comm_id, []).append(Rank(channel, identity.comm_id, identity.rank))
        for comm, ranks in comms.items():
            _require_all(comm, ranks)
        return [_release(comm, ranks, time.monotonic() + wait_s) for comm, ranks in comms.items()]


def _require_all(comm: int, ranks: list[Rank]) -> None:
    of = ranks[0].channel.identity.ranks
    missing = sorted(set(range(of)) - {rank.rank for rank in ranks})
    if missing:
        raise RunError(
            f"communicator {comm:x}: ranks {missing} of {of} are not on this machine, and what they were told cannot "
            "be known here; start `dynamiccl online` on the cluster: it finishes what is open, and gives the ranks "
            "back when it ends"
        )


def _release(comm: int, ranks: list[Rank], deadline: float) -> Released:
    term = new_term(max(rank.channel.status.term for rank in ranks))
    agreement = Agreement((rank.rank for rank in ranks), term)
    members = [rank.shown_to(term) for rank in ranks]
    for member in members:
        agreement.hear(member.rank, member.standing, member.term)
    waited_for = {rank.channel.status.open_version for rank in ranks} - {0}
    open_version = max(waited_for, default=0)
    decision = agreement.resolve(open_version) if open_version else None
    for rank in ranks:
        rank.settle(_told(agreement), term)
    _until(lambda: all(rank.channel.fold() for rank in ranks), deadline, comm)
    in_force = max(rank.channel.status.base_version for rank in ranks)
    if in_force and not _is_nccls_own(ranks[0]):
        versions = itertools.count(1 + max(member.standing.newest for member in members))
        _until(lambda: _switch_to_own(agreement, ranks, next(versions)), deadline, comm)
        _until(lambda: all(rank.channel.fold() for rank in ranks), deadline, comm)
    return Released(
        comm=comm,
        ranks=len(ranks),
        was_open=open_version,
        committed=decision is not None and decision.switch_at is not None,
        was_in_force=in_force,
    )


def _told(agreement: Agreement) -> Callable[[Member], Decision | None]:
    return lambda member: agreement.resolve(member.standing.pending)


def _is_nccls_own(rank: Rank) -> bool:
    table = rank.channel.table
    return table is None or not table.flat().any()


def _switch_to_own(agreement: Agreement, ranks: list[Rank], version: int) -> bool:
    table = DecisionTable.of(version, {}, max_channels=1)
    agreement.open(version)
    decision = None
    for rank in ranks:
        outcome, hold_at, digest = rank.channel.prepare(table, _MARGIN)
        promised = outcome is Prepared.PREPARED
        decision = agreement.answer(
            version, Answer(rank=rank.rank, digest=digest, hold_at=hold_at if promised else None)
        )
    assert decision is not None, "all have answered"
    for rank in ranks:
        rank.channel.decide(version, decision.switch_at)
    return decision.switch_at is not None


def _until(condition: Callable[[], bool], deadline: float, comm: int) -> None:
    while not condition():
        if time.monotonic() > deadline:
            raise RunError(
                f"communicator {comm:x}: a table comes into force at a call that the job has not made yet; nothing "
                "waits for us: try again when it goes on"
            )
        time.sleep(0.01)
