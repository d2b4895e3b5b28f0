"""Which ranks of a job a runner serves: its share of the processes on this node, with all of their communicators."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from dynamiccl_ray.actors.ranks import Rank
from dynamiccl_ray.errors import ChannelBusyError, ChannelError
from dynamiccl_ray.plugin_bridge.channel import Channel, owner_lives
from dynamiccl_ray.plugin_bridge.segments import segment_pid, segments

log = logging.getLogger("dynamiccl.runner")


class Serving:
    """Processes and communicators may come and go at any time: ``look`` for it, then ``renew``.

    ``on_node`` runners share the processes of this node.
    """

    def __init__(self, job: str, on_node: int) -> None:
        self._job: Final = job
        self._on_node: Final = on_node
        # By the name of the segment: those that are served, and those that will be.
        self._ranks: Final[dict[str, Rank]] = {}
        self._coming: Final[dict[str, Rank]] = {}
        self._gone: set[str] = set()
        self.dead: Final[set[tuple[int, int]]] = set()
        """Communicators and ranks that are no more; for who tells of them to take out."""
        self._by_comm: dict[int, list[Rank]] = {}
        # Names of segments that the dead have left behind, and of those that were said to be none of ours.
        self._left: Final[set[str]] = set()
        self._told: Final[set[str]] = set()

    @property
    def ranks(self) -> list[Rank]:
        return list(self._ranks.values())

    @property
    def comms(self) -> list[int]:
        """Communicators of which some rank is served here."""
        return sorted(self._by_comm)

    def of(self, comm: int) -> list[Rank]:
        """The ranks of a communicator that are served here."""
        return self._by_comm.get(comm, [])

    def look(self, orphan: Callable[[Rank], object] = lambda _: None) -> bool:
        """Claims what nobody serves, up to this runner's share; ``orphan`` is called with what it leaves to others.
        Whether there is something to ``renew``."""
        paths = sorted(segments(self._job))
        for of in (self._left, self._told):
            of.intersection_update({path.name for path in paths})
        living = {pid for pid, path in {segment_pid(path): path for path in paths}.items() if owner_lives(path)}
        # Processes come and go, so that a share is of those that are here now.
        room = -(-len(living) // self._on_node)
        mine = {rank.channel.identity.pid for rank in (*self._ranks.values(), *self._coming.values())} & living
        others: set[int] = set()
        for path in paths:
            pid = segment_pid(path)
            if path.name in self._ranks or path.name in self._coming or pid in others:
                continue
            try:
                channel = Channel(path)
            except ChannelBusyError:
                # Another runner's, and so are all communicators of the process; or still starting.
                others.add(pid)
                continue
            except ChannelError as e:
                if path.name not in self._told:
                    self._told.add(path.name)
                    log.warning("not served: %s", e)
                continue
            identity = channel.identity
            if identity.rank is None or identity.ranks < 2 or not channel.alive:
                if identity.rank is not None and path.name not in self._left:
                    self._left.add(path.name)
                    self.dead.add((identity.comm_id, identity.rank))
                channel.close()
                continue
            rank = Rank(channel, identity.comm_id, identity.rank)
            if pid in mine or len(mine) < room:
                mine.add(pid)
                self._coming[path.name] = rank
            else:
                orphan(rank)
                channel.close()
        self._gone = {name for name, rank in self._ranks.items() if not rank.channel.alive}
        return self.changed

    def renew(self) -> None:
        """Serves what was claimed, and what was gone no more."""
        for name in self._gone:
            rank = self._ranks.pop(name)
            self.dead.add((rank.comm, rank.rank))
            rank.channel.close()
        self._gone = set()
        self._ranks.update(self._coming)
        self._coming.clear()
        self._by_comm = {}
        for rank in self._ranks.values():
            self._by_comm.setdefault(rank.comm, []).append(rank)

    @property
    def changed(self) -> bool:
        """There is something to ``renew``, by the last look."""
        return bool(self._coming or self._gone)

    def close(self) -> None:
        """Gives all claims back."""
        for rank in (*self._ranks.values(), *self._coming.values()):
            rank.channel.close()
        for of in (self._ranks, self._coming, self._by_comm):
            of.clear()
