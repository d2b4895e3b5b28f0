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
from dynamiccl_ray.knobs import N_PAIRS, N_PROTOCOLS, OWN_PAIR

# Standard deviations of log times on the jobs that a policy is trained on (benchmarks/lending.py): between pairs, ...
_PAIRS: Final = 0.2
# ... of the channel counts of a pair, and over how many of them, one next to the other, what they have in common falls
# by 1/e; the same of chunks; and of an action around what both say of it.
_CHANNELS: Final = (0.12, 1.5)
_CHUNKS: Final = (0.14, 4.0)
_REST: Final = 0.04
# How much of what channels, or a chunk, are worth any two pairs have in common; and how much more if they are of one
# algorithm, or of one protocol.
_SHARED_CHANNELS: Final = (0.1, 0.55, 0.3)
_SHARED_CHUNKS: Final = (0.3, 0.45, 0.0)
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
        return np.where(may, knowledge_gradient(behind, np.maximum(moves, 1e-9), takes), -np.inf)


def knowledge_gradient(behind: Float64, moves: Float64, takes: float) -> Float64:
    """What it is worth, as a sum of log times, to measure so many samples of what is expected to be ``behind`` the best
    by so much, where the samples are expected to move that difference by a normal number of deviation ``moves``."""
    z = behind / moves
    # The mean of what a normal number is below 0.
    gain = moves * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) - behind * ndtr(-z)
    return np.asarray(_USED * gain - takes * behind)


def _prior(actions: Int64, others: Int64) -> Float64:
    """(R, N, M) covariances of the log times of actions (R, N) with others (R, M) before anything is measured."""
    (pair, channels, chunk), (of_pair, of_channels, of_chunk) = action_parts(actions), action_parts(others)
    row, of_row = pair * N_CHANNELS + channels, of_pair * N_CHANNELS + of_channels
    covariance = _OF_CHANNELS.take(row[:, :, None] * len(_OF_CHANNELS) + of_row[:, None])
    row, of_row = pair * N_CHUNKS + chunk, of_pair * N_CHUNKS + of_chunk
    covariance += _OF_CHUNKS.take(row[:, :, None] * len(_OF_CHUNKS) + of_row[:, None])
    covariance += _REST**2 * (actions[:, :, None] == others[:, None])
    return np.asarray(covariance)


def _alike(values: int, deviation: float, reach: float) -> Float64:
    """(N, N) covariances of what so many values are worth; NCCL's own, 0, is like no other."""
    value = np.arange(values)
    apart = np.abs(value[:, None] - value)
    own = (value == 0)[:, None] != (value == 0)
    return np.asarray(np.where(own, 0.0, deviation**2 * np.exp(-apart / reach)))


def _between(every: float, algorithm: float, protocol: float) -> Float64:
    """(N_PAIRS, N_PAIRS) by how much two pairs have in common what a value is worth: any two, more of one algorithm,
    and of one protocol. NCCL's own choice is no pair."""
    algorithms, protocols = np.divmod(np.arange(N_PAIRS) - 1, N_PROTOCOLS)
    alike = every + algorithm * np.equal.outer(algorithms, algorithms) + protocol * np.equal.outer(protocols, protocols)
    alike[OWN_PAIR] = alike[:, OWN_PAIR] = 0.0
    np.fill_diagonal(alike, 1.0)
    return np.asarray(alike)


# By (pair, channels), with what a pair is worth; and by (pair, chunk).
_OF_CHANNELS: Final = np.kron(_between(*_SHARED_CHANNELS), _alike(N_CHANNELS, *_CHANNELS)) + np.kron(
    _PAIRS**2 * np.eye(N_PAIRS), np.ones((N_CHANNELS, N_CHANNELS))
)
_OF_CHUNKS: Final = np.kron(_between(*_SHARED_CHUNKS), _alike(N_CHUNKS, *_CHUNKS))
