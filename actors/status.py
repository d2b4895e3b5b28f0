"""Where a run stands, and what an epoch brought: what the coordinator tells everybody else."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.agent.reward import Floats
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.plugin_bridge.coverage import Coverage

SAMPLE_DTYPE: Final = np.dtype(
    [
        ("key", "u2"),
        ("phase", "u1"),
        ("pair", "u1"),
        ("channels", "u1"),
        ("aggregate", "u1"),
        ("action", "i2"),
        ("bytes", "u8"),
        ("dseq", "u8"),
        ("time_us", "f8"),
        ("skew", "f8"),
    ]
)
"""One collective that all ranks have measured: ``phase`` its key's, ``action`` the flat action in force, ``pair`` and
``channels`` what NCCL says it used, ``aggregate`` whether ``bytes`` is of several operations, ``time_us`` the fastest
rank's, ``skew`` the log of the slowest's over that."""


DECISION_DTYPE: Final = np.dtype(
    [
        ("key", "u2"),
        ("phase", "u1"),
        ("why", "u1"),
        ("action", "i2"),
        ("samples", "i4"),
        ("expected_us", "f8"),
        ("got_us", "f8"),
        ("own_us", "f8"),
    ]
)
"""One decision that has come to its end: ``why`` (of ``WHY``) the flat action was taken, geometric means of what the
action had taken before it, what it took, and what NCCL's own choice takes; NaN for what was not known or not tried."""
WHY: Final = ("own choice", "drawn", "compared", "best", "checked")
"""To know NCCL's own choice; drawn from the policy, or where it would have repeated what is known, a pair that NCCL
believes in; to find the best of those that contend; because it is the best; because of an alarm."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Epoch:
    """What one epoch brought of one communicator."""

    number: int
    comm: int
    ranks: int
    nodes: int
    name: str
    """Of the communicator: NCCL's, where the job has given it one."""
    version: int
    phase: Phase
    """Of the run."""
    samples: npt.NDArray[Any]
    """(N,) of ``SAMPLE_DTYPE``, in the order of calls."""
    took_s: float
    """Seconds since the epoch before."""
    judged: Int64
    """(R,) keys whose decision is over."""
    terms: dict[str, Floats]
    """Of the reward, (R,) each; NaN where there was nothing to judge."""
    decisions: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, DECISION_DTYPE))
    """(D,) of ``DECISION_DTYPE``, those that came to their end."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """The times of a key have changed."""

    comm: int
    key: int
    dseq: int
    """Collective whose time raised it, or the last one of its check."""
    epoch: int
    anew: bool
    """Whether the key learns anew. False where its choice was checked, and stood."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One line of a run's history."""

    round: int
    epoch: int
    phase: str
    entropy: float | None
    """Mean over what was drawn, nats; None where nothing was."""
    collectives: int
    version: int
    """The newest that is in force on a communicator; 0 for NCCL's own choice everywhere."""
    keys: dict[str, int]
    """By phase."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a run stands."""

    epoch: int = 0
    round: int = 0
    phase: str = "baseline"
    """Of the keys that make up most of what runs, the one that is furthest behind."""
    rounds_in_phase: int = 0
    collectives: int = 0
    """That all of their ranks have measured."""
    switches: int = 0
    digest_mismatches: int = 0
    unused: int = 0
    """Collectives and records that taught nothing, for whatever reason."""
    dropped: int = 0
    """Records that were lost between NCCL and the runner."""
    hold_wait_s: float = 0.0
    """For which ranks have waited for decisions, all of them together."""
    alarms: tuple[Alarm, ...] = ()
    history: tuple[Round, ...] = ()
    off: dict[str, str] = field(default_factory=dict)
    """Communicators that are not tuned, and why."""
    unmeasured: dict[str, list[str]] = field(default_factory=dict)
    """By communicator, keys of which nothing has ever been measured: they are NCCL's own."""
    keys: dict[str, int] = field(default_factory=dict)
    """By phase."""
    in_force: dict[str, int] = field(default_factory=dict)
    """By communicator that is served, keys of which a table says something; 0 for NCCL's own choice everywhere."""
    took_s: float = 0.0
    """Of all collectives whose decision is over, exploration included, and what NCCL's own choice would have taken."""
    own_s: float = 0.0
    explored_s: float = 0.0
    """Of that, what exploring took above the best that was known; see ``control/budget.py``."""
    own_step_s: float | None = None
    """Median of the job's steps with NCCL's own choice, and of those that are tuned; None where it reports too few."""
    tuned_step_s: float | None = None
    lossless_saturated: bool | None = None
    """Whether tuned steps still take clearly longer than their computation alone, so that no choice of NCCL's can help
    further; None while keys learn, where not all that was learned is in force, or where one of both is not known."""
    mode: str = "active"
    rolled_back: bool = False
    """What was exploited before is in force, until another mode is ordered."""
    canary: dict[str, Any] | None = None
    """``share`` of keys and ``communicators`` that are tuned (none: all), and why it ``waits``; None without one."""
    orders: tuple[dict[str, Any], ...] = ()
    """Of operators, and of the canary itself: when, what, by whom."""
    coverage: Coverage = field(default_factory=Coverage)
    overhead: dict[str, Any] = field(default_factory=dict)
    """``percent`` of a process's time that the plugin took (None: not measured), ``max_percent`` that it may, and
    ``profiled_one_in``: by communicator, windows of which one is profiled."""
    ranks: int = 0
    runners: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "coverage": self.coverage.as_dict()}
