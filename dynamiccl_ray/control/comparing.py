"""What to measure once a key has drawn: which action is the best by all that was measured of the key, and which other
is worth measuring more.

Most draws measure an action once, and under noise the least of many single times is luck. But actions have their pair,
channels or chunk in common. So the log times of a key's actions are taken for a Gaussian process (Rasmussen and
Williams 2006, with an unknown mean as in kriging, Matheron 1963): what one action took also says something of those
that are like it. By how much actions differ at all is found out for each key, as in a Student t process (Shah, Wilson
and Ghahramani, AISTATS 2014).

What measuring another action is worth is its knowledge gradient (Frazier, Powell and Dayanik, INFORMS Journal on
Computing 2009): by how much the choice is expected to get better, for as long as it will be used. What it costs is what
it is expected to be slower by.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from scipy.special import ndtr

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, action_parts
from dynamiccl_ray.arrays import Bool, Float64, Int64

# Standard deviations of log times on the jobs that a policy is trained on (benchmarks/lending.py): between pairs, ...
_PAIRS: Final = 0.2
# ... of the channel counts of a pair, and over how many of them, one next to the other, what they have in common falls
# by 1/e; the same of chunks; and of an action around what both say of it.
_CHANNELS: Final = (0.12, 1.5)
_CHUNKS: Final = (0.14, 4.0)
_REST: Final = 0.04
_VARIANCE: Final = _PAIRS**2 + _CHANNELS[0] ** 2 + _CHUNKS[0] ** 2 + _REST**2
# Of what a model says of the differences between actions, the share that holds: mean and standard deviation.
_SLOPE: Final = (0.5, 0.5)
# Of one key actions may differ by far more, or by less, and what a model says may hold as much less. Degrees of freedom
# that all these deviations count for, and by what factors their squares may be off.
_FREEDOM: Final = 8.0
_SCALES: Final = (0.25, 9.0)
# Collectives for which a choice is used.
_USED: Final = 500.0


def compare(
    actions: Int64, samples: Float64, mean: Float64, noise: Float64, modelled: Float64, takes: float
) -> tuple[Int64, Int64]:
    """Of R keys: the place (R,) of the action that is the best, and of the one to measure next, which is the best where
    no other is worth it.

    ``actions`` (R, M) are flat and different, ``samples`` (R, M) how often each was measured, 0 for what fills a row
    up, and ``mean`` (R, M) their mean log times; ``noise`` (R,) is the standard deviation of one. ``modelled``
    (R, N_ACTIONS) are the log times that a model of the cluster expects, 0 where there is none. The next decision takes
    so many samples.
    """
    believed = _Believed(actions, samples, mean, noise, modelled)
    worth = believed.worth(actions, believed.known, takes)
    rows = np.arange(len(actions))
    worth[rows, believed.best] = 0.0
    return believed.best, np.asarray(worth.argmax(-1))


def expected(
    actions: Int64, samples: Float64, mean: Float64, noise: Float64, modelled: Float64, others: Int64
) -> Float64:
    """(R, N) log times over that of the best that are expected of ``others`` (R, N), flat actions; else as in
    ``compare``."""
    believed = _Believed(actions, samples, mean, noise, modelled)
    best = np.take_along_axis(actions, believed.best[:, None], -1)
    return np.asarray(believed.time(others)[0] - believed.time(best)[0])


def unmeasured(
    actions: Int64,
    samples: Float64,
    mean: Float64,
    noise: Float64,
    modelled: Float64,
    others: Int64,
    may: Bool,
    takes: float,
) -> Int64:
    """(R,) the place among ``others`` (R, N), flat actions that were not measured, of the one that is worth most; -1
    where none is worth it. Only what ``may`` (R, N) be measured counts; all else is as in ``compare``."""
    worth = _Believed(actions, samples, mean, noise, modelled).worth(others, may, takes)
    most = worth.argmax(-1)
    return np.where(worth[np.arange(len(most)), most] > 0, most, -1)


class _Believed:
    """What R keys' log times are taken for by what was measured of M actions of each."""

    def __init__(self, actions: Int64, samples: Float64, mean: Float64, noise: Float64, modelled: Float64) -> None:
        self._actions, self._noise, self._modelled, self.known = actions, noise, modelled, samples > 0
        of_one = np.where(self.known, noise[:, None] ** 2 / np.maximum(samples, 1), 1.0)
        both = self.known[:, :, None] & self.known[:, None]
        prior = self._prior(actions, actions) * both
        mean, every = mean - self._model(actions), np.eye(actions.shape[1])
        self._know(prior + of_one[:, None] * every, mean)
        apart = (self._off * self.known * (mean - self._level[:, None])).sum(-1)
        self._scale = np.clip((_FREEDOM + apart) / (_FREEDOM + np.maximum(self.known.sum(-1) - 1, 0)), *_SCALES)
        self._know(self._scale[:, None, None] * prior + of_one[:, None] * every, mean)
        self.best = np.asarray(np.where(self.known, self.time(actions)[0], np.inf).argmin(-1))

    def _know(self, covariance: Float64, mean: Float64) -> None:
        """What mean log times (R, M), less what is believed before, say with this covariance (R, M, M)."""
        self._inverse = np.linalg.inv(covariance)
        weight = np.einsum("rmn,rn->rm", self._inverse, 1.0 * self.known)
        # Of the level that all of them have in common nothing is known: generalised least squares.
        self._level = (weight * mean * self.known).sum(-1) / np.maximum((weight * self.known).sum(-1), 1e-12)
        self._off = np.einsum("rmn,rn->rm", self._inverse, self.known * (mean - self._level[:, None]))

    def _model(self, actions: Int64) -> Float64:
        """(R, N) of what a model expects, the part that is believed before anything is measured."""
        return _SLOPE[0] * np.take_along_axis(self._modelled, actions, -1)

    def _prior(self, actions: Int64, others: Int64) -> Float64:
        """(R, N, M) covariances, with what is not known of the model."""
        of, to = (np.take_along_axis(self._modelled, x, -1) for x in (actions, others))
        return _prior(actions, others) + _SLOPE[1] ** 2 * of[:, :, None] * to[:, None]

    def time(self, others: Int64) -> tuple[Float64, Float64]:
        """Mean log times (R, N) of other actions, and what these have in common with what was measured (R, N, M)."""
        common = self._scale[:, None, None] * self._prior(others, self._actions) * self.known[:, None]
        off = np.einsum("rnm,rm->rn", common, self._off)
        return self._level[:, None] + self._model(others) + off, common

    def worth(self, others: Int64, may: Bool, takes: float) -> Float64:
        """(R, N) what it is worth to measure actions once more, as a sum of log times: minus infinity for what ``may``
        not be."""
        rows = np.arange(len(others))
        time, common = self.time(others)
        of_best = self._actions[rows, self.best][:, None]
        time_of_best, common_of_best = self.time(of_best)
        weights = common @ self._inverse
        variance = _VARIANCE + (_SLOPE[1] * np.take_along_axis(self._modelled, others, -1)) ** 2
        own = self._scale[:, None] * variance - np.einsum("rnm,rnm->rn", weights, common)
        with_best = self._scale[:, None] * self._prior(others, of_best)[..., 0]
        with_best -= np.einsum("rnm,rm->rn", weights, common_of_best[:, 0])
        # By how much the difference to the best is expected to move.
        moves = np.abs(own - with_best) / np.sqrt(np.maximum(own, 0) + self._noise[:, None] ** 2 / takes)
        behind = time - time_of_best
        return np.where(may, _USED * _expected_gain(behind, np.maximum(moves, 1e-9)) - takes * behind, -np.inf)


