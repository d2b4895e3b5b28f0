"""Tables for a job that stands still between commands, agreed on by all ranks of a communicator from here.

It is the coordinator's protocol without a coordinator: every rank prepares, all commit at the largest hold. The loop
must not serve the job meanwhile: a segment has one steering process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.actions import Action
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import ChannelError, RunError
from dynamiccl_ray.knobs import CHANNEL_VALUES, Collective, pair_index
from dynamiccl_ray.plugin_bridge.channel import Channel, Status
from dynamiccl_ray.plugin_bridge.layout import ABORT, Prepared
from dynamiccl_ray.plugin_bridge.segments import segments

Records = npt.NDArray[Any]

QUIET_S: Final = 3.0
"""How long a record may take."""
POLL_S: Final = 0.002


class Communicator:
    """The channels of one communicator, claimed. ``channels`` are in the order of its ranks."""

    def __init__(self, comm: int, channels: Sequence[Channel]) -> None:
        self.comm = comm
        self.channels = list(channels)
        self.identity = channels[0].identity
        self.silent: frozenset[Collective] = frozenset()
        """Collectives that NCCL reports no events of."""

    @property
    def size(self) -> int:
        return len(self.channels)

    @property
    def takes_chunks(self) -> bool:
        """NCCL asks a tuner for chunk sizes from its sixth interface on."""
        return self.identity.tuner_abi >= 6

    def status(self) -> list[Status]:
        return [channel.status for channel in self.channels]

    def stage(self, actions: Mapping[int, Action], *, apply: bool = True) -> int:
        """Puts a table in force at the next call on every rank, and returns its version.

        Raises RunError if the ranks are not at the same call, which they must be between two commands, or if one
        refuses.
        """
        stages = self.status()
        at = [status.dseq for status in stages]
        if len(set(at)) > 1:
            raise RunError(f"communicator {self.comm:x}: ranks made {at} calls of the tuner; all must make the same")
        version = 1 + max(max(status.base_version, status.pending_version) for status in stages)
        table = DecisionTable.of(version, dict(actions), max_channels=max(CHANNEL_VALUES), apply=apply)
        holds = []
        for rank, channel in enumerate(self.channels):
            channel.fold()
            outcome, hold, digest = channel.prepare(table, 0)
            if outcome is not Prepared.PREPARED or digest != table.digest:
                for earlier in self.channels[:rank]:
                    earlier.decide(version, None)
                raise RunError(f"communicator {self.comm:x}: rank {rank} answers {outcome.name} to version {version}")
            holds.append(hold)
        for rank, channel in enumerate(self.channels):
            if not channel.decide(version, max(holds)):
                raise RunError(f"communicator {self.comm:x}: rank {rank} does not take version {version}")
        return version

    def settle(self) -> None:
        """Ends an agreement that the loop left open: as any rank was told, or with ABORT where none was."""
        stages = self.status()
        told = {s.pending_version: s.decision for s in stages if s.decision not in (0, ABORT)}
        for channel, status in zip(self.channels, stages, strict=True):
            if status.open_version and not status.decision:
                channel.decide(status.open_version, told.get(status.open_version))

    def learn_silent(self, calls: Sequence[Collective]) -> None:
        """Drains the records of these calls, the first ones, and remembers which collectives have none."""
        records = np.concatenate(self.drain(calls))
        seen = {int(func) for func in np.unique(records["func"])}
        self.silent = frozenset(calls) - seen

    def drain(self, calls: Sequence[Collective] = ()) -> list[Records]:
        """Everything recorded since the last call, per rank in the order of its tuner calls.

        Waits for the records of these calls, because NCCL's proxy threads report late; no longer than ``QUIET_S``.
        """
        at_least = sum(collective not in self.silent for collective in calls)
        found: list[list[Records]] = [[] for _ in self.channels]
        deadline = time.monotonic() + QUIET_S
        while True:
            for mine, channel in zip(found, self.channels, strict=True):
                mine.append(channel.drain().copy())
            if all(sum(map(len, mine)) >= at_least for mine in found) or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        joined = [np.concatenate(mine) for mine in found]
        return [records[np.argsort(records["dseq"], kind="stable")] for records in joined]

    def offered(self) -> dict[int, frozenset[int]]:
        """Key -> pairs that NCCL offers on every rank, of all keys that were used so far."""
        found: dict[int, frozenset[int]] = {}
        for channel in self.channels:
            for row in channel.cost_rows():
                algo, proto = np.nonzero(row["cost_us"] >= 0)
                pairs = frozenset(pair_index(int(a), int(p)) for a, p in zip(algo, proto, strict=True))
                found[int(row["key"])] = found.get(int(row["key"]), pairs) & pairs
        return found

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


def communicators(job: str, *, ranks: int | None = None, timeout_s: float = 30.0) -> list[Communicator]:
    """Claims every communicator of a job, in the order in which they were made.

    Waits until each has all its ranks here; with ``ranks`` also until there is one of that size. Raises RunError with
    what was found if that takes too long.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        opened, complaints = _opened(job)
        found = [Communicator(comm, [of[rank] for rank in sorted(of)]) for comm, of in opened.items()]
        whole = bool(found) and all(c.size == c.identity.ranks for c in found)
        if whole and not complaints and (ranks is None or any(c.size == ranks for c in found)):
            return sorted(found, key=lambda c: c.identity.ordinal)
        seen = [f"{c.comm:x} with {c.size} of {c.identity.ranks} ranks" for c in found]
        for each in found:
            each.close()
        if time.monotonic() > deadline:
            raise RunError(
                f"job {job}: no whole communicator within {timeout_s:g} s; found {', '.join(seen) or 'no segment'}"
                f"{''.join(f'; {text}' for text in complaints)}. Did NCCL load the plugin? NCCL_DEBUG=INFO says"
            )
        time.sleep(0.1)


def _opened(job: str) -> tuple[dict[int, dict[int, Channel]], list[str]]:
    opened: dict[int, dict[int, Channel]] = {}
    complaints = []
    for path in sorted(segments(job)):
        try:
            channel = Channel(path)
        except ChannelError as e:
            complaints.append(str(e))
            continue
        identity = channel.identity
        if identity.rank is None or identity.closed or not channel.alive:
            channel.close()
            continue
        opened.setdefault(identity.comm_id, {})[identity.rank] = channel
    return opened, complaints
