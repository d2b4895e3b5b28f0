"""Where a run is: epochs, rounds, and the phase that speaks for all of its keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import numpy as np

from dynamiccl_ray.actors.status import Round
from dynamiccl_ray.arrays import Bool, Int64
from dynamiccl_ray.control.loop import Loop, Phase

HISTORY_ROUNDS: Final = 2000
"""That status and checkpoints look back on."""
# What keys run by now counts by so much less in every epoch; and the share of it that the run's phase speaks of.
_FADING: Final = 0.8
_MOST: Final = 0.95
# Phases, the one that is furthest behind first.
_BEHIND: Final = (Phase.BASELINE, Phase.ADAPT, Phase.LEARN, Phase.EXPLOIT)


class Phases:
    """``epoch``, ``round`` and ``collectives`` count from the beginning of the run."""

    def __init__(self, loop: Loop) -> None:
        self._loop: Final = loop
        self.epoch = self.round = self.collectives = 0
        self.epochs_in_round = 0
        self.phase, self._since = Phase.BASELINE, 0
        self.history: list[Round] = []
        self._entropy: list[float] = []
        # (K,) collectives of each key, the older the less.
        self._running = np.zeros(0)

    def grow(self, n: int) -> None:
        """New keys, as in the control loop."""
        self._running = np.append(self._running, np.zeros(n))

    def keep(self, rows: Bool) -> None:
        """Forgets all other keys (a mask (K,))."""
        self._running = self._running[rows]

    def runs(self, rows: Int64) -> Bool:
        """(N,) which of these keys run by now."""
        return np.asarray(self._running[rows] >= 1)

    def end_epoch(self, row: Int64, entropy: list[float]) -> bool:
        """These keys ran, once for each collective; ``entropy`` (nats) is of what was drawn. Whether what was
        learned is exploited from now on."""
        if entropy:
            self._entropy.append(float(np.mean(entropy)))
        self.epoch += 1
        self.epochs_in_round += 1
        self.collectives += len(row)
        self._running = self._running * _FADING + np.bincount(row, minlength=len(self._running))
        phase = self._speaking()
        changed = phase is not self.phase
        if changed:
            self.phase, self._since = phase, self.round
        return changed and phase is Phase.EXPLOIT

    def end_round(self, version: int) -> None:
        """``version``: the newest in force."""
        self.history.append(
            Round(
                round=self.round,
                epoch=self.epoch,
                phase=self.phase.name.lower(),
                entropy=float(np.mean(self._entropy)) if self._entropy else None,
                collectives=self.collectives,
                version=version,
                keys=self.keys(),
            )
        )
        del self.history[:-HISTORY_ROUNDS]
        self._entropy = []
        self.round += 1
        self.epochs_in_round = 0

    def keys(self) -> dict[str, int]:
        """How many keys are in each phase, of those that have been measured."""
        measured = self._loop.phase[self._loop.measured > 0]
        return {phase.name.lower(): int(np.count_nonzero(measured == phase)) for phase in Phase}

    @property
    def rounds_in_phase(self) -> int:
        """Rounds since the run's phase changed."""
        return self.round - self._since

    def _speaking(self) -> Phase:
        """Of the keys that make up most of what runs, the one that is furthest behind; a rare key speaks for nobody."""
        order = np.argsort(-self._running, kind="stable")
        share = np.cumsum(self._running[order])
        if not len(order) or share[-1] <= 0:
            return self.phase
        most = order[: int(np.searchsorted(share, _MOST * share[-1])) + 1]
        phase = self._loop.phase[most]
        # A check is short, and what was chosen before it is most likely chosen after it.
        return Phase(min(np.where(phase == Phase.CHECK, Phase.EXPLOIT, phase).tolist(), key=_BEHIND.index))

    # -- durability --

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "phase": self.phase.name,
            "history": [asdict(round_) for round_ in self.history],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``, after the control loop has its keys again."""
        for name in _COUNTS:
            setattr(self, name, int(state[name]))
        self.phase = Phase[state["phase"]]
        self.history = [Round(**round_) for round_ in state["history"]]
        self._running = np.zeros(len(self._loop))


_COUNTS: Final = ("epoch", "round", "collectives")
