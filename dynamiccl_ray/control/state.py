"""What the control loop keeps of every key: its phase, what is in force, and what has been measured."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import Any, Final

import numpy as np

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.agent.observation import communication_ratio
from dynamiccl_ray.arrays import Bool, Float32, Int64
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.control.budget import Budget
from dynamiccl_ray.control.check import HOPELESS, Checks
from dynamiccl_ray.control.columns import NOTHING, Keys, joined, no_keys, no_outcome, take
from dynamiccl_ray.control.evidence import Evidence
from dynamiccl_ray.control.offers import Offers
from dynamiccl_ray.control.trigger import Cusum
from dynamiccl_ray.control.verdicts import no_verdicts
from dynamiccl_ray.control.watch import OWN_SHARE, SHARE, Watch


class Phase(IntEnum):
    """Where a key is; ADAPT is learning after a trigger, and CHECK comes before it, from EXPLOIT."""

    BASELINE = 0
    LEARN = 1
    EXPLOIT = 2
    ADAPT = 3
    CHECK = 4


class State:
    """Of K keys; ``wanted`` (K,) has the flat action of each."""

    def __init__(self, control: Control) -> None:
        self.control: Final = control
        self.keys = no_keys()
        self.evidence = Evidence()
        self.cusum = Cusum(control.trigger.arl0 / OWN_SHARE)
        self.watch = Watch(control.trigger.arl0 / SHARE)
        self.checks = Checks()
        self.offers = Offers()
        self.budget = Budget(control.explore)
        self.phase = np.zeros(0, np.int64)
        self.wanted = np.zeros(0, np.int64)
        self.decisions = np.zeros(0, np.int64)
        """(K,) since the key began to learn."""
        self.shifts = np.zeros(0, np.int64)
        """(K,) how often it has begun anew."""
        self.idle = np.zeros(0, np.int64)
        """(K,) observations since the last one that had a sample of it."""
        self.measured = np.zeros(0, np.int64)
        """(K,) samples ever."""
        self.resting = np.zeros(0, np.int64)
        """(K,) 1 where the decision in force is the best that is known because the budget is spent: it counts for no
        decision of learning."""
        self.warm = np.zeros(0, np.bool_)
        """(K,) whether an earlier run has learned: what it measured is known."""
        self.late = 0
        """Samples of an action that was not wanted any more: they end no decision, and are not used."""
        self.settled = np.zeros(0, np.int64)
        """(K,) flat action that each key exploited before it began anew; NCCL's own choice where it never has."""
        self.closed = no_verdicts()
        """Of the last observation."""
        self.misled = np.zeros(0, np.int64)
        """(K,) 1 where what earlier runs measured turned out wrong while the key learned."""
        self.mistaken = np.zeros(0, np.int64)
        """(K,) 1 where the model of the cluster was wrong when the key first learned."""
        self._before = np.zeros(0, np.int64)
        self._anew_at = np.zeros(0, np.int64)
        # (K,) samples ever when NCCL's own choice last became far faster, or was checked because it had for a near key;
        # and what it would take if it has here, log time: NaN where none says so.
        self._told_at = np.zeros(0, np.int64)
        self._own_near = np.zeros(0)
        # (K,) samples ever when NCCL's own choice was measured last, and how many collectives that took.
        self._own_at = np.zeros(0, np.int64)
        self._own_ran = np.zeros(0, np.int64)
        # (K,) 1 where a key of the communicator was checked, or began anew, later than that.
        self._doubted = np.zeros(0, np.int64)
        # (K,) 1 where a key of the communicator does something else since this key's decision began.
        self._stirred = np.zeros(0, np.int64)
        self._over = np.zeros(0, np.bool_)
        # (K,) log time of the best that was known when the decision in force was made; NaN for none.
        self._best = np.zeros(0)
        # (K,) which flat action that is of.
        self._found = np.zeros(0, np.int64)
        self._outcome = no_outcome(0)
        self._pending = NOTHING

    def __len__(self) -> int:
        return len(self.phase)

    @property
    def hopeless_earlier(self) -> Bool:
        """(K,) whether NCCL's own choice was hopeless in an earlier run, which has not turned out to be wrong."""
        return np.asarray((self.keys.lead > HOPELESS) & (self.shifts == 0) & (self.misled == 0))

    # -- keys --

    def grow(self, keys: Keys) -> None:
        """New keys, behind those that are there; each begins with NCCL's own choice."""
        n = len(keys)
        self.keys = joined(self.keys, keys)
        self.evidence.grow(keys.group, keys.collective, keys.nbytes, keys.prior, keys.earlier, keys.noise)
        self.cusum.grow(n)
        self.checks.grow(n)
        self.offers.grow(n)
        self.budget.weigh(keys.group, communication_ratio(keys.context))
        self.watch.know(self.keys.group, self.keys.nbytes)
        for name, fill in _COUNTS.items():
            setattr(self, name, np.append(getattr(self, name), np.full(n, fill)))
        self.warm = np.append(self.warm, np.isfinite(keys.earlier).any((1, 2)))
        self._over = np.append(self._over, np.zeros(n, np.bool_))
        self._best = np.append(self._best, np.full(n, np.nan))
        self._own_near = np.append(self._own_near, np.full(n, np.nan))
        self._outcome = joined(self._outcome, no_outcome(n))

    def keep(self, rows: Bool) -> None:
        """Forgets all other keys (a mask (K,)), and moves these together."""
        self.keys, self._outcome = take(self.keys, rows), take(self._outcome, rows)
        self.evidence.keep(rows)
        self.cusum.keep(rows)
        self.checks.keep(rows)
        self.offers.keep(rows)
        self.budget.keep(self.keys.group)
        self.watch.know(self.keys.group, self.keys.nbytes)
        for name in (*_COUNTS, "warm", "_over", "_best", "_own_near"):
            setattr(self, name, getattr(self, name)[rows])
        left = take(self._pending, rows[self._pending.row])
        self._pending = replace(left, row=(np.cumsum(rows) - 1)[left.row])

    def expect(self, rows: Int64, prior: Float32, context: Float32) -> None:
        """What a model of the cluster expects of some keys (R,), see ``Keys.prior``, and their context (STATIC_SIZE,),
        where it is found out only now which cluster it is."""
        self.keys.prior[rows], self.keys.context[rows] = prior, context
        self.evidence.expect(rows, prior)

    def offer(self, row: int, cost_us: Float32) -> None:
        """NCCL's own costs (N_PAIRS - 1,) for a key: what it marks -1 is not available."""
        self.keys.cost[row] = self.offers.offer(row, cost_us)
        self._withdraw(row)

    def forbid(self, row: int, action: int) -> None:
        """NCCL did not take an action for a key."""
        self.offers.forbid(row, action)
        self._withdraw(row)

    def _withdraw(self, row: int) -> None:
        """What is asked of a key and can never be measured is over at once, and is not judged."""
        if self.offers.refused(row, int(self.wanted[row])):
            self._over[row], self._outcome.known[row] = True, False
            self._pending = take(self._pending, self._pending.row != row)

    # -- durability --

    def state(self) -> dict[str, Any]:
        """Plain arrays, for a checkpoint: all but settings and keys."""
        mine = {name: getattr(self, name) for name in (*_COUNTS, "_over", "_best", "_own_near")}
        return {**mine, **{f"{part}.{k}": v for part in _PARTS for k, v in getattr(self, part).state().items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """After ``grow`` by the same keys. What had been measured of open decisions is measured anew."""
        for name in (*_COUNTS, "_over", "_best", "_own_near"):
            getattr(self, name)[:] = state[name]
        for part in _PARTS:
            of = f"{part}."
            getattr(self, part).restore({k.removeprefix(of): v for k, v in state.items() if k.startswith(of)})


_PARTS: Final = ("evidence", "cusum", "checks", "offers", "budget")
# Of a Loop, (K,) each: what a new key gets.
_COUNTS: Final = {
    "phase": int(Phase.BASELINE), "wanted": OWN_ACTION, "decisions": 0, "shifts": 0, "idle": 0, "measured": 0,
    "settled": OWN_ACTION, "resting": 0, "misled": 0, "mistaken": 0, "_before": OWN_ACTION, "_anew_at": -(1 << 62),
    "_stirred": 0, "_found": OWN_ACTION, "_told_at": -(1 << 62), "_own_at": 0, "_own_ran": 0, "_doubted": 0,
}  # fmt: skip
