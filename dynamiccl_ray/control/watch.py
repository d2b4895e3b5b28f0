"""What no key shows by itself: the Trigger Agent's watch over a communicator as a whole.

Decisions of its keys that exploit are gathered into frames: so many that each key has run once on the average, or more.
Two series come of the frames, each watched by the detector of ``trigger.py``:

- congestion: the bus bandwidth that was achieved against the one that has been shown. Of the same message these are to
  each other as its times are; each decision counts by the deviation that its time has;
- reconstruction: how badly a small autoencoder of the usual frames reconstructs this one. It is shown, by size of the
  message, how far decisions are off, and how far apart their ranks were.

The autoencoder is linear, so its best weights are known: the principal components of what it has seen (Baldi and
Hornik, Neural Networks, 1989). Only those that stand out from chance are its code (Marchenko and Pastur, 1967). So what
usually moves together, because the network wanders, is reconstructed, as far as it usually goes; the same move between
keys that usually are independent of each other is not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dynamiccl_ray.arrays import Bool, Float64, Int64
from dynamiccl_ray.control.trigger import Cusum

OWN_SHARE: Final = 1 / 2
"""Of the false alarms that a key may have, by its own detector; each series of its communicator has ``SHARE``."""
SHARE: Final = 1 / 4
SERIES: Final = ("reconstruction", "congestion")
CLASSES: Final = 3
"""Of messages by size, as many keys of a communicator in each."""
SIZE: Final = 2 * CLASSES
"""Of a frame."""
USUAL: Final = 32
"""Frames that the autoencoder is made of; then its weights stay, so that its errors vary alike for ever."""
# Decisions that a frame has at least, and of a communicator with many keys the share of them. A decision takes 8
# collectives, so that a false alarm in so many frames is none in fewer collectives of a key.
_DECISIONS: Final = 8
_OF_KEYS: Final = 1 / 8
# Frames that the detectors take together: a frame is a mean already.
_BATCH: Final = 4
# One decision counts as no further off than so many standard errors.
_FAR: Final = 6.0
# What varies by less than this is no less usual for it.
_LEAST_SPREAD: Final = 0.02
# A code goes as far as so many of its usual deviations.
_REACH: Final = 2.0
# Of a component that is no more than chance, the most that its share of the variance is: (1 + sqrt(SIZE / USUAL))^2.
_CHANCE: Final = (1 + (SIZE / USUAL) ** 0.5) ** 2


class Autoencoder:
    """Of the frames (N, SIZE) that it is made from."""

    def __init__(self, frames: Float64) -> None:
        self._mean = frames.mean(0)
        self._scale = np.maximum(frames.std(0, ddof=1), _LEAST_SPREAD)
        x = self._scaled(frames)
        values, vectors = np.linalg.eigh(x.T @ x / (len(x) - 1))
        self.code: Float64 = vectors[:, values > _CHANCE]
        """(SIZE, C), C of 0 and more: encodes by its product from the right, decodes by its transpose's."""
        self._reach = _REACH * np.sqrt(values[values > _CHANCE])

    def _scaled(self, frames: Float64) -> Float64:
        return np.asarray((frames - self._mean) / self._scale)

    def error(self, frames: Float64) -> Float64:
        """(N,) log of the mean squared error with which frames (N, SIZE) are reconstructed, in usual deviations."""
        x = self._scaled(frames)
        code = np.clip(x @ self.code, -self._reach, self._reach)
        return np.asarray(np.log(np.mean((x - code @ self.code.T) ** 2, -1) + 1e-6))


@dataclass(eq=False)
class _Usual:
    """On one communicator."""

    open: list[Float64] = field(default_factory=list)
    """Decisions (3,) of the frame that is not whole yet, see ``Watch.add``."""
    frames: list[Float64] = field(default_factory=list)
    """Until there are enough for the autoencoder."""
    autoencoder: Autoencoder | None = None

    def error(self, frame: Float64) -> float | None:
        """Of a frame (SIZE,); None while it is not known what is usual."""
        if self.autoencoder is not None:
            return float(self.autoencoder.error(frame[None])[0])
        self.frames.append(frame)
        if len(self.frames) == USUAL:
            self.autoencoder, self.frames = Autoencoder(np.array(self.frames)), []
        return None


