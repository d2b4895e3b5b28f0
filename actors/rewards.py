"""What the job says of itself, and the reward that comes of it: one communicator's, reduced over its ranks."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from dynamiccl_ray.actors.messages import Collectives, RankNews
from dynamiccl_ray.agent.reward import Floats, Inputs, Reward, terms, tier_penalty
from dynamiccl_ray.arrays import Float64, Int64
from dynamiccl_ray.control.loop import Outcome

# Steps that some rank has not reported yet, and steps that the baseline is the median of.
_PENDING: Final = 1000
_BASELINE_STEPS: Final = 1000
# With fewer steps nothing is said of how long they take; and what is not counted as longer.
_LEAST_STEPS: Final = 20
_SLOWER: Final = 0.005


class JobReward:
    """What must be remembered from epoch to epoch. ``hear`` what the job said, then ask for the ``terms``."""

    def __init__(self, weights: Reward, *, sms: int | None, tier: int, nodes: int) -> None:
        """``sms`` of a GPU, if known; ``tier``, the farthest that the communicator crosses."""
        self._weights, self._sms, self._tier, self._nodes = weights, sms, tier, nodes
        self._reporters: set[int] = set()
        self._pending: dict[int, dict[int, tuple[float, float]]] = {}
        self._baseline: list[float] = []
        self._tuned: list[float] = []
        self._iteration_s: float | None = None
        self._loss: float | None = None
        self._loss_change: float | None = None
        self._faults: dict[int, int] = {}
        self._fault: bool | None = None

    def hear(self, ranks: dict[int, RankNews], *, baseline: bool) -> None:
        """What the job said in this epoch, on every rank. ``baseline``: NCCL's own choice was in force.

        A step counts once all ranks that report at all have reported it, in the epoch in which the last one did: its
        time is the longest, its loss the mean.
        """
        for rank, news in ranks.items():
            if news.steps:
                self._reporters.add(rank)
            for step, one in news.steps.items():
                self._pending.setdefault(step, {})[rank] = one
        whole = [step for step, of in self._pending.items() if of.keys() >= self._reporters]
        said = np.array([_reduced(self._pending[step]) for step in sorted(whole)]).reshape(-1, 2)
        last = max(whole, default=None)
        self._pending = {s: of for s, of in self._pending.items() if last is None or s > last}
        for step in list(self._pending)[:-_PENDING]:
            del self._pending[step]
        self._iteration_s = float(said[:, 0].mean()) if len(said) else None
        if baseline:
            # The first steps of a job are slow; the median does not mind.
            self._baseline = [*self._baseline, *said[:, 0].tolist()][-_BASELINE_STEPS:]
        else:
            self._tuned = [*self._tuned, *said[:, 0].tolist()][-_BASELINE_STEPS:]
        self._loss_change = None
        losses = said[np.isfinite(said[:, 1]), 1]
        if len(losses):
            before, self._loss = self._loss, float(losses[-1])
            self._loss_change = None if before is None else abs(self._loss - before)
        grown = any(news.faults > self._faults.get(rank, news.faults) for rank, news in ranks.items())
        self._faults |= {rank: news.faults for rank, news in ranks.items()}
        # A job that has never said anything is no source.
        known = bool(self._reporters) or any(self._faults.values())
        self._fault = grown if known else None

    def terms(self, outcome: Outcome, keys: Int64, collectives: Collectives, *, max_channels: int) -> dict[str, Floats]:
        """Name -> (R,) of decisions on these keys (R,) that are over; NaN where there is nothing to judge.

        ``collectives`` are the epoch's: what they used stands for what the decisions did.
        """
        channels = collectives["channels"].astype(np.float64)
        penalty = tier_penalty(collectives["pair"].astype(np.int64), self._tier, self._nodes)
        inputs = Inputs(
            log_speedup=np.where(outcome.known, outcome.log_speedup, np.nan),
            switched=outcome.switched,
            probed=outcome.probed,
            congestion=outcome.congestion,
            tier=_mean(collectives["key"], penalty, keys),
            # NCCL does not say how many channels CollNet uses: at most the communicator's.
            sm_share=None
            if self._sms is None
            else _mean(collectives["key"], np.where(channels > 0, channels, max_channels) / self._sms, keys),
            iteration=None
            if self._iteration_s is None or not self._baseline
            else self._iteration_s / float(np.median(self._baseline)) - 1,
            loss_change=self._loss_change,
            fault=self._fault,
        )
        return terms(self._weights, inputs)

    def shift(self) -> None:
        """The network has changed: what an iteration takes with NCCL's own choice is measured anew."""
        self._baseline, self._tuned = [], []

    def forget_steps(self) -> None:
        """Something else is in force from now on: what an iteration takes then is measured anew."""
        self._tuned = []

    def steps_s(self) -> tuple[float | None, float | None]:
        """Median of a step with NCCL's own choice, and of one that is tuned; None where the job has said too little."""
        known = (of if len(of) >= _LEAST_STEPS else None for of in (self._baseline, self._tuned))
        own, tuned = (None if of is None else float(np.median(of)) for of in known)
        return own, tuned

    def slowdown(self) -> float | None:
        """By which share steps take longer than with NCCL's own choice; None where they do not, beyond doubt and by
        more than 0.5 %, or where too few have been reported to know."""
        if min(len(self._baseline), len(self._tuned)) < _LEAST_STEPS:
            return None
        before, after = np.median(self._baseline), np.median(self._tuned)
        doubt = math.hypot(_error_of_median(self._baseline), _error_of_median(self._tuned))
        slower = float((after - before) / before)
        return slower if after - before > 2 * doubt and slower > _SLOWER else None

    def state(self) -> dict[str, object]:
        """What a successor needs, as JSON. What is pending is reported again, or never."""
        return {"reporters": sorted(self._reporters), "baseline": self._baseline, "loss": self._loss}

    def restore(self, state: dict[str, object]) -> None:
        """The inverse of ``state``. Raises KeyError or TypeError for something else."""
        reporters, baseline, loss = state["reporters"], state["baseline"], state["loss"]
        if not (isinstance(reporters, list) and isinstance(baseline, list) and isinstance(loss, float | None)):
            raise TypeError("not the state of a reward")
        self._reporters, self._baseline, self._loss = set(reporters), [float(s) for s in baseline], loss


def _reduced(said: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """Of one step: the longest time, and the mean of the losses; NaN without any."""
    losses = [loss for _, loss in said.values() if np.isfinite(loss)]
    return max(time_s for time_s, _ in said.values()), float(np.mean(losses)) if losses else np.nan


def _error_of_median(times: list[float]) -> float:
    """Standard error, by the median of the deviations, which outliers do not move: 1.2533 sigma / sqrt(n) of normal
    times, with sigma = 1.4826 MAD."""
    mad = float(np.median(np.abs(np.array(times) - np.median(times))))
    return 1.2533 * 1.4826 * mad / math.sqrt(len(times))


def _mean(of: Int64, values: Float64, keys: Int64) -> Float64:
    """(R,) mean per key of what (N,) collectives have; NaN for keys that did not run."""
    count = np.bincount(of, minlength=int(keys.max(initial=0)) + 1)[keys]
    total = np.bincount(of, values, int(keys.max(initial=0)) + 1)[keys]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
