"""Whether a network on which a key's times have changed is another one for its choice, too.

An alarm says that times have moved. Often all actions have moved alike: the network is busier, or its noise wanders. So
the actions that matter are measured once more, in turns, so that what wanders is the same for all of them: the one in
force, NCCL's own, and the best of those that contend. Only where they stand to each other in another way than before is
there anything to learn.

Where they stand as before, other pairs are looked at once: what was far behind is the best now if it has not moved, and
the action in force has. One look is no proof. What is ahead by it is checked again, in turns with the action in force.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dynamiccl_ray.actions import OWN_ACTION, action_parts
from dynamiccl_ray.arrays import Bool, Float64, Int64
from dynamiccl_ray.control.evidence import Evidence
from dynamiccl_ray.control.trigger import BATCH

SAMPLES: Final = 2
"""Collectives of each turn."""
TURNS: Final = 3
"""Of each action that contends."""
# Actions that contend: in force, NCCL's own, the best of two other pairs, and the best of this pair otherwise.
_CONTEND: Final = 5
# Actions that are looked at, of further pairs, and what they are before they are chosen.
_LOOKS: Final = 3
_OPEN: Final = -2
_PLACES: Final = _CONTEND + _LOOKS
# Further behind than this, as a log, an action contends no more.
_REACH: Final = 0.3
# NCCL's own choice is measured all the same, but where it takes twice as long: with it, what a check has measured is
# known also where the key begins anew.
HOPELESS: Final = 0.7
# What is looked at was behind by no more than so much beyond what the action in force has moved by: if it has not moved
# itself, it is ahead now, or nearly; and where all have become faster, it may have by twice as much.
_NEARLY: Final = 0.1
# A difference between two actions has changed beyond so many standard errors, and by so much. Where it has changed
# that far the network is another, whichever of them is the faster one.
_SURE: Final = 3.0
_LEAST: Final = 0.03
_FAR: Final = 0.2
# Standard deviation of the median of three normal numbers over that of their mean.
_MEDIAN: Final = 1.16
# A key whose choice stood is not checked again for so many of its collectives, twice as many each time.
_CALM: Final = 128
_MOST_DOUBLINGS: Final = 6

_SHAPES: Final[dict[str, tuple[tuple[int, ...], type, int]]] = {
    "actions": ((_PLACES,), np.int64, -1),
    "times": ((_PLACES, TURNS), np.float64, 0),
    "samples": ((_PLACES,), np.float64, 0),
    "square": ((_PLACES,), np.float64, 0),
    "turn": ((), np.int64, 0),
    "stood": ((), np.int64, 0),
    "calm_until": ((), np.int64, 0),
    "asked": ((), np.int64, 0),
    "began": ((), np.int64, 0),
}


class Checks:
    """Of K keys."""

    actions: Int64
    """(K, 8) flat actions that are measured: 5 that contend, the one in force first, and 3 that are looked at, -2 until
    they are chosen; -1 behind the last one of either."""
    times: Float64
    """(K, 8, TURNS) mean log time of each turn; of what is looked at, of the one collective."""
    samples: Float64
    """(K, 8) in all turns, and their squared deviations within these."""
    square: Float64
    turn: Int64
    """(K,) of the check, from 0."""
    stood: Int64
    """(K,) checks in a row in which the choice stood."""
    calm_until: Int64
    """(K,) samples of the key, ever, until which alarms are not looked into."""
    asked: Int64
    """(K,) 1 where there was an alarm in that time."""
    began: Int64
    """(K,) decisions of the key when its check began."""

    def __init__(self) -> None:
        for name, (shape, kind, _) in _SHAPES.items():
            setattr(self, name, np.zeros((0, *shape), kind))

    def grow(self, keys: int) -> None:
        """``keys`` new ones."""
        for name, (shape, kind, fill) in _SHAPES.items():
            setattr(self, name, np.concatenate([getattr(self, name), np.full((keys, *shape), fill, kind)]))

    def keep(self, rows: Bool) -> None:
        """Forgets all other keys (a mask (K,))."""
        for name in _SHAPES:
            setattr(self, name, getattr(self, name)[rows])

    def begin(self, rows: Int64, wanted: Int64, decisions: Int64, evidence: Evidence, allowed: Bool) -> None:
        """Keys (R,) whose ``wanted`` (R,) action has another time now, after so many ``decisions`` (R,); ``allowed``
        (R, N_ACTIONS) may be measured."""
        self.began[rows] = decisions
        self.actions[rows, :_CONTEND], self.actions[rows, _CONTEND:], self.turn[rows] = -1, _OPEN, 0
        self.samples[rows] = self.square[rows] = 0
        for row, action, may in zip(rows.tolist(), wanted.tolist(), allowed, strict=True):
            contend = _contenders(row, action, evidence, may)
            self.actions[row, : len(contend)] = contend

    def look(self, rows: Int64, evidence: Evidence, allowed: Bool) -> None:
        """What contends in these keys (R,) stands as before: chooses what is looked at, if that was not done."""
        first = self.actions[rows, _CONTEND] == _OPEN
        for row, may in zip(rows[first].tolist(), allowed[first], strict=True):
            known = evidence.mean(np.array([row]), self.actions[row, :1])[0]
            moved = abs(float(np.median(self.times[row, 0]) - known))
            found = _further(row, self.actions[row, :_CONTEND], evidence, may, float(known) + moved + _NEARLY)
            self.actions[row, _CONTEND:] = -1
            self.actions[row, _CONTEND : _CONTEND + len(found)] = found

    def next(self, rows: Int64) -> Int64:
        """(R,) the action of the turn that comes."""
        return np.asarray(self.actions[rows, self._next(rows)[1]])

    def takes(self, rows: Int64) -> Int64:
        """(R,) collectives of the turn that comes."""
        return np.where(self._next(rows)[1] < _CONTEND, SAMPLES, 1)

    def record(self, rows: Int64, samples: Float64, mean: Float64, square: Float64) -> None:
        """A turn (R,) of each of these keys is over."""
        turn, place = self._next(rows)
        self.times[rows, place, turn] = mean
        looks = place >= _CONTEND
        self.times[rows[looks], place[looks]] = mean[looks, None]
        self.samples[rows, place] += samples
        self.square[rows, place] += square
        self.turn[rows] += 1

    def contended(self, rows: Int64) -> Bool:
        """(R,) whether the last turn was the last of what contends."""
        return np.asarray(self.turn[rows] == TURNS * self._contending(rows))

    def over(self, rows: Int64) -> Bool:
        """(R,) whether all turns are over, also of what is looked at."""
        return np.asarray(self.turn[rows] == TURNS * self._contending(rows) + self._looks(rows))

    def level(self, rows: Int64) -> Float64:
        """(R, 8) log times of a check that is over: of the action in force the median of its turns, and of the others
        what they were off from it, turn by turn. So what lasts for less than a turn changes none of them."""
        own = self.times[rows, :1]
        return np.asarray(np.median(own, -1) + np.median(self.times[rows] - own, -1))

    def _next(self, rows: Int64) -> tuple[Int64, Int64]:
        """(R,) which turn of its action comes, and the place of that."""
        turn, width = self.turn[rows], self._contending(rows)
        look = turn - TURNS * width
        return np.where(look < 0, turn // width, 0), np.where(look < 0, turn % width, _CONTEND + look)

    def _contending(self, rows: Int64) -> Int64:
        return np.asarray((self.actions[rows, :_CONTEND] >= 0).sum(-1))

    def _looks(self, rows: Int64) -> Int64:
        return np.asarray((self.actions[rows, _CONTEND:] >= 0).sum(-1))

    def differs(self, rows: Int64, evidence: Evidence, deviation: Float64) -> Bool:
        """(R,) whether what contends, and has had its turns, stands to the first in another way than by ``evidence``.
        ``deviation`` (R,) is of the mean of a batch of 8."""
        out = np.zeros(len(rows), np.bool_)
        # The median of three is that much less sure than their mean.
        turn = _MEDIAN * np.sqrt(2 / TURNS * BATCH / SAMPLES) * deviation
        for i, (row, level) in enumerate(zip(rows.tolist(), self.level(rows), strict=True)):
            places = int(self._contending(rows[i : i + 1])[0])
            actions, now = self.actions[row, :places], level[:places]
            of = np.full(places, row)
            then, samples = evidence.mean(of, actions), evidence.samples[of, actions]
            moved = (now - now[0]) - (then - then[0])
            error = np.sqrt(turn[i] ** 2 + float(evidence.noise[row]) ** 2 * (1 / samples + 1 / samples[0]))
            changed = np.abs(moved) > np.maximum(_SURE * error, _LEAST)
            overtaken = changed & (now < now[0])
            out[i] = bool((overtaken | (changed & (np.abs(moved) > _FAR))).any())
        return out

    def again(self, rows: Int64, deviation: Float64) -> Bool:
        """(R,) whether in a check that is over what was looked at is ahead of all that contends. Then the best of that
        contends with the action in force in a check that begins here. ``deviation`` as in ``differs``."""
        level, there = self.level(rows), self.actions[rows] >= 0
        least = np.where(there, level, np.inf)[:, :_CONTEND].min(-1)
        looks = np.where(there, level, np.inf)[:, _CONTEND:]
        error = np.sqrt(BATCH * (1 + _MEDIAN**2 / (TURNS * SAMPLES))) * deviation
        ahead = looks.min(-1) < least - np.maximum(_SURE * error, _LEAST)
        of = rows[ahead]
        best = self.actions[of, _CONTEND + looks[ahead].argmin(-1)]
        self.actions[of, 1], self.actions[of, 2:] = best, -1
        self.turn[of] = self.samples[of] = self.square[of] = 0
        return np.asarray(ahead)

    def stand(self, rows: Int64, measured: Int64) -> None:
        """The choice of these keys stood, at so many samples (R,) of each."""
        self.stood[rows] += 1
        self.calm_until[rows] = measured + _CALM * 2 ** np.minimum(self.stood[rows], _MOST_DOUBLINGS)

    def heard(self, rows: Int64, measured: Int64, alarm: Bool) -> Bool:
        """(R,) whether alarms (R,) of keys that have so many samples are looked into now. One that comes while a key is
        left in peace waits until that is over."""
        calm = measured < self.calm_until[rows]
        waited = self.asked[rows] > 0
        self.asked[rows] = calm & (waited | alarm)
        return ~calm & (waited | alarm)

    def forget(self, rows: Int64) -> None:
        """These keys begin anew."""
        self.stood[rows] = self.calm_until[rows] = self.asked[rows] = 0

    def state(self) -> dict[str, Any]:
        """Plain arrays, for a checkpoint."""
        return {name: getattr(self, name) for name in _SHAPES}

    def restore(self, state: dict[str, Any]) -> None:
        """After ``grow`` by the same keys."""
        for name in _SHAPES:
            getattr(self, name)[:] = state[name]


def _contenders(row: int, wanted: int, evidence: Evidence, allowed: Bool) -> list[int]:
    """``wanted``, NCCL's own choice, and of what was measured and is ``allowed`` (N_ACTIONS,) the fastest, unless they
    are far behind."""
    now = float(evidence.mean(np.array([row]), np.array([wanted]))[0])
    alone = wanted == OWN_ACTION or float(evidence.baseline[row]) - now > HOPELESS
    contend = [wanted] if alone else [wanted, OWN_ACTION]
    order, mean = _by_time(row, evidence, allowed)
    pair, near = action_parts(order)[0], mean - now <= _REACH
    mine = int(action_parts(np.array([wanted]))[0][0])
    others = [i for i in _first(pair) if pair[i] != mine and near[i]][:2]
    alike = np.flatnonzero((pair == mine) & near & (order != wanted))[:1].tolist()
    return [*contend, *order[others + alike].tolist()]


def _further(row: int, contend: Int64, evidence: Evidence, allowed: Bool, most: float) -> list[int]:
    """Of what was measured and is ``allowed`` (N_ACTIONS,), with a log time of at most ``most``: NCCL's own choice, and
    the fastest of pairs that do not contend."""
    own = [] if OWN_ACTION in contend or evidence.baseline[row] > most else [OWN_ACTION]
    order, mean = _by_time(row, evidence, allowed)
    pair, mine = action_parts(order)[0], action_parts(contend[contend >= 0])[0]
    found = order[[i for i in _first(pair) if pair[i] not in mine and mean[i] <= most]].tolist()
    return [*own, *found][:_LOOKS]


def _by_time(row: int, evidence: Evidence, allowed: Bool) -> tuple[Int64, Float64]:
    """Flat actions that were measured, but for NCCL's own choice, the fastest first, and their mean log times."""
    measured = np.flatnonzero((evidence.samples[row] > 0) & allowed)
    measured = measured[measured != OWN_ACTION]
    mean = evidence.mean(np.full(len(measured), row), measured)
    by = np.argsort(mean, kind="stable")
    return measured[by], mean[by]


def _first(pair: Int64) -> list[int]:
    """Where each pair comes first."""
    return sorted(np.unique(pair, return_index=True)[1].tolist())
