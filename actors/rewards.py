"""The coordinator's side of the reward: one communicator's inputs, all of them reduced over its ranks."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from actors.messages import RankEpoch
from dynamiccl_ray.actions import Action
from dynamiccl_ray.book import KeyBook, Samples
from dynamiccl_ray.reward import Floats, Inputs, Reward, terms, tier_penalty

# Steps that some rank has not reported yet, and steps that the baseline is the median of.
_PENDING: Final = 1000
_BASELINE_STEPS: Final = 1000


class Rewards:
    """What must be remembered from epoch to epoch. ``hear`` what the job said, then ask for the ``terms``."""

    def __init__(self, weights: Reward, *, sms: int | None, tier: int, nodes: int) -> None:
        """``sms`` of a GPU, if known; ``tier``, the farthest that the communicator crosses."""
        self._weights, self._sms, self._tier, self._nodes = weights, sms, tier, nodes
        self._previous: dict[int, Action] = {}
        self._tried: set[tuple[int, Action]] = set()
        self._reporters: set[int] = set()
        self._pending: dict[int, dict[int, tuple[float, float]]] = {}
        self._baseline: list[float] = []
        self._iteration_s: float | None = None
        self._loss: float | None = None
        self._loss_change: float | None = None
        self._faults: dict[int, int] = {}
        self._fault: bool | None = None

    def hear(self, reports: list[RankEpoch], *, baseline: bool) -> None:
        """What the job said in this epoch, on every rank. ``baseline``: NCCL's own choice was in force.

        A step counts once all ranks that report at all have reported it, in the epoch in which the last one did: its
        time is the longest, its loss the mean.
        """
        for report in reports:
            if report.steps:
                self._reporters.add(report.rank)
            for step, one in report.steps.items():
                self._pending.setdefault(step, {})[report.rank] = one
        whole = [step for step, of in self._pending.items() if of.keys() >= self._reporters]
        said = np.array([self._reduced(self._pending[step]) for step in sorted(whole)]).reshape(-1, 2)
        last = max(whole, default=None)
        self._pending = {s: of for s, of in self._pending.items() if last is None or s > last}
        for step in list(self._pending)[:-_PENDING]:
            del self._pending[step]
        self._iteration_s = float(said[:, 0].mean()) if len(said) else None
        if baseline:
            # The first steps of a job are slow; the median does not mind.
            self._baseline = [*self._baseline, *said[:, 0].tolist()][-_BASELINE_STEPS:]
        self._loss_change = None
        losses = said[np.isfinite(said[:, 1]), 1]
        if len(losses):
            before, self._loss = self._loss, float(losses[-1])
            self._loss_change = None if before is None else abs(self._loss - before)
        self._hear_faults(reports)

    @staticmethod
    def _reduced(said: dict[int, tuple[float, float]]) -> tuple[float, float]:
        """Of one step: the longest time, and the mean of the losses; NaN without any."""
        losses = [loss for _, loss in said.values() if np.isfinite(loss)]
        return max(time_s for time_s, _ in said.values()), float(np.mean(losses)) if losses else np.nan

    def _hear_faults(self, reports: list[RankEpoch]) -> None:
        grown = any(r.faults > self._faults.get(r.rank, r.faults) for r in reports)
        self._faults |= {r.rank: r.faults for r in reports}
        # A job that has never said anything is no source.
        known = bool(self._reporters) or any(self._faults.values())
        self._fault = grown if known else None

    def terms(
        self, samples: Samples, book: KeyBook, actions: dict[int, Action], *, max_channels: int
    ) -> dict[str, Floats]:
        """Name -> (K,) of an epoch that ``book`` has just been told of, under ``actions``; see ``reward.terms``."""
        keys = book.keys.tolist()
        now = [actions.get(key, Action()) for key in keys]
        log_speedup = book.log_speedup(samples)
        inputs = Inputs(
            log_speedup=log_speedup,
            switched=np.array([a != self._previous.get(k, Action()) for k, a in zip(keys, now, strict=True)], np.bool_),
            probed=np.array(
                [a != Action() and (k, a) not in self._tried for k, a in zip(keys, now, strict=True)], np.bool_
            ),
            congestion=book.congestion,
            tier=_mean(samples, book, tier_penalty(samples.pair, self._tier, self._nodes)),
            # NCCL does not say how many channels CollNet uses: at most the communicator's.
            sm_share=None
            if self._sms is None
            else _mean(samples, book, np.where(samples.channels > 0, samples.channels, max_channels) / self._sms),
            iteration=None
            if self._iteration_s is None or not self._baseline
            else self._iteration_s / float(np.median(self._baseline)) - 1,
            loss_change=self._loss_change,
            fault=self._fault,
        )
        ran = np.isfinite(log_speedup)
        self._tried |= {pair for pair, here in zip(zip(keys, now, strict=True), ran, strict=True) if here}
        self._previous = dict(actions)
        return terms(self._weights, inputs)

    def shift(self) -> None:
        """The network has changed: what an iteration takes with NCCL's own choice is measured anew."""
        self._baseline = []

    def state(self) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        settings = ("_weights", "_sms", "_tier", "_nodes")
        return {k: v for k, v in self.__dict__.items() if k not in settings}

    def restore(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _mean(samples: Samples, book: KeyBook, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(K,) mean per key of what (N,) collectives have; NaN for keys that did not run."""
    order = np.argsort(book.keys)
    rows = order[np.searchsorted(book.keys, samples.key, sorter=order)]
    count = np.bincount(rows, minlength=len(book.keys))
    total = np.bincount(rows, values, len(book.keys))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
