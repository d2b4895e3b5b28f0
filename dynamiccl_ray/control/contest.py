"""Which of a key's actions is the best by what was measured since the last shift, which may not be, and what to measure
next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from dynamiccl_ray.actions import N_ACTIONS, N_CHANNELS, N_CHUNKS, OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.arrays import Bool, Float32, Float64, Int64, any_along
from dynamiccl_ray.control.comparing import compare, expected, unmeasured
from dynamiccl_ray.control.evidence import Means
from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS

# Fastest actions of a key that are compared: the time that this takes grows with their cube.
_MOST: Final = 24
# Fastest pairs of a key of which what was not measured is looked at.
_PAIRS: Final = 3
# Such actions of a key that are looked at, those of which most is expected.
_LOOK: Final = 16
# Fastest actions of a key that are looked at with one step more or less of channels or of chunk, whatever is expected.
_BESIDE: Final = 2
# Where nothing is known of channels: neither few nor many.
_MIDDLE: Final = CHANNEL_VALUES.index(8)
# By how much, as a log, such an action may be expected to be slower than the best.
_REACH: Final = 0.05


@dataclass(frozen=True, kw_only=True, eq=False)
class Contest:
    """Flat actions of R keys, by what was measured; NCCL's own choice where nothing was."""

    best: Int64
    """(R,) with the least mean time."""
    behind: Int64
    """(N, 2) index into the R keys, and an action that is behind, or may not be chosen."""
    known: Int64
    """(M, 2) the same of actions that have so many samples that one more says little."""
    tried: Bool
    """(R, N_PAIRS) whether an action of the pair was measured."""


def contest(means: Means, allowed: Bool, enough: int) -> Contest:
    """What was measured since the last shift, by how good it is; what is not ``allowed`` (R, N_ACTIONS) is
    behind whatever is best, and what has ``enough`` samples is known.
    """
    index, action, samples, mean = means.index, means.action, means.samples, means.mean
    may = allowed[index, action]
    best = _least_by_row(index, np.where(may, mean, np.inf), len(means))
    best[~np.append(may, False)[best]] = -1
    doubt = np.sqrt(1 / samples + 1 / samples[best[index]])
    contends = may & (mean - mean[best[index]] <= 2 * means.noise[index] * doubt)
    tried = np.zeros((len(means), N_PAIRS), np.bool_)
    tried[index, action_parts(action)[0]] = True
    return Contest(
        best=np.append(action, OWN_ACTION)[best],
        behind=np.stack([index[~contends], action[~contends]], -1),
        known=np.stack([index, action], -1)[samples >= enough],
        tried=tried,
    )


def compared(means: Means, allowed: Bool, modelled: Float64, takes: float) -> tuple[Int64, Int64]:
    """(R,) the best flat action by all that was measured of each key since the last shift, and what its next decision
    of so many samples is to measure, see ``compare``, also of what is ``modelled``; NCCL's own choice where nothing
    was. What is not ``allowed`` (R, N_ACTIONS) is neither."""
    actions, samples, mean = _fastest(means, allowed)
    best, following = compare(actions, samples, mean, means.noise.astype(np.float64), modelled, takes)
    every = np.arange(len(means))
    return actions[every, best], actions[every, following]


