"""What must add up, and what must be the same on all ranks. Pure: the attack only brings the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One segment's own counts, once its communicator has ended."""

    comm: int
    rank: int
    calls: int
    records: int
    """That were written into the ring."""
    read: int
    """... and taken out of it."""
    dropped: int
    """By every cause."""
    unprofiled: int

    @property
    def uncounted(self) -> int:
        """Calls that are neither a record, nor counted under a cause; less than 0 where something was counted twice."""
        return self.calls - self.records - self.dropped - self.unprofiled


@dataclass
class Span:
    """Of standing still, on the monotonic clock."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def beyond(waits: Sequence[Span], anew: Sequence[Span], bound_s: float) -> list[Span]:
    """Waits longer than the bound, less what of them lies between two control planes, ``anew``."""
    return [
        wait
        for wait in waits
        if wait.seconds - sum(max(0.0, min(wait.end, of.end) - max(wait.begin, of.begin)) for of in anew) > bound_s
    ]


def two_tables(taken: Mapping[tuple[int, int], Mapping[int, int]]) -> list[tuple[int, int]]:
    """(Communicator, version) of which two ranks put the table in force from different calls on."""
    return [of for of, at_call in taken.items() if len(set(at_call.values())) > 1]


def uncounted(segments: Sequence[Counted], played: Mapping[tuple[int, int], int]) -> list[str]:
    """What is wrong with the counts, in words. ``played``: collectives by communicator and rank, by the job's log."""
    wrong = []
    for of in segments:
        where = f"communicator {of.comm:x}, rank {of.rank}"
        if (log := played.get((of.comm, of.rank))) != of.calls:
            wrong.append(f"{where}: the plugin counted {of.calls} calls, and the log has {log}")
        if of.uncounted:
            wrong.append(f"{where}: {of.uncounted} of {of.calls} calls are neither recorded nor counted under a cause")
        if not 0 <= of.read <= of.records:
            wrong.append(f"{where}: {of.read} records were read, and {of.records} written")
    if missing := played.keys() - {(of.comm, of.rank) for of in segments}:
        wrong.append(f"no segment was seen of {sorted(missing)}")
    return wrong


def uncounted_records(segments: Sequence[Counted]) -> int:
    return sum(abs(of.uncounted) for of in segments)
