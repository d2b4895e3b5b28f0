"""Whether a network on which a key's times have changed is another one for its choice, too.

An alarm says that times have moved. Often all actions have moved alike: the network is busier, or its noise wanders. So
the actions that matter are measured once more, in turns, so that what wanders is the same for all of them: the one in
force, NCCL's own, and the best of those that contend. What is clearly as far behind as it was has one turn. Only where
they stand to each other in another way than before is there anything to learn.

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

TURNS: Final = 4
MOST_TURNS: Final = 6
"""Of each action that contends, one collective each; and where times vary by much."""
# Standard deviation of the log of one time beyond which they do.
_NOISY: Final = 0.1
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
# Unless what is in force takes what it took, to within so much, and that was measured so often: then the others were
# measured in a burst, say. What is ahead of it by this much all the same is of another network.
STAYED: Final = 0.05
WELL_KNOWN: Final = 24
_FAR_AHEAD: Final = 0.1
# What is ahead by less than this, as a log, is taken without anything being learned anew.
_AHEAD: Final = 0.05
# Times that go back to what they were before a check do so to within this share of what they had moved by, and that was
# this much, as a log, and no more. What moves further is another network, whatever it was before.
_BACK: Final = 1 / 3
_LEAST_STEP: Final = 0.1
_MOST_STEP: Final = 0.35
# Standard deviations of a batch that it was, too.
_STEP: Final = 4.0
# Standard deviation of what a change of the network does to one action beyond what it does to all.
_APART: Final = 0.05
# What is in force has moved by so much, as a log, within a check: the network changes.
_MOVED: Final = 0.25
# Standard deviation of the median of six normal numbers over that of their mean; of four it is 1.09.
_MEDIAN: Final = 1.14
# A key whose choice stood is not checked again for so many of its collectives, twice as many each time.
_CALM: Final = 128
_MOST_DOUBLINGS: Final = 6

_SHAPES: Final[dict[str, tuple[tuple[int, ...], type, int]]] = {
    "actions": ((_PLACES,), np.int64, -1),
    "takes_turns": ((_PLACES,), np.int64, 0),
    "turns": ((_PLACES,), np.int64, 0),
    "most": ((), np.int64, TURNS),
    "off": ((_PLACES, MOST_TURNS), np.float64, 0),
    "samples": ((_PLACES,), np.float64, 0),
    "square": ((_PLACES,), np.float64, 0),
    "stood": ((), np.int64, 0),
    "calm_until": ((), np.int64, 0),
    "asked": ((), np.int64, 0),
    "began": ((), np.int64, 0),
    "anew": ((), np.int64, 0),
    "way_back": ((), np.float64, 0),
}


class Checks:
    """Of K keys."""

    actions: Int64
    """(K, 8) flat actions that are measured: 5 that contend, the one in force first, and 3 that are looked at, -2 until
    they are chosen; -1 behind the last one of either."""
    takes_turns: Int64
    """(K, 8) turns that each action takes, and has had."""
    turns: Int64
    most: Int64
    """(K,) turns of what contends, unless it is clearly as far behind as it was."""
    off: Float64
    """(K, 8, MOST_TURNS) mean log time of each turn: of the action in force as it is; of the others over that, in the
    same turn. Of turns that an action does not take, what it was in those before."""
    samples: Float64
    """(K, 8) in all turns, and their squared deviations within these."""
    square: Float64
    stood: Int64
    """(K,) checks in a row in which the choice stood, but for those that came while a key was left in peace."""
    calm_until: Int64
    """(K,) samples of the key, ever, until which alarms are not looked into."""
    asked: Int64
    """(K,) 1 where there was an alarm in that time."""
    began: Int64
    """(K,) decisions of the key when its check began."""
    anew: Int64
    """(K,) 1 where the check has begun anew."""
    way_back: Float64
    """(K,) by how much longer all times were, as a log, before the last check that moved them; 0 for nothing."""

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

    def begin(
        self,
        rows: Int64,
        wanted: Int64,
        decisions: Int64,
        evidence: Evidence,
        deviation: Float64,
        allowed: Bool,
        hopeless: Bool,
    ) -> None:
        """Keys (R,) whose ``wanted`` (R,) action has another time now, after so many ``decisions`` (R,); ``allowed``
        (R, N_ACTIONS) may be measured. Where NCCL's own choice is ``hopeless`` (R,), it does not contend.
        ``deviation`` (R,) is of the mean of a batch of 8."""
        self.began[rows], self.anew[rows] = decisions, 0
        self.most[rows] = np.where(np.sqrt(BATCH) * deviation > _NOISY, MOST_TURNS, TURNS)
        self.actions[rows, :_CONTEND], self.actions[rows, _CONTEND:] = -1, _OPEN
        for row, action, may, no in zip(rows.tolist(), wanted.tolist(), allowed, hopeless.tolist(), strict=True):
            contend = _contenders(row, action, evidence, may, no)
            self.actions[row, : len(contend)] = contend
        self._from_the_start(rows)

    def _from_the_start(self, rows: Int64) -> None:
        self.turns[rows] = self.samples[rows] = self.square[rows] = 0
        self.takes_turns[rows] = np.where(self.actions[rows] >= 0, self.most[rows, None], 0)

    def moved(self, rows: Int64, deviation: Float64) -> Bool:
        """(R,) whether what is in force took another time in the first half of its turns than in the second, by far:
        then the network has changed in the check, which begins anew here, once. ``deviation`` as in ``differs``."""
        turn, most = np.arange(MOST_TURNS), self.most[rows, None]
        sign = np.where(turn < most // 2, -1, turn < most)
        away = np.abs((self.off[rows, 0] * sign).sum(-1)) / (self.most[rows] / 2)
        error = np.sqrt(BATCH * 4 / self.most[rows]) * deviation
        of = rows[(away > np.maximum(_SURE * error, _MOVED)) & (self.anew[rows] == 0)]
        self.anew[of] = 1
        self._from_the_start(of)
        return np.isin(rows, of)

    def look(self, rows: Int64, before: Int64, evidence: Evidence, allowed: Bool) -> None:
        """What contends in these keys (R,) stands as before: chooses what is looked at, if that was not done.
        ``before`` (R,) is what they exploited before the last shift, NCCL's own choice for nothing."""
        first = self.actions[rows, _CONTEND] == _OPEN
        for row, was, may in zip(rows[first].tolist(), before[first].tolist(), allowed[first], strict=True):
            known = evidence.mean(np.array([row]), self.actions[row, :1])[0]
            moved = float(self._middle(np.array([row]))[0, 0] - known)
            most, own = float(known) + abs(moved) + _NEARLY, moved < -_LEAST or moved > _FAR
            found = _further(row, self.actions[row, :_CONTEND], was, evidence, may, most, own=own)
            self.actions[row, _CONTEND:] = -1
            self.actions[row, _CONTEND : _CONTEND + len(found)] = found
            self.takes_turns[row, _CONTEND:] = self.actions[row, _CONTEND:] >= 0

    def next(self, rows: Int64) -> Int64:
        """(R,) the action of the turn that comes."""
        return np.asarray(self.actions[rows, self._next(rows)])

    def record(
        self, rows: Int64, samples: Float64, mean: Float64, square: Float64, evidence: Evidence, deviation: Float64
    ) -> None:
        """A turn (R,) of each of these keys is over. ``deviation`` (R,) is of the mean of a batch of 8."""
        place = self._next(rows)
        turn, looks, first = self.turns[rows, place], place >= _CONTEND, place == 0
        in_force = np.where(looks, self._middle(rows)[:, 0], self.off[rows, 0, turn])
        off = mean - np.where(first, 0.0, in_force)
        self.off[rows, place, turn] = off
        self.off[rows[looks], place[looks]] = off[looks, None]
        self.samples[rows, place] += samples
        self.square[rows, place] += square
        self.turns[rows, place] += 1
        rival = ~looks & ~first
        self._drop(rows[rival], place[rival], evidence, deviation[rival])

    def _drop(self, rows: Int64, place: Int64, evidence: Evidence, deviation: Float64) -> None:
        """What contends, but is as far behind the action in force as it was, takes no further turns."""
        turns = self.turns[rows, place]
        of = np.arange(MOST_TURNS) < turns[:, None]
        off = (self.off[rows, place] * of).sum(-1) / turns
        before = evidence.mean(rows, self.actions[rows, place]) - evidence.mean(rows, self.actions[rows, 0])
        behind = off > _SURE * np.sqrt(2 * BATCH / turns) * deviation
        # Where the network changes in a check, one turn alone may put anything behind.
        least = np.minimum(np.where(of, self.off[rows, place], np.inf).min(-1), before)
        out = behind & (2 * least >= off) & (np.abs(off - before) <= _FAR)
        rows, place = rows[out], place[out]
        self.takes_turns[rows, place] = turns[out]
        self.off[rows, place] = np.where(of[out], self.off[rows, place], off[out, None])

    def contended(self, rows: Int64) -> Bool:
        """(R,) whether all turns of what contends are over."""
        return np.asarray(self._had(rows)[:, :_CONTEND].all(-1))

    def own_contends(self, rows: Int64) -> Bool:
        """(R,) whether NCCL's own choice does, or has in the last check."""
        return np.asarray((self.actions[rows, :_CONTEND] == OWN_ACTION).any(-1))

    def over(self, rows: Int64) -> Bool:
        """(R,) whether all turns are over, also of what is looked at."""
        return np.asarray(self._had(rows).all(-1))

    def level(self, rows: Int64) -> Float64:
        """(R, 8) log times of a check that is over: of the action in force the median of its turns, and of the others
        what they were off from it, turn by turn. So what lasts for less than a turn changes none of them."""
        level = self._middle(rows)
        level[:, 1:] += level[:, :1]
        return level

    def _middle(self, rows: Int64) -> Float64:
        """(R, 8) median of ``off`` over the turns of a key."""
        off = self.off[rows]
        few, many = np.median(off[..., :TURNS], -1), np.median(off, -1)
        return np.asarray(np.where(self.most[rows, None] == TURNS, few, many))

    def _had(self, rows: Int64) -> Bool:
        """(R, 8) whether an action has had its turns."""
        return np.asarray(self.turns[rows] >= self.takes_turns[rows])

    def _next(self, rows: Int64) -> Int64:
        """(R,) the place of the action whose turn comes: in turns what contends, and then what is looked at."""
        place = np.arange(_PLACES)
        order = np.where(place < _CONTEND, self.turns[rows], MOST_TURNS) * _PLACES + place
        return np.asarray(np.where(self._had(rows), np.iinfo(np.int64).max, order).argmin(-1))

    def differs(self, rows: Int64, evidence: Evidence, deviation: Float64, new: Bool) -> Bool:
        """(R,) whether what contends, and has had its turns, stands to the first in another way than by ``evidence``:
        it is ahead by ``_AHEAD``, and was not before, or it has moved far. Where the first is known well and takes what
        it took, only what is ahead by ``_FAR_AHEAD`` counts; and what has moved as a burst moves it does not count as
        far. Of a ``new`` key (R,), which learns for the first time, nothing that a burst may have done counts: any part
        of what it knows may be of one. ``deviation`` (R,) is of the mean of a batch of 8."""
        moved, error, alone = self._moved(rows, evidence, deviation)
        changed = self._changed(moved, error) & (self.turns[rows, :_CONTEND] == self.most[rows, None])
        actions, level = self.actions[rows, :_CONTEND], self.level(rows)[:, :_CONTEND]
        well_known = evidence.samples[rows[:, None], actions] >= WELL_KNOWN
        away = np.abs(level[:, :1] - evidence.mean(rows, actions[:, 0])[:, None])
        stayed = well_known[:, :1] & (away <= np.maximum(_SURE * alone[:, :1], STAYED))
        # What was measured in a burst is off by the burst, or twice where a check has moved all for that since.
        burst = well_known[:, :1] & ~well_known & (away < _MOST_STEP)
        burst &= np.abs(np.abs(moved) - away) <= np.maximum(_SURE * alone, STAYED)
        ahead = level[:, :1] - level
        overtaken = (ahead > np.where(stayed, _FAR_AHEAD, _AHEAD)) & (ahead + moved < _AHEAD)
        far = (np.abs(moved) > _FAR) & ~burst & ~stayed
        beyond = np.maximum(np.abs(moved), away) > _MOST_STEP
        return np.asarray((changed & (overtaken | far) & (beyond | ~new[:, None])).any(-1))

    def moved_by(self, rows: Int64, evidence: Evidence, deviation: Float64) -> tuple[Float64, Float64]:
        """By how much, as a log, times are longer than by ``evidence``, in checks in which what contends stands: (R,)
        of all of a key's actions, and (R, 5) of what contends beyond that. ``deviation`` as in ``differs``.

        What was measured has moved by what all have in common, and by something of its own. Of the first, each weighs
        as much as it says; the second is believed as far as it was measured well, or is too large for an error.
        """
        moved, error, alone = self._moved(rows, evidence, deviation)
        weight = np.where(self._changed(moved, error), 0.0, 1 / (alone**2 + _APART**2))
        shared = (weight * moved).sum(-1) / weight.sum(-1)
        first = self.level(rows)[:, 0] - evidence.mean(rows, self.actions[rows, 0])
        own, error = moved - shared[:, None], np.where(np.isfinite(alone), alone, 0.0)
        # Empirical Bayes: what has moved far says itself that what is measured of it varies by more than usual.
        apart = np.maximum(_APART**2, own**2 - error**2)
        return np.asarray(first + shared), np.asarray(own * apart / (alone**2 + apart))

    def _moved(self, rows: Int64, evidence: Evidence, deviation: Float64) -> tuple[Float64, Float64, Float64]:
        """Of what contends, (R, 5) each: by how much longer it takes over the action in force than by ``evidence``, the
        standard error of that, and of what it takes alone; 0, and infinite, for what was not measured."""
        actions, turns = self.actions[rows, :_CONTEND], self.turns[rows, :_CONTEND]
        of = np.broadcast_to(rows[:, None], actions.shape)
        samples = np.where(actions >= 0, evidence.samples[of, actions], 0.0)
        known = np.where(samples > 0, evidence.mean(of, actions), 0.0)
        now = self.level(rows)[:, :_CONTEND]
        then = np.where(samples > 0, known - known[:, :1], 0.0)
        there = (actions >= 0) & (turns > 0)
        turn = _MEDIAN**2 * BATCH / np.maximum(turns, 1) * deviation[:, None] ** 2
        old = evidence.noise[rows].astype(np.float64)[:, None] ** 2 / np.maximum(samples, 1)
        error = np.sqrt(turn + turn[:, :1] + old + old[:, :1])
        alone = np.where(there & (samples > 0), np.sqrt(turn + old), np.inf)
        return np.where(there, now - now[:, :1] - then, 0.0), np.where(there, error, np.inf), alone

    @staticmethod
    def _changed(moved: Float64, error: Float64) -> Bool:
        return np.asarray(np.abs(moved) > np.maximum(_SURE * error, _LEAST))

    def again(self, rows: Int64, deviation: Float64) -> Bool:
        """(R,) whether in a check that is over what was looked at is ahead of all that contends. Then the best of that
        contends with the action in force in a check that begins here. ``deviation`` as in ``differs``."""
        level, there = self.level(rows), self.actions[rows] >= 0
        least = np.where(there, level, np.inf)[:, :_CONTEND].min(-1)
        looks = np.where(there, level, np.inf)[:, _CONTEND:]
        error = np.sqrt(BATCH * (1 + _MEDIAN**2 / self.most[rows])) * deviation
        ahead = looks.min(-1) < least - np.maximum(error, _LEAST)
        of = rows[ahead]
        best = self.actions[of, _CONTEND + looks[ahead].argmin(-1)]
        self.actions[of, 1], self.actions[of, 2:] = best, -1
        self._from_the_start(of)
        return np.asarray(ahead)

    def may_go_back(self, rows: Int64, by: Float64, deviation: Float64) -> None:
        """Checks of these keys have moved all that is known of them by so much (R,), as a log, for their times had
        moved alike. A burst ends: they may go back. ``deviation`` as in ``differs``."""
        far = (np.abs(by) > np.maximum(_LEAST_STEP, _STEP * deviation)) & (np.abs(by) < _MOST_STEP)
        self.way_back[rows[far]] = -by[far]

    def gone_back(self, rows: Int64, off: Float64) -> Bool:
        """(R,) whether times that are ``off`` (R,) by so much, as a log, have gone back to what they were before a
        check. They may come again from there; and whether all went back alike is checked once a key is not left in
        peace."""
        way = self.way_back[rows]
        back = (way != 0) & (np.abs(off - way) < _BACK * np.abs(way))
        self.way_back[rows[back]] *= -1
        self.asked[rows[back]] = 1
        return np.asarray(back)

    def stand(self, rows: Int64, measured: Int64) -> None:
        """The choice of these keys stood, at so many samples (R,) of each. That of a key which is left in peace anyway
        does not say that its alarms are false."""
        self.stood[rows] += measured >= self.calm_until[rows]
        self.calm_until[rows] = measured + _CALM * 2 ** np.minimum(self.stood[rows], _MOST_DOUBLINGS)

    def ask(self, rows: Int64, until: Int64) -> None:
        """The network of these keys, which are left in peace, may have changed: each is checked once it has ``until``
        (R,) samples, or once its peace is over if that is sooner."""
        self.asked[rows], self.calm_until[rows] = 1, np.minimum(self.calm_until[rows], until)

    def heard(self, rows: Int64, measured: Int64, alarm: Bool) -> Bool:
        """(R,) whether alarms (R,) of keys that have so many samples are looked into now. One that comes while a key is
        left in peace waits until that is over."""
        calm = measured < self.calm_until[rows]
        waited = self.asked[rows] > 0
        self.asked[rows] = calm & (waited | alarm)
        return ~calm & (waited | alarm)

    def forget(self, rows: Int64) -> None:
        """These keys begin anew."""
        self.stood[rows] = self.calm_until[rows] = self.asked[rows] = self.way_back[rows] = 0

    def state(self) -> dict[str, Any]:
        """Plain arrays, for a checkpoint."""
        return {name: getattr(self, name) for name in _SHAPES}

    def restore(self, state: dict[str, Any]) -> None:
        """After ``grow`` by the same keys."""
        for name in _SHAPES:
            getattr(self, name)[:] = state[name]


