"""What runners and the coordinator say to each other. Plain data; NumPy arrays where there are many."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.arrays import Bool, Float, Int64
from dynamiccl_ray.control.agreement import Answer, Decision, Standing
from dynamiccl_ray.control.loop import Due
from dynamiccl_ray.plugin_bridge.coverage import Coverage

COLLECTIVE_DTYPE: Final = np.dtype(
    [
        ("dseq", "u8"),
        ("bytes", "u8"),
        ("least_ns", "u8"),
        ("most_ns", "u8"),
        ("start", "u4"),
        ("first_end", "u4"),
        ("end", "u4"),
        ("version", "u4"),
        ("ranks", "u4"),
        ("key", "u2"),
        ("pair", "u1"),
        ("channels", "u1"),
        ("aggregate", "u1"),
    ]
)
"""One collective on one communicator, reduced over ``ranks`` of it: the least and the most time that any took, when the
last of them started, when the first and the last one ended (by the clock of their node, modulo 2^32 ns), what was in
force (``version``), what NCCL says it used (``OWN_PAIR`` and 0 where it says nothing), and whether several operations
shared the decision."""
NOT_KNOWN: Final = 2**63
"""As the least time: nobody here knows it."""

Collectives = npt.NDArray[Any]
"""Of ``COLLECTIVE_DTYPE``."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank of one communicator, as its segment describes it."""

    comm: int
    rank: int
    ranks: int
    nodes: int
    tuner_abi: int
    profiler_abi: int
    user_env: bool
    standing: Standing = field(default_factory=Standing)
    """What it was told about tables."""
    term: int = 0
    """Of the newest coordinator that it was shown to."""
    name: str = ""
    """NCCL's, where the job has given the communicator one."""
    in_band: bool = False
    """The job itself puts tables in force, at its step boundaries; not if these are at different calls on its ranks."""
    in_force: int = 0
    """Version of the table that is in force, or will be at the call that all ranks have been told; 0 for none."""
    table: tuple[tuple[int, int], ...] = ()
    """That table: keys and their flat actions."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankNews:
    """What one rank's segment says beside its records."""

    fingerprints: dict[int, int]
    """Window -> hash of the calls in it."""
    dropped: int
    """Records lost so far, for whatever reason; all are counted in the segment."""
    unused: int
    """Records since the last report that cannot be used: without a decision, of a pair that was refused, or with
    timers that cannot be believed."""
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Steps that the job has reported since: number -> seconds and loss (NaN: none)."""
    faults: int = 0
    """That the job reported so far."""
    in_force: int = 0
    """Version of the table in force; 0 for none."""
    coverage: Coverage = field(default_factory=Coverage)
    hold_wait_s: float = 0.0
    """For which it has waited for decisions so far."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CommReport:
    """What one runner has of one communicator since its last report."""

    comm: int
    collectives: Collectives
    """Those that all of the runner's ranks of it have measured."""
    unmatched: int
    """Records given up since, because some rank of the runner has none of the collective."""
    decided: Int64
    """(R,) flat actions for what was due."""
    refused: dict[int, int]
    """Key -> flat action that was in force and not applied: NCCL did not offer it."""
    costs: dict[int, npt.NDArray[np.float32]]
    """Of keys for which the coordinator does not know it, NCCL's own cost table (7, 3)."""
    max_channels: int
    ranks: dict[int, RankNews]
    overhead: float = math.nan
    """The largest share of a process's time that the plugin took, in a stretch that has ended since; NaN for none."""
    staged: bytes | None = None
    """In band: the table that was handed to the ranks here since the last report."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CommContext:
    """One communicator's part of an epoch's context: all that decisions may depend on."""

    comm: int
    keys: Int64
    """(K,) all of them."""
    wanted: Int64
    """(K,) flat action of each, but for what is due."""
    offered: Bool
    """(K,) whether the coordinator knows NCCL's own costs for it."""
    need: Int64
    """(K,) collectives that the epoch waits for."""
    in_force: dict[int, int]
    """Key -> flat action of the table in force; keys that are missing are NCCL's own."""
    version_in_force: int
    applied: bool
    """Whether that table is applied, not only recorded."""
    due: Due
    """Rows count from 0 within ``keys``."""
    reward: Float
    """(R,) of the decisions that are over, all terms; NaN where none can be given."""
    max_channels: int
    in_band: bool
    """Of all of its ranks: runners stage tables, and promise nothing."""
    off: bool
    """Tuning is off for this communicator: an empty table."""
    duty: int = 0
    """One window of its calls in 2^duty is profiled."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochContext:
    """What every runner is told after an epoch."""

    epoch: int
    version: int
    """Of the tables that come of it."""
    greedy: bool
    """What is likeliest is decided, not what is drawn: nothing is applied, so nothing can be learned."""
    watching: bool
    """No key is learning: the epoch is a long one."""
    apply: bool
    """Tables are applied, not only recorded."""
    round_end: bool
    """The epoch that just ended was the last of its round."""
    comms: tuple[CommContext, ...]
    adopt: dict[int, bytes] = field(default_factory=dict)
    """Communicator -> the leader's table, after ranks computed different ones."""
    stop: bool = False
    applied_since: int = 0
    """Tables of this version and later ones are applied."""
    term: int = 0
    """Of the coordinator: under another, a runner has to join again."""
    release: bool = False
    """The run ends: what is wanted is what shall be left behind, and nothing is measured any more."""


class Coordination(Protocol):
    """The coordinator as a runner sees it; every call may wait for other runners."""

    def join(self, runner: str, members: list[Member], gone: frozenset[tuple[int, int]]) -> EpochContext:
        """Announces the ranks that a runner serves, or serves now; answers the current context. ``gone`` are
        communicators and ranks that it has seen to be no more."""

    def report(
        self,
        runner: str,
        epoch: int,
        comms: list[CommReport],
        entropy: float | None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> EpochContext:
        """Hands in an epoch; answers the next context once all runners have, or time is up. ``meanwhile`` is called a
        few times a second while it waits for them."""

    def others_done(self, epoch: int) -> Callable[[], bool]:
        """Asks at once; answers, as often as it is called, whether some runner has handed the epoch in by now."""

    def promise(
        self, runner: str, comm: int, version: int, answers: list[Answer], table: bytes | None, term: int
    ) -> Decision | None:
        """Answers to PREPARE for the ranks of one communicator; ``table`` is the leader's. None if nobody could say
        what was decided: the ranks stay as they are, and ``settle`` is asked until it answers."""

    def settle(self, member: Member) -> Decision | None:
        """What holds about the version that a rank has promised and was told nothing of; None while nobody knows."""
