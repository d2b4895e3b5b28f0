"""One communicator as the coordinator knows it: its ranks, its keys, its tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from dynamiccl_ray.actors.messages import Collectives, Member, RankNews
from dynamiccl_ray.actors.reduction import Matching
from dynamiccl_ray.actors.rewards import JobReward
from dynamiccl_ray.arrays import Bool, Int64
from dynamiccl_ray.control.agreement import Agreement
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.fabric.recognise import Recognised
from dynamiccl_ray.keys import N_KEYS
from dynamiccl_ray.plugin_bridge.coverage import Coverage

# Tables whose records may still be on their way, and windows of calls that are compared.
_TABLES: Final = 16
_WINDOWS: Final = 64


@dataclass(eq=False, kw_only=True)
class Communicator:
    """``number`` counts the communicators of a run from 0."""

    number: int
    example: Member
    """One of its ranks, whoever serves it."""
    agreement: Agreement
    reward: JobReward
    members: dict[int, Member] = field(default_factory=dict)
    matching: Matching = field(default_factory=Matching)
    keys: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    rows: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    """(K,) row of each key in the control loop."""
    version: int = 0
    """In force."""
    recorded: set[int] = field(default_factory=set)
    """Those of ``tables`` that are not applied."""
    tables: dict[int, Int64] = field(default_factory=lambda: {0: np.zeros(N_KEYS, np.int64)})
    """Version -> (N_KEYS,) flat actions, of the last ones."""
    like: Recognised | None = None
    """The cluster that NCCL's own costs are like, where nobody says which one it is, or says another one."""
    max_channels: int = 1
    fingerprints: dict[int, dict[int, int]] = field(default_factory=dict)
    """Window -> rank -> hash."""
    off: str = ""
    """Why tuning is off; empty while it is on."""
    adopt: bytes | None = None
    """The leader's table, after ranks computed different ones."""
    switches: int = 0
    unused: int = 0
    """Collectives and records that taught nothing, for whatever reason."""
    dropped: dict[int, int] = field(default_factory=dict)
    """By rank."""
    hold_wait_s: dict[int, float] = field(default_factory=dict)
    """By rank, for which it has waited for decisions."""
    gone: set[int] = field(default_factory=set)
    """Ranks whose process has died, or has destroyed the communicator."""
    coverage: dict[int, Coverage] = field(default_factory=dict)
    """By rank."""
    rounds_alone: int = 0
    """Rounds without a rank that is served."""
    took_us: float = 0.0
    """Of collectives whose decision is over, and that NCCL's own choice is known for: what they took, and what they
    would have taken with it."""
    own_us: float = 0.0
    last_dseq: int = 0
    """Of the last collective that all ranks have measured."""
    _alone: Bool = field(default_factory=lambda: np.zeros(N_KEYS, np.bool_))
    # Whether a key has ever run alone.

    @property
    def complete(self) -> bool:
        """All of its ranks are served, and were heard by this coordinator."""
        return self.members.keys() >= self.agreement.ranks and not self.agreement.silent

    def position(self, keys: ArrayLike) -> Int64:
        """Where each key is in ``keys``; -1 for those that are not."""
        at = np.full(N_KEYS, -1)
        at[self.keys] = np.arange(len(self.keys))
        return np.asarray(at[np.asarray(keys, np.int64)])

    def disagreement(self) -> str:
        """Why its ranks cannot share a table; empty if they can."""
        for what in ("tuner_abi", "profiler_abi", "user_env", "ranks", "nodes"):
            values = {getattr(m, what) for m in self.members.values()}
            if len(values) > 1:
                return f"ranks differ in {what}: {sorted(values)}"
        if self.example.tuner_abi == 0 or self.example.profiler_abi == 0:
            return "tuner and profiler are not both loaded; see `dynamiccl plugin env`"
        if self.example.user_env:
            return "NCCL_ALGO or NCCL_PROTO is set and wins"
        return ""

    @property
    def in_band(self) -> bool:
        """The job puts its tables in force."""
        return all(member.in_band for member in self.members.values())

    def follow(self, ranks: dict[int, RankNews]) -> None:
        """In band: what the job has put in force on all of them."""
        if self.in_band and ranks.keys() >= self.agreement.ranks:
            version = min(news.in_force for news in ranks.values())
            if version in self.tables:
                self.switch(version)

    def compare(self, ranks: dict[int, RankNews]) -> str:
        """Ranks that ran different programs cannot share decisions: which window shows that, if any."""
        for rank, news in ranks.items():
            for window, value in news.fingerprints.items():
                self.fingerprints.setdefault(window, {})[rank] = value
        for window in sorted(self.fingerprints)[:-_WINDOWS]:
            del self.fingerprints[window]
        for window, values in self.fingerprints.items():
            if len(set(values.values())) > 1:
                return f"ranks called different collectives in window {window}"
        return ""

    def take(self, parts: list[Collectives]) -> Collectives:
        """In the order of calls, those that all ranks have measured by now, and that can teach something.

        Of a key that runs alone, collectives that shared a decision with others are not: the group's time is another.
        """
        given_up = self.matching.given_up
        every = self.matching.take(parts, len(self.agreement.ranks))
        self.unused += self.matching.given_up - given_up
        if len(every):
            self.last_dseq = int(every["dseq"][-1])
        self._alone[every["key"][every["aggregate"] == 0]] = True
        kept = np.isin(every["version"], list(self.tables)) & ~((every["aggregate"] > 0) & self._alone[every["key"]])
        self.unused += int(np.count_nonzero(~kept))
        return np.asarray(every[kept])

    def asked(self, collectives: Collectives) -> Int64:
        """(N,) flat action of each in the table that was in force."""
        actions = np.zeros(len(collectives), np.int64)
        for version in np.unique(collectives["version"]):
            mine = collectives["version"] == version
            actions[mine] = self.tables[int(version)][collectives["key"][mine]]
        return actions

    def propose(self, table: DecisionTable) -> None:
        """A table that may come into force."""
        self.tables[table.version] = table.flat()
        if not table.apply:
            self.recorded.add(table.version)
        for version in sorted(self.tables)[:-_TABLES]:
            if version != self.version:
                del self.tables[version]
        self.recorded &= self.tables.keys()

    def adopt_from(self, member: Member) -> None:
        """What a rank has in force: a table from before this coordinator began is one that it does not know."""
        if member.in_force > self.version or member.in_force not in self.tables:
            table = self.tables[member.in_force] = np.zeros(N_KEYS, np.int64)
            for key, action in member.table:
                table[key] = action
            self.version = max(self.version, member.in_force)

    def switch(self, version: int) -> None:
        """A table has come into force on all ranks, or will at a call that all of them know."""
        if version > self.version:
            self.version = version
            self.switches += 1

    @property
    def in_force(self) -> dict[int, int]:
        """Key -> flat action; keys that are missing are NCCL's own."""
        table = self.tables.get(self.version)
        if table is None:
            return {}
        keys = np.flatnonzero(table)
        return dict(zip(keys.tolist(), table[keys].tolist(), strict=True))

    def weigh(self, decisions: npt.NDArray[Any]) -> None:
        """Decisions (``DECISION_DTYPE``) that are over: what tuning has gained so far, with all that was tried."""
        known = decisions[np.isfinite(decisions["own_us"] + decisions["got_us"])]
        self.took_us += float((known["samples"] * known["got_us"]).sum())
        self.own_us += float((known["samples"] * known["own_us"]).sum())

    # -- durability --

    def state(self) -> dict[str, Any]:
        """What a successor needs, as JSON."""
        return {
            "example": {name: getattr(self.example, name) for name in _OF_MEMBER},
            "reward": self.reward.state(),
            "keys": self.keys.tolist(),
            "rows": self.rows.tolist(),
            "in_force": sorted(self.in_force.items()),
            **{name: getattr(self, name) for name in _DURABLE},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        for name in _DURABLE:
            setattr(self, name, type(getattr(self, name))(state[name]))
        self.reward.restore(state["reward"])
        self.keys, self.rows = np.array(state["keys"], np.int64), np.array(state["rows"], np.int64)
        table = self.tables[self.version] = np.zeros(N_KEYS, np.int64)
        for key, action in state["in_force"]:
            table[key] = action


_OF_MEMBER: Final = ("comm", "rank", "ranks", "nodes", "tuner_abi", "profiler_abi", "user_env", "name")
_DURABLE: Final = ("number", "version", "max_channels", "off", "switches", "unused", "last_dseq", "took_us", "own_us")
