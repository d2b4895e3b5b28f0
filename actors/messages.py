"""What runners and the coordinator say to each other. Plain data; NumPy arrays where there are many."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dynamiccl_ray import observation
from dynamiccl_ray.actions import Action
from dynamiccl_ray.agreement import Answer, Decision
from dynamiccl_ray.observation import KeyView


class Phase(StrEnum):
    """State of a run: measure NCCL's own choice, learn, exploit; adapt is learning after a trigger."""

    BASELINE = "baseline"
    LEARN = "learn"
    EXPLOIT = "exploit"
    ADAPT = "adapt"


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
    dseq: int
    version: int
    """Newest version that the segment knows of, in force or pending."""


@dataclass(frozen=True, kw_only=True)
class RankEpoch:
    """What one rank measured in one epoch. N collectives, all decided under ``version``."""

    comm: int
    rank: int
    version: int
    dseq: npt.NDArray[np.uint64]
    """(N,)"""
    key: npt.NDArray[np.uint16]
    """(N,)"""
    nbytes: npt.NDArray[np.uint64]
    """(N,)"""
    exec_ns: npt.NDArray[np.uint64]
    """(N,)"""
    pair: npt.NDArray[np.int64]
    """(N,) what NCCL says it used; ``OWN_PAIR`` where it names none that we know."""
    channels: npt.NDArray[np.uint8]
    """(N,) likewise; 0 where it does not say."""
    refused: frozenset[int]
    """Keys whose entry was in force but not applied: NCCL did not offer it."""
    costs: dict[int, npt.NDArray[np.float32]]
    """Keys seen for the first time: NCCL's own cost table (7, 3)."""
    fingerprints: dict[int, int]
    max_channels: int
    unused: int
    """Records of this epoch that cannot be used: of another version, of an aggregate, or without a decision."""
    dropped: int
    """Records lost so far, for whatever reason; all are counted in the segment."""
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Steps that the job reported in this epoch: number -> seconds and loss (NaN: none)."""
    faults: int = 0
    """That the job reported so far."""


@dataclass(frozen=True, kw_only=True)
class CommContext:
    """One communicator's part of an epoch's context: all that decisions may depend on."""

    comm: int
    context: observation.Context
    keys: npt.NDArray[np.int64]
    view: KeyView
    reward: npt.NDArray[np.float64]
    """(K,) of the decision in force in the epoch that just ended, all terms; NaN where none can be given."""
    in_force: dict[int, Action]
    """Keys that are not NCCL's own now."""
    version_in_force: int
    version: int
    """For the next table."""
    max_channels: int
    off: bool
    """Tuning is off for this communicator: an empty table."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every runner is told after an epoch."""

    epoch: int
    phase: Phase
    greedy: bool
    keep: bool
    """Decisions in force stay, as long as they are valid: exploitation does not flap between equals."""
    apply: bool
    seed: int
    round_end: bool
    """The epoch that just ended was the last of its round."""
    comms: tuple[CommContext, ...]
    adopt: dict[int, bytes] = field(default_factory=dict)
    """Communicator -> the leader's table, after ranks computed different ones."""
    stop: bool = False


class Coordination(Protocol):
    """The coordinator as a runner sees it; every call may wait for other runners."""

    def join(self, runner: str, members: list[Member]) -> Context:
        """Announces the ranks that a runner serves, or serves now; answers the current context."""

    def report(self, runner: str, epoch: int, ranks: list[RankEpoch], entropy: float | None) -> Context:
        """Hands in an epoch; answers the next context once all runners have, or time is up."""

    def promise(self, runner: str, comm: int, version: int, answers: list[Answer], table: bytes | None) -> Decision:
        """Answers to PREPARE for the ranks of one communicator; ``table`` is the leader's."""
