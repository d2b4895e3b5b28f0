"""The period of a sequence of calls, some of which were not seen: what a training job repeats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

MOST_CALLS: Final = 1 << 16
"""The last ones are looked at."""
_LEAST_SCORE: Final = 0.8
_EQUAL: Final = 0.005
_TIMES: Final = 3

Symbols = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is repeated, from the first call that is followed by itself a period later."""

    first: int
    """Its call number."""
    symbols: tuple[int, ...]


def find_step(number: Symbols, symbol: Symbols) -> Step | None:
    """The shortest step that calls repeat three times or more; ``number`` (N,) rising call numbers, ``symbol`` (N,)
    what was called, from 0. A few calls may be of something else. None where there is no such step, or where some of
    its calls were never seen.
    """
    if not len(number):
        return None
    first = max(int(number[0]), int(number[-1]) - MOST_CALLS + 1)
    calls = np.full(int(number[-1]) - first + 1, -1, np.int64)
    calls[number[number >= first] - first] = symbol[number >= first]
    period = _period(calls)
    if period is None:
        return None
    start, stop = _regular(calls, period)
    place = np.arange(start, stop) % period
    seen = calls[start:stop] >= 0
    values = np.full(period, -1, np.int64)
    values[place[seen]] = calls[start:stop][seen]
    if (values < 0).any() or np.mean(values[place[seen]] == calls[start:stop][seen]) < _LEAST_SCORE:
        return None
    return Step(first=first + start, symbols=tuple(np.roll(values, -(start % period)).tolist()))


def _period(calls: Symbols) -> int | None:
    """The shortest shift under which calls meet their like: all together, and the rare ones as well as the frequent."""
    seen = calls >= 0
    symbols, counts = np.unique(calls[seen], return_counts=True)
    shifts = np.arange(len(calls) // _TIMES + 1)
    size = 1 << (2 * len(calls) - 1).bit_length()
    every = np.fft.rfft(seen, size)

    def pairs(left: npt.NDArray[np.complex128], right: npt.NDArray[np.complex128]) -> npt.NDArray[np.float64]:
        return np.rint(np.fft.irfft(left.conj() * right, size)[: len(shifts)])

    of_all = pairs(every, every)
    met = np.zeros(len(shifts))
    rates, symbols_in = np.zeros(len(shifts)), np.zeros(len(shifts))
    for value, count in zip(symbols.tolist(), counts.tolist(), strict=True):
        mine = np.fft.rfft(calls == value, size)
        same, known = pairs(mine, mine), pairs(mine, every)
        met += same
        # A part of the step is called at least once a step.
        part = count * shifts >= counts.sum() / 2
        rates += part * same / np.maximum(known, 1)
        symbols_in += part
    score = met / np.maximum(of_all, 1) * rates / np.maximum(symbols_in, 1)
    score[(of_all < shifts) | (shifts == 0)] = 0
    best = score.max()
    if best < _LEAST_SCORE:
        return None
    return int(np.flatnonzero(score >= (best if best == 1 else best - _EQUAL))[0])


def _regular(calls: Symbols, period: int) -> tuple[int, int]:
    """The first stretch of three steps and more that are alike, or the longest there is."""
    now, later = calls[:-period], calls[period:]
    broken = np.flatnonzero((now >= 0) & (later >= 0) & (now != later))
    starts, ends = np.append(0, broken + 1), np.append(broken, len(now))
    long = np.flatnonzero(ends - starts >= (_TIMES - 1) * period)
    at = long[0] if len(long) else np.argmax(ends - starts)
    return int(starts[at]), int(ends[at]) + period


def weighted_order(counts: npt.NDArray[np.int64], most: int) -> Symbols:
    """Symbols as often as they were called, spread evenly, the rarest once; fewer than about ``most`` in all."""
    each = np.maximum(1, np.rint(counts / max(counts.min(), counts.sum() / most))).astype(np.int64)
    symbol = np.repeat(np.arange(len(counts)), each)
    place = np.concatenate([(np.arange(n) + 0.5) / n for n in each.tolist()])
    return symbol[np.lexsort((symbol, place))]
