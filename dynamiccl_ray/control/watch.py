"""What no key shows by itself: the Trigger Agent's watch over a communicator as a whole.

Decisions of its keys that exploit are gathered into frames: each key once, and eight decisions at least. Two series
come of the frames, each watched by the detector of ``trigger.py``:

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
EDGES: Final = (256 << 10, 16 << 20)
"""Bytes from which a message is medium, and large."""
CLASSES: Final = len(EDGES) + 1
SIZE: Final = 2 * CLASSES
"""Of a frame."""
USUAL: Final = 32
"""Frames that the autoencoder is made of; then its weights stay, so that its errors vary alike for ever."""
# Decisions that a frame has at least. Each is of one collective or more, so that ARL0 in frames is no less than in
# collectives of a key.
_DECISIONS: Final = 8
# Frames that the detectors take together: a frame is a sum already.
_BATCH: Final = 4
# One decision counts as no further off than so many deviations.
_FAR: Final = 6.0
# What varies by less than this is no less usual for it: logs of skew, and what is in deviations.
_LEAST_SKEW: Final = 0.01
_LEAST_SPREAD: Final = 0.2
# Decisions of a key from which its skew is known.
_SEEN: Final = 8
# Median absolute deviation of a normal number over its standard deviation.
_MAD: Final = 0.6745
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
    """On one communicator. A decision is (4,): the key's place among those of the communicator, its class, how far it
    is off, and its skew."""

    open: list[Float64] = field(default_factory=list)
    """Decisions of the frame that is not whole yet."""
    keys: set[int] = field(default_factory=set)
    """That it has."""
    frames: list[Float64] = field(default_factory=list)
    """(D, 4) each, until there are enough."""
    skew: Float64 = field(default_factory=lambda: np.zeros((2, 0)))
    """(2, N) of each key, how far apart ranks usually are, and by how much that varies: infinite where too little of it
    was seen."""
    autoencoder: Autoencoder | None = None

    def add(self, decision: Float64) -> Float64 | None:
        """The frame (D, 4) that is whole, if one is: one in which this key has been, and that is large enough."""
        key, whole = int(decision[0]), None
        if key in self.keys and len(self.open) >= _DECISIONS:
            whole, self.open, self.keys = np.array(self.open), [], set()
        self.open.append(decision)
        self.keys.add(key)
        return whole

    def error(self, frame: Float64) -> float | None:
        """Of the autoencoder; None while it is not known what is usual."""
        if self.autoencoder is not None:
            return float(self.autoencoder.error(self._summed(frame)[None])[0])
        self.frames.append(frame)
        if len(self.frames) == USUAL:
            self.skew = _usual_skew(np.concatenate(self.frames))
            self.autoencoder = Autoencoder(np.array([self._summed(of) for of in self.frames]))
            self.frames = []
        return None

    def _summed(self, frame: Float64) -> Float64:
        """(SIZE,) by class, how far decisions are off and how far apart ranks are, in deviations of a sum of as many.
        What did not run is as usual."""
        place, of = frame[:, 0].astype(np.int64), frame[:, 1].astype(np.int64)
        seen = place < self.skew.shape[1]
        usual, spread = self.skew[:, place[seen]]
        apart = np.zeros(len(frame))
        apart[seen] = np.clip((frame[seen, 3] - usual) / spread, -_FAR, _FAR)
        sums = [np.bincount(of, x, CLASSES) for x in (frame[:, 2], apart)]
        return np.concatenate(sums) / np.sqrt(np.maximum(np.tile(np.bincount(of, minlength=CLASSES), 2), 1))


def _usual_skew(decisions: Float64) -> Float64:
    """``_Usual.skew`` by decisions (D, 4)."""
    place = decisions[:, 0].astype(np.int64)
    out = np.zeros((2, int(place.max()) + 1))
    out[1] = np.inf
    for key in np.unique(place).tolist():
        skew = decisions[place == key, 3]
        middle = np.median(skew)
        if len(skew) >= _SEEN:
            out[:, key] = middle, max(_LEAST_SKEW, np.median(np.abs(skew - middle)) / _MAD)
    return out


class Watch:
    """Over the communicators of a growing set of keys."""

    def __init__(self, arl0: float) -> None:
        """``arl0``: collectives of a key to a false alarm of each series."""
        self._series: Final = {name: Cusum(arl0, _BATCH) for name in SERIES}
        self._numbers = np.zeros(0, np.int64)
        self._usual: list[_Usual] = []
        # (K,) communicator of each key, its place among the keys of that, and its class.
        self._row = self._place = self._class = np.zeros(0, np.int64)

    def know(self, group: Int64, nbytes: Int64) -> None:
        """All keys (K,) that there are by now: the number of each one's communicator, and its bytes. Communicators
        without keys are forgotten."""
        numbers, row = np.unique(group, return_inverse=True)
        stays, new = np.isin(self._numbers, numbers), numbers[~np.isin(numbers, self._numbers)]
        self._numbers = np.append(self._numbers[stays], new)
        self._usual = [*itertools.compress(self._usual, stays), *(_Usual() for _ in new)]
        for series in self._series.values():
            series.keep(stays)
            series.grow(len(new))
        # Numbers are ascending in ``numbers``, and in the order in which they came in ``_numbers``.
        self._row = np.argsort(self._numbers)[row]
        self._class = np.digitize(nbytes, EDGES)
        # Keys come behind those that are there, and go with their communicator: places stay.
        order = np.argsort(self._row, kind="stable")
        self._place = np.empty(len(row), np.int64)
        self._place[order] = np.arange(len(row)) - np.searchsorted(self._row[order], self._row[order])

    def add(self, rows: Int64, off: Float64, skew: Float64) -> Bool:
        """Decisions (R,) of different keys that exploit: by how many standard errors each is off from what was known,
        and the log of the slowest rank's time over the fastest's. (K,) keys of a frame that has raised an alarm.
        """
        alarm = np.zeros(len(self._row), np.bool_)
        decisions = np.stack([self._place[rows], self._class[rows], np.clip(off, -_FAR, _FAR), skew], -1)
        frames: dict[int, Float64] = {}
        said: dict[str, dict[int, float]] = {name: {} for name in SERIES}
        for at, decision in zip(self._row[rows].tolist(), decisions, strict=True):
            usual = self._usual[at]
            if (frame := usual.add(decision)) is not None:
                frames[at] = frame
                said["congestion"][at] = float(frame[:, 2].sum() / np.sqrt(len(frame)))
                if (error := usual.error(frame)) is not None:
                    said["reconstruction"][at] = error
        for name, by in said.items():
            of = np.array(list(by), np.int64)
            raised = self._series[name].update(of, np.ones(len(of), np.int64), np.array(list(by.values()))) >= 0
            for at in of[raised].tolist():
                alarm |= (self._row == at) & np.isin(self._place, frames[at][:, 0])
        return alarm

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