def promising(means: Means, allowed: Bool, said: Float32, modelled: Float64, takes: float) -> Int64:
    """(R,) the flat action that is worth most of what is ``allowed`` (R, N_ACTIONS) and was not measured since the last
    shift, if it is worth so many samples, see ``unmeasured``; -1 for none.

    It is of one of the pairs that were the fastest, and nearly as good as the best by the log times over the baseline
    that are ``said`` of it (R, N_ACTIONS), or by what a model says of the pair's actions (``modelled``, see
    ``comparing``): how much a chunk or many channels may cost, measuring others does not tell. Or whatever is expected
    of it, it is one step of channels or of chunk from one of the fastest actions, or has what made one fast
    (``_crossed``), or where no model speaks what that would speak of (``_unheard``).
    """
    actions, samples, mean = _fastest(means, allowed)
    noise = means.noise.astype(np.float64)
    best = mean[:, :1] - means.baseline[:, None]
    new = allowed.copy()
    new[means.index, means.action] = False
    speaks, known = modelled.any(-1), samples > 0
    first = _first_pairs(actions)
    beside = _beside(actions[:, :_BESIDE], known[:, :_BESIDE]) | _crossed(actions, known, first)
    for row in np.flatnonzero(~speaks & known[:, 0]).tolist():
        beside[row] |= _unheard(actions[row, known[row]], allowed[row])
    beside &= new
    new &= np.repeat(first, N_CHANNELS * N_CHUNKS, -1)
    time = said - best
    may = new & (time <= _REACH)
    if speaks.any():
        of = np.flatnonzero(speaks)
        # As many pairs of each key: one that has fewer has others beside, of which nothing is new.
        pairs = np.argsort(~first[of], -1, kind="stable")[:, :_PAIRS]
        theirs = (pairs[..., None] * N_CHANNELS * N_CHUNKS + np.arange(N_CHANNELS * N_CHUNKS)).reshape(len(of), -1)
        cells = of[:, None], theirs
        time[cells] = expected(actions[of], samples[of], mean[of], noise[of], modelled[of], theirs)
        may[cells] |= new[cells] & (time[cells] <= _REACH)
    may |= beside
    time = np.where(beside, -np.inf, np.where(may, time, np.inf))
    others = np.argpartition(time, _LOOK, -1)[:, :_LOOK]
    may = np.take_along_axis(may, others, -1)
    at = unmeasured(actions, samples, mean, noise, modelled, others, may, takes)
    return np.where(at >= 0, others[np.arange(len(means)), at], -1)


def rechunked(means: Means, allowed: Bool, chunk: int, behind: float) -> Int64:
    """(R,) with this ``chunk``, the fastest action of a pair that was measured with NCCL's own only since the last
    shift; or if ``chunk`` is that, with others only. -1 for none, and where it is ``behind`` the best by more than
    this, as a log. What is not ``allowed`` (R, N_ACTIONS) does not count."""
    index, action, _, mean = _allowed(means, allowed)
    least = np.full(len(means), np.inf)
    np.minimum.at(least, index, mean)
    pair, channels, its = action_parts(action)
    known = np.zeros((len(means), N_PAIRS), np.bool_)
    there = (its > 0) == (chunk > 0)
    known[index[there], pair[there]] = True
    to = flat_action(pair, channels, np.full_like(its, chunk))
    may = ~known[index, pair] & allowed[index, to] & (mean <= least[index] + behind)
    at = _least_by_row(index[may], mean[may], len(means))
    return np.append(to[may], -1)[at]


def overlooked(means: Means, allowed: Bool, expected: Float32, tried: Bool) -> Int64:
    """(R,) of what is ``allowed`` (R, N_ACTIONS), of pairs that were not ``tried`` (R, N_PAIRS) since the last shift:
    the flat action that is ``expected`` (R, N_ACTIONS) to be fastest, if that is nearly as good as the best; else -1.
    """
    new = np.broadcast_to(~tried[..., None], (*tried.shape, N_CHANNELS * N_CHUNKS)).reshape(len(means), N_ACTIONS)
    time = np.where(allowed & new, expected, np.inf)
    action = time.argmin(-1)
    _, _, mean = _fastest(means, allowed)
    near = time[np.arange(len(means)), action] <= mean[:, 0] - means.baseline + _REACH
    return np.where(near, action, -1)


def _allowed(means: Means, allowed: Bool) -> tuple[Int64, Int64, Float64, Float64]:
    """Which key, flat action, samples and mean of what was measured and is ``allowed`` (R, N_ACTIONS)."""
    may = allowed[means.index, means.action]
    return means.index[may], means.action[may], means.samples[may], means.mean[may]