def _expected_gain(behind: Float64, deviation: Float64) -> Float64:
    """Mean of what a normal number with this mean and deviation is below 0."""
    z = behind / deviation
    return np.asarray(deviation * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) - behind * ndtr(-z))


def _prior(actions: Int64, others: Int64) -> Float64:
    """(R, N, M) covariances of the log times of actions (R, N) with others (R, M) before anything is measured."""
    (pair, detail), (of_pair, of_detail) = np.divmod(actions, len(_OF_PAIR)), np.divmod(others, len(_OF_PAIR))
    covariance = _OF_PAIR[detail[:, :, None], of_detail[:, None]]
    covariance = np.where(pair[:, :, None] == of_pair[:, None], covariance, 0.0)
    return np.asarray(covariance + _REST**2 * (actions[:, :, None] == others[:, None]))


def _alike(value: Int64, deviation: float, reach: float) -> Float64:
    """(N, N) covariances of what values (N,) are worth; NCCL's own, 0, is like no other."""
    apart = np.abs(value[:, None] - value)
    own = (value == 0)[:, None] != (value == 0)
    return np.asarray(np.where(own, 0.0, deviation**2 * np.exp(-apart / reach)))


# Of what has a pair in common, by its number among the actions of a pair.
_, _channels, _chunk = action_parts(np.arange(N_CHANNELS * N_CHUNKS))
_OF_PAIR: Final = _PAIRS**2 + _alike(_channels, *_CHANNELS) + _alike(_chunk, *_CHUNKS)