class Watch:
    """Over the communicators of a growing set of keys."""

    def __init__(self, arl0: float) -> None:
        """``arl0``: collectives of a key to a false alarm of each series."""
        self._series: Final = {name: Cusum(arl0, _BATCH) for name in SERIES}
        self._numbers = np.zeros(0, np.int64)
        self._usual: list[_Usual] = []
        # (K,) communicator and class of each key, and (G,) the decisions that a frame takes.
        self._row = self._class = np.zeros(0, np.int64)
        self._takes = np.zeros(0)

    def know(self, group: Int64, nbytes: Int64) -> None:
        """All keys (K,) that there are by now: the number of each one's communicator, and its bytes. Communicators
        without keys are forgotten."""
        numbers, row, keys = np.unique(group, return_inverse=True, return_counts=True)
        stays, new = np.isin(self._numbers, numbers), numbers[~np.isin(numbers, self._numbers)]
        self._numbers = np.append(self._numbers[stays], new)
        self._usual = [*itertools.compress(self._usual, stays), *(_Usual() for _ in new)]
        for series in self._series.values():
            series.keep(stays)
            series.grow(len(new))
        # Numbers are ascending in ``numbers``, and in the order in which they came in ``_numbers``.
        at = np.argsort(self._numbers)
        self._row, self._takes = at[row], np.maximum(_DECISIONS, _OF_KEYS * keys)[np.argsort(at)]
        self._class = _classes(self._row, nbytes)

    def add(self, rows: Int64, off: Float64, skew: Float64) -> Bool:
        """Decisions (R,) of different keys that exploit: by how many standard errors each is off from what was known,
        and the log of the slowest rank's time over the fastest's. (K,) whether a key's communicator has an alarm.
        """
        alarm = np.zeros(len(self._numbers), np.bool_)
        decisions = np.stack([self._class[rows], np.clip(off, -_FAR, _FAR), skew], -1)
        said: dict[str, dict[int, float]] = {name: {} for name in SERIES}
        for at in np.unique(self._row[rows]).tolist():
            usual = self._usual[at]
            usual.open.extend(decisions[self._row[rows] == at])
            if len(usual.open) >= self._takes[at]:
                frame, usual.open = np.array(usual.open), []
                said["congestion"][at] = float(frame[:, 1].mean())
                if (error := usual.error(_frame(frame))) is not None:
                    said["reconstruction"][at] = error
        for name, by in said.items():
            of = np.array(list(by), np.int64)
            alarm[of] |= self._series[name].update(of, np.ones(len(of), np.int64), np.array(list(by.values()))) >= 0
        return np.asarray(alarm[self._row])

    def forget(self, rows: Int64) -> None:
        """What is usual on the communicators of these keys is learned anew."""
        of = np.unique(self._row[rows])
        for series in self._series.values():
            series.reset(of)
        for at in of.tolist():
            self._usual[at] = _Usual()

    def scores(self, number: int) -> dict[str, float]:
        """Of a communicator, each series over its threshold; an alarm is above 1. 0 while it is not known what is
        usual."""
        at = np.flatnonzero(self._numbers == number)
        return {name: float(series.score[at].max(initial=0.0)) for name, series in self._series.items()}


def _frame(decisions: Float64) -> Float64:
    """(SIZE,) of decisions (D, 3), see ``Watch.add``: by class, the sum of what is off in units of its deviation, and
    the mean skew."""
    place = decisions[:, 0].astype(np.int64)
    off, skew = (np.bincount(place, decisions[:, i], CLASSES) for i in (1, 2))
    count = np.maximum(np.bincount(place, minlength=CLASSES), 1)
    return np.concatenate([off / np.sqrt(count), skew / count])


def _classes(row: Int64, nbytes: Int64) -> Int64:
    """(K,) the class of each key's messages among those of its communicator ``row``: 0 for the smallest."""
    order = np.lexsort((nbytes, row))
    first = np.searchsorted(row[order], row)
    rank = np.empty(len(row), np.int64)
    rank[order] = np.arange(len(row))
    return np.asarray((rank - first) * CLASSES // np.bincount(row)[row]) if len(row) else rank