def _fastest(means: Means, allowed: Bool) -> tuple[Int64, Float64, Float64]:
    """(R, _MOST) flat actions of what was measured since the last shift and is ``allowed`` (R, N_ACTIONS), the fastest
    first, their samples, 0 for none, and mean log times."""
    index, action, count, mean = _allowed(means, allowed)
    order = np.lexsort((mean, index))
    index, action, count, mean = index[order], action[order], count[order], mean[order]
    place = np.arange(len(index)) - np.searchsorted(index, index)
    near = place < _MOST
    at = index[near], place[near]
    actions = np.full((len(means), _MOST), OWN_ACTION)
    samples, times = np.zeros((2, len(means), _MOST))
    actions[at], times[at], samples[at] = action[near], mean[near], count[near]
    return actions, samples, times


def _least_by_row(row: Int64, value: Float64, n: int) -> Int64:
    """Of N values in the order of their rows: (n,) index of each row's first least one, -1 for a row without any."""
    order = np.lexsort((value, row))
    there, first = np.unique(row, return_index=True)
    index = np.full(n, -1)
    index[there] = order[first]
    return index


def _first_pairs(actions: Int64) -> Bool:
    """(R, N_PAIRS) the first ``_PAIRS`` different pairs of flat actions (R, M)."""
    out = np.zeros((len(actions), N_PAIRS), np.bool_)
    for row, pairs in zip(out, action_parts(actions)[0].tolist(), strict=True):
        row[list(dict.fromkeys(pairs))[:_PAIRS]] = True
    return out


def _beside(actions: Int64, there: Bool) -> Bool:
    """(R, N_ACTIONS) what is one step of channels or of chunk from flat actions (R, M) that are ``there`` (R, M). From
    NCCL's own, 0, there are none."""
    out = np.zeros((len(actions), N_ACTIONS), np.bool_)
    row = np.broadcast_to(np.arange(len(actions))[:, None], actions.shape)
    pair, *parts = action_parts(actions)
    for part, values in enumerate((N_CHANNELS, N_CHUNKS)):
        for step in (-1, 1):
            to = parts[part] + step
            may = there & (parts[part] > 0) & (to > 0) & (to < values)
            stepped = [*parts[:part], to, *parts[part + 1 :]]
            out[row[may], flat_action(pair, *stepped)[may]] = True
    return out


def _crossed(actions: Int64, known: Bool, pairs: Bool) -> Bool:
    """(R, N_ACTIONS) some ``pairs`` (R, N_PAIRS), with the chunk of the fastest of flat actions (R, M) that are
    ``known`` (R, M), and with the channels of the fastest that has others than NCCL's own: what makes one pair fast may
    make others fast, and from NCCL's own channels there is no step."""
    out = np.zeros((len(actions), N_ACTIONS), np.bool_)
    _, channels, chunk = action_parts(actions)
    others = known & (channels > 0)
    row, pair = np.nonzero(pairs & any_along(others, -1)[:, None])
    out[row, flat_action(pair, channels[row, others[row].argmax(-1)], chunk[row, 0])] = True
    return out


def _unheard(actions: Int64, allowed: Bool) -> Bool:
    """(N_ACTIONS,) beside flat actions (M,), the fastest first, what a model would speak of: if the fastest has NCCL's
    own channels, its pair with some in the middle of what is ``allowed`` (N_ACTIONS,), and then what is one step from
    what was measured."""
    out = np.zeros(N_ACTIONS, np.bool_)
    pair, channels, chunk = action_parts(actions[:1])
    if channels[0] > 0:
        return out
    may = flat_action(pair, np.arange(1, N_CHANNELS), chunk)
    may = may[allowed[may]]
    measured = np.flatnonzero(np.isin(may, actions))
    if len(measured):
        at = np.concatenate([measured - 1, measured + 1])
        out[may[at[(at >= 0) & (at < len(may))]]] = True
    elif len(may):
        out[may[np.abs(action_parts(may)[1] - _MIDDLE).argmin()]] = True
    return out
