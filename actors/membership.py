"""Which runner serves which ranks of which communicators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.actors.messages import Member
from dynamiccl_ray.plugin_bridge.coverage import Coverage

Place = tuple[int, int]
"""A communicator, and a rank of it."""
# Rounds for which a communicator without ranks is remembered: its runner may only have died.
_REMEMBERED: Final = 100


class Membership:
    """``comms`` has every communicator by its id, whether its ranks are served or not.

    ``new`` makes one of its number, counted from 0, and one of its ranks.
    """

    def __init__(self, new: Callable[[int, Member], Communicator]) -> None:
        self._new: Final = new
        self.comms: Final[dict[int, Communicator]] = {}
        self._runners: Final[dict[str, set[Place]]] = {}
        self._numbered = 0
        # Of communicators that are gone.
        self._unused = self._dropped = self._switches = 0
        self._hold_wait_s = 0.0
        self._coverage = Coverage()

    # -- runners --

    def join(self, runner: str, members: list[Member], gone: frozenset[Place] = frozenset()) -> None:
        """A runner serves these ranks from now on, and no others; those of ``gone`` are no more."""
        served = {(m.comm, m.rank) for m in members}
        for comm_id, rank in self._runners.get(runner, set()) - served:
            self.comms[comm_id].members.pop(rank, None)
        for ranks in self._runners.values():
            ranks -= served
        self._runners[runner] = served
        for member in members:
            comm = self.hear(member)
            comm.members[member.rank] = member
        for comm_id, rank in gone - served:
            if comm_id in self.comms:
                self.comms[comm_id].gone.add(rank)

    def leave(self, runner: str) -> None:
        """A runner is gone; its ranks wait for another one."""
        for comm_id, rank in self._runners.pop(runner, set()):
            self.comms[comm_id].members.pop(rank, None)

    @property
    def runners(self) -> tuple[str, ...]:
        """Names of all that serve, or may again."""
        return tuple(sorted(self._runners))

    def silent(self, heard: Iterable[str]) -> set[str]:
        """Runners that serve a rank and are not among these."""
        return {r for r, ranks in self._runners.items() if ranks} - set(heard)

    # -- communicators --

    def hear(self, member: Member) -> Communicator:
        """What a rank's segment says, whether it is served from now on or not."""
        comm = self.comms.get(member.comm) or self.add(member)
        if comm.agreement.hear(member.rank, member.standing, member.term):
            comm.adopt_from(member)
        return comm

    def add(self, member: Member) -> Communicator:
        """A communicator that is new."""
        comm = self.comms[member.comm] = self._new(self._numbered, member)
        self._numbered += 1
        return comm

    def bury(self) -> list[Communicator]:
        """Takes out communicators of which every rank is no more."""
        return self._take_out(c for c, comm in self.comms.items() if comm.gone >= comm.agreement.ranks)

    def forget(self) -> list[Communicator]:
        """A round is over: takes out communicators that nobody has served for a while."""
        for comm in self.comms.values():
            comm.rounds_alone = 0 if comm.members else comm.rounds_alone + 1
        return self._take_out(c for c, comm in self.comms.items() if comm.rounds_alone > _REMEMBERED)

    def _take_out(self, ids: Iterable[int]) -> list[Communicator]:
        gone = [self.comms.pop(comm_id) for comm_id in list(ids)]
        for comm in gone:
            self._unused += comm.unused
            self._dropped += sum(comm.dropped.values())
            self._switches += comm.switches
            self._hold_wait_s += sum(comm.hold_wait_s.values())
            for ranks in self._runners.values():
                ranks -= {(comm.example.comm, rank) for rank in comm.agreement.ranks}
        self._coverage = Coverage.sum([self._coverage, *(of for comm in gone for of in comm.coverage.values())])
        return gone

    # -- counts, of communicators that are gone, too --

    @property
    def unused(self) -> int:
        """Collectives and records that taught nothing."""
        return self._unused + sum(comm.unused for comm in self.comms.values())

    @property
    def dropped(self) -> int:
        """Records that were lost between NCCL and the runner."""
        return self._dropped + sum(sum(comm.dropped.values()) for comm in self.comms.values())

    @property
    def hold_wait_s(self) -> float:
        """For which ranks have waited for decisions, all of them together."""
        return self._hold_wait_s + sum(sum(comm.hold_wait_s.values()) for comm in self.comms.values())

    @property
    def coverage(self) -> Coverage:
        """What became of all collectives, as far as this coordinator has heard."""
        return Coverage.sum([self._coverage, *(of for comm in self.comms.values() for of in comm.coverage.values())])

    @property
    def switches(self) -> int:
        """Tables that came into force."""
        return self._switches + sum(comm.switches for comm in self.comms.values())

    # -- durability --

    def state(self) -> dict[str, Any]:
        """As JSON; runners join again."""
        return {
            "comms": [comm.state() for comm in self.comms.values()],
            "gone": {"numbered": self._numbered} | {name: getattr(self, f"_{name}") for name in _GONE},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        for of in state["comms"]:
            self.add(Member(**of["example"])).restore(of)
        for name in ("numbered", *_GONE):
            setattr(self, f"_{name}", int(state["gone"][name]))


_GONE: Final = ("unused", "dropped", "switches")
