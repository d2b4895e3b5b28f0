"""Looks at the segments of a job from outside, read-only: who waits, how far a version has got, what was counted.

The offsets are those of docs/channel.md, and nothing here shares code with the plugin or the control plane.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from accounting import Counted, Span

NONE = 2**64 - 1
PROMISED = 1
_WORDS = {
    "dseq": 256, "hold_waits": 392, "hold_wait_ns": 400, "unprofiled": 432,
    "dropped_full": 448, "dropped_busy": 456, "dropped_incomplete": 464, "dropped_timer": 472,
    "hold_at": 23296, "base": 23304, "base_at": 23312, "pending": 23320, "decision": 23328, "promise": 23336,
    "tail": 23360, "head": 23424, "staged": 1147144, "offered": 1147152,
}  # fmt: skip
_AT = np.array(list(_WORDS.values())) // 8
_NAMES = list(_WORDS)


class Words:
    """One segment, mapped for as long as the object lives, whatever becomes of its name."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        magic, abi = struct.unpack_from("<QI", self._map)
        assert (magic, abi) == (0x4C43434D414E5944, 5), f"{path} has another layout"
        self.comm, _, self.pid, _, self.rank = struct.unpack_from("<QQIII", self._map, 40)
        self._words = np.frombuffer(self._map, "<u8")

    def look(self) -> dict[str, int]:
        return dict(zip(_NAMES, self._words[_AT].tolist(), strict=True))

    def counted(self) -> Counted:
        w = self.look()
        dropped = sum(w[name] for name in _NAMES if name.startswith("dropped"))
        return Counted(
            comm=self.comm, rank=self.rank, calls=w["dseq"], records=w["head"], read=w["tail"], dropped=dropped,
            unprofiled=w["unprofiled"],
        )  # fmt: skip


def undecided(w: dict[str, int]) -> bool:
    """A promise was given, and no decision is known."""
    promised = w["promise"] == (w["pending"] >> 8) << 2 | PROMISED
    return w["hold_at"] != NONE and promised and w["decision"] == 0


def committed(w: dict[str, int]) -> bool:
    return w["hold_at"] != NONE and w["decision"] not in (0, NONE)


def phase_of(comm: list[dict[str, int]]) -> str:
    """How far the ranks of one communicator have got: idle, PREPARE (somebody has promised, or in band has been
    handed a table) or COMMIT (some know of the decision, and others do not)."""
    waiting = {w["pending"] >> 8 for w in comm if undecided(w)}
    if waiting & {w["pending"] >> 8 for w in comm if committed(w)} or waiting & {w["base"] >> 8 for w in comm}:
        return "COMMIT"
    offered = {w["offered"] >> 8 for w in comm} - {0}
    if offered & {w["base"] >> 8 for w in comm}:
        return "COMMIT"
    return "PREPARE" if waiting or offered or any(w["staged"] for w in comm) else "idle"


@dataclass
class _Rank:
    words: Words
    last: dict[str, int]
    moved: float
    waiting_since: float | None = None


@dataclass
class Watcher:
    """Looks 250 times a second. ``waits``: spans in which a rank waited at a hold; ``gaps``: in which one made no call
    for longer than ``GAP_S``, whatever for."""

    paths: list[Path]
    waits: list[Span] = field(default_factory=list)
    gaps: list[Span] = field(default_factory=list)
    taken: dict[tuple[int, int], dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """(Communicator, version) -> rank -> the call from which on it was in force there."""
    newest: float = field(default_factory=time.monotonic)
    """When a version was last seen to come into force."""

    GAP_S = 0.25

    def __post_init__(self) -> None:
        now = time.monotonic()
        self._ranks = [_Rank(words, words.look(), now) for words in map(Words, self.paths)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def ranks(self) -> int:
        return len({rank.words.pid for rank in self._ranks})

    def _run(self) -> None:
        while not self._over.wait(0.004):
            for rank in self._ranks:
                self._look(rank, time.monotonic())

    def _look(self, rank: _Rank, now: float) -> None:
        w, before = rank.words.look(), rank.last
        rank.last = w
        if w["dseq"] != before["dseq"]:
            if now - rank.moved > self.GAP_S:
                self.gaps.append(Span(rank.moved, now))
            rank.moved = now
        if undecided(w) and w["dseq"] >= w["hold_at"]:
            rank.waiting_since = rank.waiting_since or now
        elif rank.waiting_since is not None:
            self.waits.append(Span(rank.waiting_since, now))
            rank.waiting_since = None
        # `base_at` is written before `base`, and the hold or the offer goes after both: now they are of one version.
        still = w["base"] == before["base"] and w["base_at"] == before["base_at"]
        if still and w["base"] and w["hold_at"] == NONE and not w["offered"]:
            of_version = self.taken[rank.words.comm, w["base"] >> 8]
            if rank.words.rank not in of_version:
                of_version[rank.words.rank] = w["base_at"]
                self.newest = now

    def phase(self) -> str:
        """The furthest of all communicators."""
        comms: dict[int, list[dict[str, int]]] = defaultdict(list)
        for rank in self._ranks:
            comms[rank.words.comm].append(rank.words.look())
        found = {phase_of(of) for of in comms.values()}
        return next(phase for phase in ("COMMIT", "PREPARE", "idle") if phase in found)

    def switches(self) -> int:
        """Tables that were seen in force on every rank."""
        return sum(len(ranks) == self.ranks for ranks in list(self.taken.values()))

    def total_hold_s(self) -> float:
        return sum(rank.words.look()["hold_wait_ns"] for rank in self._ranks) / 1e9

    def counted(self) -> list[Counted]:
        return [rank.words.counted() for rank in self._ranks]

    def end(self) -> None:
        """Whoever still stands still has done so until now."""
        self._over.set()
        self._thread.join()
        now = time.monotonic()
        for rank in self._ranks:
            if rank.waiting_since is not None:
                self.waits.append(Span(rank.waiting_since, now))

    def look(self) -> list[dict[str, int]]:
        """All segments, now."""
        return [rank.words.look() for rank in self._ranks]
