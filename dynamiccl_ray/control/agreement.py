"""All ranks of a communicator switch tables at the same call, or none does.

Two-phase commit with one twist: a rank goes on serving calls while it is asked. It answers PREPARE with ``hold_at``,
the call at which it will wait if it has heard nothing, and the switch happens at the largest of those. The decision
is written once to a store that outlives the coordinator; whoever finds a record adopts it, so two coordinators can
never decide differently. The rank's half is ``plugin_bridge/native/reader.c``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

_REMEMBERED = 64


class Store(Protocol):
    """A small durable map. ``put_if_absent`` is atomic across every process that uses the store."""

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        """Writes ``value`` unless the key is there; returns what is there afterwards."""

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None: ...


class MemoryStore:
    """A store for runs in one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        return self._values.setdefault(key, value)

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

    def encode(self) -> bytes:
        return f"{self.version} {self.switch_at if self.switch_at is not None else 'abort'}".encode()

    @classmethod
    def parse(cls, raw: bytes) -> Decision:
        version, at = raw.decode().split()
        return cls(version=int(version), switch_at=None if at == "abort" else int(at))


def decision_key(run: str, comm: int, version: int) -> str:
    """Where the decision on one version of one communicator is recorded."""
    return f"{run}/{comm:x}/decision/{version}"


class Agreement:
    """The coordinator's half, for one communicator. At most one version is open at a time.

    Everything that is not in the store may be lost at any moment.
    """

    def __init__(self, store: Store, run: str, comm: int, ranks: Iterable[int]) -> None:
        self._store = store
        self._run, self._comm = run, comm
        self.ranks = frozenset(ranks)
        self._open: int | None = None
        self._answers: dict[int, Answer] = {}
        self._seen: dict[int, Decision] = {}
        self.digest_mismatches = 0

    def open(self, version: int) -> None:
        """Starts asking for ``version``. An earlier one that a rank has answered to is aborted first; one that nobody
        has answered to is forgotten, and a late answer to it gets ABORT."""
        if self._answers and self._open is not None and self._open != version:
            self.abort(self._open)
        self._open, self._answers = version, {}

    def answer(self, version: int, answer: Answer) -> Decision | None:
        """Takes one rank's answer and returns the decision, or None while ranks are missing.

        A version that is not open gets its recorded decision, or ABORT recorded now. A repeated answer changes
        nothing: a rank's promise is the first one it made.
        """
        if version != self._open:
            return self.abort(version)
        if answer.rank not in self.ranks:
            raise ValueError(f"rank {answer.rank} is not one of {sorted(self.ranks)}")
        self._answers.setdefault(answer.rank, answer)
        if answer.hold_at is None:
            return self._record(Decision(version=version, switch_at=None))
        if self._answers.keys() != self.ranks:
            return None
        digests = Counter(a.digest for a in self._answers.values())
        if len(digests) > 1:
            self.digest_mismatches += 1
            self._record(Decision(version=version, switch_at=None))
            return Decision(version=version, switch_at=None, adopt_leader=True)
        return self._record(Decision(version=version, switch_at=max(a.hold_at or 0 for a in self._answers.values())))

    def abort(self, version: int) -> Decision:
        """Gives up on a version, unless it has been decided already; returns what holds."""
        return self.recorded(version) or self._record(Decision(version=version, switch_at=None))

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

    def _key(self, version: int) -> str:
        return decision_key(self._run, self._comm, version)

    def recorded(self, version: int) -> Decision | None:
        """What the store holds on a version. Records never change, so one that has been seen is not asked for again."""
        if version not in self._seen:
            raw = self._store.get(self._key(version))
            if raw is None:
                return None
            self._remember(Decision.parse(raw))
        return self._seen[version]

    def _remember(self, decision: Decision) -> None:
        self._seen[decision.version] = decision
        if len(self._seen) > _REMEMBERED:
            del self._seen[min(self._seen)]

    def _record(self, decision: Decision) -> Decision:
        # The record before the news of it: what is sent is what the store holds, ours or not.
        kept = Decision.parse(self._store.put_if_absent(self._key(decision.version), decision.encode()))
        self._remember(kept)
        self._close(decision.version)
        return kept

    def _close(self, version: int) -> None:
        if self._open == version:
            self._open, self._answers = None, {}
