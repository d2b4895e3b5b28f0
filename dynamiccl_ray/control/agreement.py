"""All ranks of a communicator switch tables at the same call, or none does.

Two-phase commit with two twists. A rank goes on serving calls while it is asked: it answers PREPARE with ``hold_at``,
the call at which it will wait if it has heard nothing, and the switch happens at the largest of those. And nothing is
remembered but in the ranks themselves, whose segments outlive every process of the control plane: who is asked about
a version that it did not open first hears from every rank of the communicator what that rank was told. A COMMIT that
any of them knows is adopted; where all are known and none knows one, there was none, and ABORT is safe. The rank's
half is ``plugin_bridge/native/reader.c``; docs/channel.md has the argument, ``model/`` checks it.

Two control planes may be up at once, and messages may arrive late. So each coordinator has a *term*, larger than that
of any before it, and each segment names the newest one that it was shown to: what was heard under another is not
believed.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol


class Store(Protocol):
    """A small map for what a run has learned. No decision of an agreement depends on it."""

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None: ...


class MemoryStore:
    """A store for runs in one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One rank's answer to PREPARE; ``hold_at`` is None if it could not promise."""

    rank: int
    digest: int
    hold_at: int | None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """COMMIT at call ``switch_at``, or ABORT (None). ``adopt_leader`` asks for the leader's table next time."""

    version: int
    switch_at: int | None
    adopt_leader: bool = False


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What one rank's segment says, read by the one runner that may write to it."""

    base: int = 0
    """Version in force; 0 for none."""
    base_at: int = 0
    """The call at which it came into force."""
    pending: int = 0
    """The last version that it was asked for."""
    switch_at: int | None = None
    """Its COMMIT; None where it is undecided or was aborted."""

    @property
    def newest(self) -> int:
        """No later version was ever asked for here."""
        return max(self.base, self.pending)

    def committed(self, version: int) -> Decision | None:
        """COMMIT, if this rank was told so."""
        if self.base == version:
            return Decision(version=version, switch_at=self.base_at)
        if self.pending == version and self.switch_at is not None:
            return Decision(version=version, switch_at=self.switch_at)
        return None


def new_term(above: int = 0) -> int:
    """A term that no other coordinator has: larger than all of the past, and than ``above``."""
    past = max(above, time.time_ns()) >> _CHANCE_BITS
    return (past + 1) << _CHANCE_BITS | random.SystemRandom().getrandbits(_CHANCE_BITS)


_CHANCE_BITS: Final = 16


class Agreement:
    """The coordinator's half, for one communicator. At most one version is open at a time.

    All of it may be lost at any moment. A rank is heard (``hear``) whenever a runner begins to serve it; a version is
    opened only once all have been heard, so ``first``, the first one opened, is newer than any that they know.
    """

    def __init__(self, ranks: Iterable[int], term: int) -> None:
        self.ranks: Final = frozenset(ranks)
        self.term: Final = term
        self._standing: Final[dict[int, Standing]] = {}
        self._first: int | None = None
        self._open: int | None = None
        self._answers: dict[int, Answer] = {}
        self._committed: Decision | None = None
        self.digest_mismatches = 0

    # -- what the ranks know --

    def hear(self, rank: int, standing: Standing, term: int) -> bool:
        """What a rank's segment says, shown to the coordinator of ``term``; False if that is another one."""
        if term != self.term:
            return False
        self._standing[rank] = standing
        return True

    @property
    def silent(self) -> frozenset[int]:
        """Ranks of which nothing has been heard yet."""
        return self.ranks - self._standing.keys()

    def resolve(self, version: int) -> Decision | None:
        """What holds about a version that a rank promised and was told nothing of; None while that cannot be known."""
        if self._committed is not None and self._committed.version == version:
            return self._committed
        if self._first is not None and version >= self._first:
            # Its own: not committed, so nobody was told so, and once closed nobody will be.
            return self.abort(version)
        for standing in self._standing.values():
            if (known := standing.committed(version)) is not None:
                self._committed = known
                return known
        return None if self.silent else Decision(version=version, switch_at=None)

    # -- versions of its own --

    def open(self, version: int) -> None:
        """Starts asking for ``version``; an earlier one that is open is aborted. Every rank must have been heard."""
        assert not self.silent, f"ranks {sorted(self.silent)} were not heard"
        if self._first is None:
            self._first = version
        self._open, self._answers = version, {}

    def answer(self, version: int, answer: Answer) -> Decision | None:
        """Takes one rank's answer and returns the decision, or None while ranks are missing.

        To a version that is not open, returns what holds about it. A repeated answer changes nothing: a rank's promise
        is the first one it made. Raises ValueError for a rank of another communicator.
        """
        if answer.rank not in self.ranks:
            raise ValueError(f"rank {answer.rank} is not one of {sorted(self.ranks)}")
        if version != self._open:
            return self.resolve(version)
        self._answers.setdefault(answer.rank, answer)
        if answer.hold_at is None:
            return self.abort(version)
        if self._answers.keys() != self.ranks:
            return None
        digests = Counter(a.digest for a in self._answers.values())
        if len(digests) > 1:
            self.digest_mismatches += 1
            self.abort(version)
            return Decision(version=version, switch_at=None, adopt_leader=True)
        switch_at = max(a.hold_at or 0 for a in self._answers.values())
        self._committed = Decision(version=version, switch_at=switch_at)
        self._open, self._answers = None, {}
        return self._committed

    def abort(self, version: int) -> Decision:
        """Gives up on a version of its own, unless it has been committed; returns what holds."""
        if self._committed is not None and self._committed.version == version:
            return self._committed
        if self._open == version:
            self._open, self._answers = None, {}
        return Decision(version=version, switch_at=None)

    @property
    def open_version(self) -> int | None:
        return self._open

    @property
    def answered(self) -> frozenset[int]:
        """Ranks that have answered to the open version."""
        return frozenset(self._answers)

    @property
    def leader(self) -> int:
        """The rank whose table is sent to the others when they computed different ones."""
        return min(self.ranks)