def _contenders(row: int, wanted: int, evidence: Evidence, allowed: Bool, hopeless: bool) -> list[int]:
    """``wanted``, NCCL's own choice unless that is ``hopeless``, and of what was measured and is ``allowed``
    (N_ACTIONS,) the fastest, unless they are far behind; the next one after ``wanted`` if that would be alone."""
    now = float(evidence.mean(np.array([row]), np.array([wanted]))[0])
    contend = [wanted] if wanted == OWN_ACTION or hopeless else [wanted, OWN_ACTION]
    order, mean = _by_time(row, evidence, allowed)
    (pair, channels, _), near = action_parts(order), mean - now <= _REACH
    mine, its = (int(part[0]) for part in action_parts(np.array([wanted]))[:2])
    others = [i for i in _first(pair) if pair[i] != mine and near[i]][:2]
    same = (pair == mine) & near & (order != wanted)
    # Another chunk often changes nothing.
    alike = np.concatenate([np.flatnonzero(same & (channels != its)), np.flatnonzero(same)])[:1].tolist()
    found = [*contend, *order[others + alike].tolist()]
    if len(found) > 1:
        return found
    # What is compared with nothing always stands.
    rest = order != wanted
    own_next = wanted != OWN_ACTION and float(evidence.baseline[row]) <= mean[rest].min(initial=np.inf)
    return [wanted, OWN_ACTION] if own_next else [wanted, *order[rest][:1].tolist()]


def _further(
    row: int, contend: Int64, before: int, evidence: Evidence, allowed: Bool, most: float, *, own: bool
) -> list[int]:
    """Of what is ``allowed`` (N_ACTIONS,): NCCL's own choice, and the fastest of pairs that do not contend, of what was
    measured and had a log time of at most ``most``. And ``before``, what was exploited before the last shift, and if
    so said NCCL's ``own`` choice, whatever they took since: a fault may have ended."""
    looks: list[int] = [OWN_ACTION] if OWN_ACTION not in contend and (own or evidence.baseline[row] <= most) else []
    if before != OWN_ACTION and allowed[before] and before not in contend:
        looks.append(before)
    order, mean = _by_time(row, evidence, allowed)
    further = order[mean <= most]
    taken = set(action_parts(np.array([*contend[contend >= 0], *looks]))[0].tolist())
    for action, pair in zip(further.tolist(), action_parts(further)[0].tolist(), strict=True):
        if pair not in taken:
            taken.add(pair)
            looks.append(action)
    return looks[:_LOOKS]


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
