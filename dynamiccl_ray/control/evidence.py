"""What has been measured of every key: the one store that decisions are made from.

Row i of every array is key i; times are logs of microseconds. Own measurements are kept by flat action, since the last
shift of the network. By (pair, channels) and by (pair, chunk) what was measured before the last shift is kept too, as
a hint that one collective outweighs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from dynamiccl_ray.actions import N_ACTIONS, N_CHANNELS, N_CHUNKS, OWN_ACTION, action_parts
from dynamiccl_ray.agent.lending import Lending, combine, deviation, noise_of, stale, worse_than_own
from dynamiccl_ray.agent.prior import EARLIER_ERROR, ERROR, error_of
from dynamiccl_ray.arrays import Bool, Float32, Float64, Int64, any_along, where_true
from dynamiccl_ray.knobs import N_PAIRS, OWN_PAIR

# Name -> shape of a row, type, and what a new row is filled with.
_ROWS: Final[dict[str, tuple[tuple[int, ...], type, float]]] = {
    "baseline": ((), np.float64, np.nan),
    "last": ((), np.float64, np.nan),
    "fastest": ((), np.float64, np.inf),
    "skew": ((), np.float64, 0),
    "samples": ((N_ACTIONS,), np.float64, 0),
    "total": ((N_ACTIONS,), np.float64, 0),
    "tried": ((N_ACTIONS,), np.bool_, 0),
    "by_channels": ((N_PAIRS, N_CHANNELS), np.float64, 0),
    "by_channels_total": ((N_PAIRS, N_CHANNELS), np.float64, 0),
    "by_chunk": ((N_PAIRS, N_CHUNKS), np.float64, 0),
    "by_chunk_total": ((N_PAIRS, N_CHUNKS), np.float64, 0),
    "square": ((), np.float64, 0),
    "freedom": ((), np.float64, 0),
}
# Standard deviation of a log time ratio that is known well, and how many of them what is behind lies above such a one.
# With two, jobs that were described as another cluster lost a fifth more than with none (benchmarks/described.py).
_KNOWN_WELL: Final = 0.1
_BEHIND: Final = 3.0
# By how much, as a log, a chunk is expected to be faster than NCCL's own where a pair is tried with it.
_AHEAD: Final = 0.05
# What is said of an action's channels and chunk counts as said where neither is off by more than this.
_SAID: Final = 0.2
# Degrees of freedom that the noise of an earlier run counts for, and the most that it is taken for.
_EARLIER_FREEDOM: Final = 8.0
_MOST_NOISE: Final = 0.5
_MARGINS: Final = (("by_channels", "by_channels_total"), ("by_chunk", "by_chunk_total"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Prior:
    """What R keys are expected to take before anything is measured."""

    time: Float32
    """(R, N_PAIRS, N_CHANNELS + N_CHUNKS) log times over the baseline, NaN for nothing."""
    error: Float32
    """(R,) how far that is off on the key's communicator, as a standard deviation; infinite where nothing is said."""

    def off(self, least: float) -> Bool:
        """(R,) whether what is said is off by more than this."""
        return np.asarray(np.isfinite(self.error) & (self.error > least))


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimates:
    """Of R keys: log times over the baseline by all that is known, and how sure that is; see ``lending.combine``."""

    channels: tuple[Float32, Float32]
    """(R, N_PAIRS, N_CHANNELS) both."""
    chunks: tuple[Float32, Float32]
    """(R, N_PAIRS, N_CHUNKS) both."""
    model: Prior
    earlier: Prior
    """What the model of the cluster says, and what earlier runs do."""

    @property
    def error(self) -> Float32:
        """(R,) of whichever of the two is off by less."""
        return np.minimum(self.model.error, self.earlier.error)

    def of_actions(self, at: Int64) -> Float32:
        """(A, N_ACTIONS) for A of the R keys: what the channels of an action say, and what its chunk adds to NCCL's
        own; infinite where next to nothing is known of either."""
        (time, sure), (by_chunk, of_chunk) = ((x[at] for x in pair) for pair in (self.channels, self.chunks))
        known, chunks = deviation(sure) <= _SAID, deviation(of_chunk) <= _SAID
        expected = time[..., None] + (by_chunk - by_chunk[..., :1])[:, :, None]
        said = known[..., None] & (chunks & chunks[..., :1])[:, :, None]
        return np.asarray(np.where(said, expected, np.inf).reshape(len(at), N_ACTIONS), np.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Means:
    """What was measured of R keys since the last shift: N actions of them."""

    index: Int64
    """(N,) which of the R keys, ascending."""
    action: Int64
    """(N,) flat, ascending for each key."""
    samples: Float64
    mean: Float64
    """(N,) log time."""
    baseline: Float64
    """(R,) and the noise of one time, see ``Evidence``."""
    noise: Float32

    def __len__(self) -> int:
        return len(self.baseline)

    def part(self, chosen: Int64) -> Means:
        """Of the keys at these places, ascending."""
        back = np.full(len(self), -1)
        back[chosen] = np.arange(len(chosen))
        index = back[self.index]
        of = index >= 0
        return Means(
            index=index[of],
            action=self.action[of],
            samples=self.samples[of],
            mean=self.mean[of],
            baseline=self.baseline[chosen],
            noise=self.noise[chosen],
        )

    def worse_than_own(self, *, margin: float, least: int) -> tuple[Int64, Int64]:
        """Which of the R keys and flat action: what the guardrail forbids, because it is slower than NCCL's own choice;
        see ``lending.worse_than_own``."""
        ratio, noise = self.mean - self.baseline[self.index], self.noise[self.index]
        worse = worse_than_own(ratio, self.samples, noise, margin=margin, least=least) & (self.action != OWN_ACTION)
        return self.index[worse], self.action[worse]


class Evidence:
    """Measurements of a growing set of keys, and what they say."""

    baseline: Float64
    """(K,) of NCCL's own choice since the last shift, or before it until that is measured; NaN before the first."""
    last: Float64
    """(K,) of the last decision; NaN before the first."""
    fastest: Float64
    """(K,) of any decision since the last shift; infinity before the first."""
    skew: Float64
    """(K,) of the last decision: log of the slowest rank's time over the fastest's."""
    samples: Float64
    """(K, N_ACTIONS) since the last shift."""
    total: Float64
    """(K, N_ACTIONS) sum of as many log times."""
    tried: Bool
    """(K, N_ACTIONS) ever."""
    by_channels: Float64
    """(K, N_PAIRS, N_CHANNELS) samples, hints included; ``by_chunk`` likewise."""
    by_channels_total: Float64
    by_chunk: Float64
    by_chunk_total: Float64
    square: Float64
    """(K,) squared deviations within decisions, and their degrees of freedom: noise without what actions differ by."""
    freedom: Float64

    def __init__(self) -> None:
        for name, (shape, kind, _) in _ROWS.items():
            setattr(self, name, np.zeros((0, *shape), kind))
        self._group, self._collective, self._nbytes = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        self._prior = np.zeros((0, N_PAIRS, N_CHANNELS + N_CHUNKS), np.float32)
        self._earlier = self._prior
        self._lending = Lending([], [], [])

    def __len__(self) -> int:
        return len(self.baseline)

    def grow(
        self,
        group: ArrayLike,
        collective: ArrayLike,
        nbytes: ArrayLike,
        prior: Float32,
        earlier: Float32,
        noise: Float32,
    ) -> None:
        """New keys: each the number of its communicator, its collective, its bytes, what a model and earlier runs
        expect of it, and how it varied in these, see ``Keys.prior``, ``Keys.earlier`` and ``Keys.noise``."""
        groups = np.asarray(group, np.int64)
        for name, (shape, kind, fill) in _ROWS.items():
            new: Any = np.full((len(groups), *shape), fill, kind)
            setattr(self, name, np.concatenate([getattr(self, name), new]))
        known = np.flatnonzero(np.isfinite(noise))
        self.freedom[len(self) - len(noise) + known] = _EARLIER_FREEDOM
        self.square[len(self) - len(noise) + known] = _EARLIER_FREEDOM * np.minimum(noise[known], _MOST_NOISE) ** 2
        self._group = np.concatenate([self._group, groups])
        self._collective = np.concatenate([self._collective, np.asarray(collective, np.int64)])
        self._nbytes = np.concatenate([self._nbytes, np.asarray(nbytes, np.float64)])
        self._prior = np.concatenate([self._prior, prior])
        self._earlier = np.concatenate([self._earlier, earlier])
        self._lending = Lending(self._group, self._collective, self._nbytes)

    def expect(self, rows: Int64, prior: Float32) -> None:
        """What a model expects of some keys (R,), see ``Keys.prior``."""
        self._prior[rows] = prior

    def keep(self, rows: Bool) -> None:
        """Forgets all other keys (a mask (K,)), and moves these together."""
        for name in (*_ROWS, "_group", "_collective", "_nbytes", "_prior", "_earlier"):
            setattr(self, name, getattr(self, name)[rows])
        self._lending = Lending(self._group, self._collective, self._nbytes)

    # -- measurements; ``rows`` are different --

    def record(self, rows: Int64, actions: Int64, samples: Float64, mean: Float64, square: Float64) -> None:
        """A decision of each of these keys: so many samples of flat actions, their mean log time and the sum of their
        squared deviations from it. All (R,).
        """
        pair, channels, chunk = action_parts(actions)
        for cell, count, total in (
            ((rows, actions), self.samples, self.total),
            ((rows, pair, channels), self.by_channels, self.by_channels_total),
            ((rows, pair, chunk), self.by_chunk, self.by_chunk_total),
        ):
            count[cell] += samples
            total[cell] += samples * mean
        self.tried[rows, actions] = True
        self.last[rows] = mean
        self.fastest[rows] = np.minimum(self.fastest[rows], mean)
        self.square[rows] += square
        self.freedom[rows] += samples - 1
        own = rows[actions == OWN_ACTION]
        self.baseline[own] = self.total[own, OWN_ACTION] / self.samples[own, OWN_ACTION]

    def begin(self, rows: Int64, actions: Int64, samples: Float64, mean: Float64, square: Float64) -> None:
        """As ``record``, where all ``actions`` are NCCL's own choice, for the first time or anew: what is left from
        before a shift is kept relative to it.
        """
        before = self.baseline[rows]
        moved = np.where(np.isfinite(before), mean - before, 0.0)[:, None, None]
        for samples_name, total_name in _MARGINS:
            getattr(self, total_name)[rows] += getattr(self, samples_name)[rows] * moved
        self.record(rows, actions, samples, mean, square)

    def move(self, rows: Int64, by: Float64) -> None:
        """All actions of these keys take longer alike, by so much (R,) as a log: their differences are kept."""
        self.total[rows] += self.samples[rows] * by[:, None]
        for samples_name, total_name in _MARGINS:
            getattr(self, total_name)[rows] += getattr(self, samples_name)[rows] * by[:, None, None]
        for of in (self.baseline, self.last, self.fastest):
            of[rows] += by

    def correct(self, rows: Int64, actions: Int64, by: Float64) -> None:
        """Flat actions (R,) take longer by so much (R,), as a log, and no others do. The baseline is what NCCL's own
        choice takes once that is recorded the next time."""
        pair, channels, chunk = action_parts(actions)
        more = self.samples[rows, actions] * by
        self.total[rows, actions] += more
        self.by_channels_total[rows, pair, channels] += more
        self.by_chunk_total[rows, pair, chunk] += more

    def fade(self, rows: Int64, most: Float64) -> None:
        """What was measured of these keys (R,) counts for so many samples of an action at most (R,)."""
        samples = self.samples[rows]
        kept = np.minimum(samples, most[:, None])
        self.total[rows] *= kept / np.maximum(samples, 1e-9)
        self.samples[rows] = kept

    def shift(self, rows: Int64) -> None:
        """The network of these keys has changed: what was measured is a hint from now on."""
        noise = self.noise[rows]
        for samples_name, total_name in _MARGINS:
            samples, total = getattr(self, samples_name), getattr(self, total_name)
            kept = stale(samples[rows], noise)
            total[rows] *= kept / np.maximum(samples[rows], 1e-9)
            samples[rows] = kept
            total[rows, OWN_PAIR, 0] = samples[rows, OWN_PAIR, 0] = 0
        self.samples[rows] = self.total[rows] = 0
        self.fastest[rows] = np.inf

    # -- what it says --

    @property
    def noise(self) -> Float32:
        """(K,) standard deviation of the log of one time."""
        return noise_of(self.square, self.freedom)

    def mean(self, rows: Int64, actions: Int64) -> Float64:
        """(R,) mean log time of flat actions since the last shift; NaN where there is none."""
        samples = self.samples[rows, actions]
        return np.where(samples > 0, self.total[rows, actions] / np.maximum(samples, 1), np.nan)

    def means(self, rows: Int64) -> Means:
        """Of different keys (R,), whatever was measured since the last shift."""
        index, action = where_true(self.tried[rows])
        samples = self.samples[rows[index], action]
        since = samples > 0
        index, action, samples = index[since], action[since], samples[since]
        return Means(
            index=index,
            action=action,
            samples=samples,
            mean=self.total[rows[index], action] / samples,
            baseline=self.baseline[rows],
            noise=self.noise[rows],
        )

    def ratio(self, rows: Int64) -> Float32:
        """(R, N_PAIRS, N_CHANNELS) mean log time over the baseline, hints included; 0 where there is none."""
        samples = self.by_channels[rows]
        mean = self.by_channels_total[rows] / np.maximum(samples, 1e-9)
        return np.where(samples > 0, mean - self.baseline[rows][:, None, None], 0.0).astype(np.float32)

    def estimates(self, rows: Int64) -> Estimates:
        """By own and lent evidence and what priors expect."""
        ratio, count = np.empty((2, len(self), N_PAIRS, N_CHANNELS + N_CHUNKS), np.float32)
        baseline = np.nan_to_num(self.baseline)[:, None, None]
        for place, (samples_name, total_name) in zip((np.s_[:N_CHANNELS], np.s_[N_CHANNELS:]), _MARGINS, strict=True):
            samples = getattr(self, samples_name)
            ratio[..., place], count[..., place] = getattr(self, total_name) - samples * baseline, samples
        model, earlier = self._priors(rows)
        said = [(prior.time, prior.error) for prior in (model, earlier) if np.isfinite(prior.error).any()]
        time, sure = combine(ratio, count, self.noise, self._lending, rows, said)
        return Estimates(
            channels=(time[..., :N_CHANNELS], sure[..., :N_CHANNELS]),
            chunks=(time[..., N_CHANNELS:], sure[..., N_CHANNELS:]),
            model=model,
            earlier=earlier,
        )

    def _priors(self, rows: Int64) -> tuple[Prior, Prior]:
        """Of the model of the cluster, and of earlier runs; see ``prior.py``."""
        among = np.zeros(self._group.max(initial=-1) + 1, np.bool_)
        among[self._group[rows]] = True
        alike = np.flatnonzero(among[self._group])
        at = np.searchsorted(alike, rows)
        ratio, samples = self.ratio(alike), self.by_channels[alike].astype(np.float32)
        noise, group, own = self.noise[alike], self._group[alike], samples[:, OWN_PAIR, 0]
        priors = []
        for prior, start, often in ((self._prior, ERROR, None), (self._earlier, EARLIER_ERROR, own)):
            error = np.full(len(alike), np.inf, np.float32)
            said = np.isfinite(prior[alike]).any((1, 2))
            if said.any():
                of = error_of(prior[alike, :, :N_CHANNELS], ratio, samples, noise, group, start, often)
                error = np.where(np.isin(group, group[said]), of, error)
            priors.append(Prior(time=prior[rows], error=error[at]))
        return priors[0], priors[1]

    def modelled(self, rows: Int64) -> Float64:
        """(R, N_ACTIONS) log times over NCCL's own choice that a model of the cluster expects of actions: what it says
        of their channels, and what it says that their chunk adds to NCCL's own; 0 for nothing."""
        channels, chunks = np.split(self._prior[rows], [N_CHANNELS], -1)
        time = channels[..., None] + (chunks - chunks[..., :1])[:, :, None]
        return np.nan_to_num(time.reshape(len(rows), N_ACTIONS).astype(np.float64))

    def expects(self, rows: Int64) -> Bool:
        """(R, N_PAIRS, N_CHANNELS) whether a model of the cluster or an earlier run says anything."""
        said = np.isfinite(self._prior[rows]) | np.isfinite(self._earlier[rows])
        return np.asarray(said[..., :N_CHANNELS])

    def excess(self, rows: Int64) -> Float32:
        """(R,) how far each baseline stands out from its neighbours'; see ``Lending.excess``."""
        return self._lending.excess(self.baseline.astype(np.float32))[rows]

    def tried_near(self, rows: Int64, *, since: bool = False) -> Bool:
        """(R, N_PAIRS) whether the key or one that is near it has ever tried a pair, or an earlier run has; or whether
        it has ``since`` its last shift. See ``Lending.tried``."""
        if since:
            return self._lending.tried(any_along(self.by_channels >= 1, -1), rows)
        every = np.arange(len(self))
        return self._lending.tried(any_along(self.by_channels > 0, -1) | self.ran_earlier(every), rows)

    def rechunked_near(self, rows: Int64, actions: Int64) -> Bool:
        """(R,) whether the key or one that is near it has measured the pair of flat actions (R,) with another chunk
        than NCCL's own since its last shift.
        """
        measured = any_along(self.by_chunk[..., 1:] >= 1, -1)
        return self._lending.tried(measured, rows)[np.arange(len(rows)), action_parts(actions)[0]]

    def ran_earlier(self, rows: Int64) -> Bool:
        """(R, N_PAIRS) whether an earlier run says anything of a pair."""
        return any_along(np.isfinite(self._earlier[rows, :, :N_CHANNELS]), -1)

    def faster_than(self, rows: Int64, cost: Float32) -> Float32:
        """(R,) by how much, as a log, the pair that surprised most was faster than by ``cost`` (R, N_PAIRS), what NCCL
        predicts of each over its own choice; 0 for none, and where it predicts nothing."""
        tried = (self.by_channels[rows] >= 1) & (cost != 0).any(-1)[:, None, None]
        tried[:, OWN_PAIR] = False
        return np.asarray(np.where(tried, cost[..., None] - self.ratio(rows), 0.0).max((-2, -1)).clip(0))

    def near(self, rows: Int64) -> tuple[Int64, Int64, Float64]:
        """(N,) all: places in ``rows`` (R,), a key that is near the one there, and how many octaves lie between them;
        see ``Lending.near``."""
        return self._lending.near(rows)

    def turn(self, rows: Int64, ordinal: Int64) -> Bool:
        """(R,) whether it is the turn of these keys; see ``Lending.turn``."""
        return self._lending.turn(rows, ordinal)

    def may_be_best(self, rows: Int64, allowed: Bool, said: Estimates) -> Bool:
        """(R, N_PAIRS, N_CHANNELS) of what is ``allowed``, what is not behind what is known well with confidence, by
        all that is ``said`` (``estimates``) of both. Only a prior of a key, the model's or earlier runs', rules
        anything out: hints from before a shift do not. Where the best that is known well is ahead of NCCL's own choice
        by far more than the priors say, it is that choice that is off, and what they say relative to it: there, what
        they put before that best may be better still.
        """
        best = allowed.copy()
        of = np.isfinite(self._prior[rows]).any((1, 2)) | np.isfinite(self._earlier[rows]).any((1, 2))
        if of.any():
            time, sure = (x[of] for x in said.channels)
            known = np.where(allowed[of] & (deviation(sure) <= _KNOWN_WELL), time, np.inf)
            known[:, OWN_PAIR, 0] = 0.0
            least = known.reshape(len(known), -1).argmin(-1)[:, None]
            near = time - _BEHIND * deviation(sure) <= known.min((1, 2), keepdims=True)
            expected, error = (x[of] for x in _expected(said.model, said.earlier))
            of_least = np.take_along_axis(expected.reshape(len(known), -1), least, -1)[..., None]
            own_is_off = of_least - known.min((1, 2), keepdims=True) > _BEHIND * error
            best[of] &= near | (own_is_off & (expected < of_least))
        return np.asarray(best)

    def with_its_chunk(self, rows: Int64, allowed: Bool, said: Estimates) -> tuple[Int64, Bool]:
        """(R, N_PAIRS) the chunk with which a pair is to be tried, of what is ``allowed`` (R, N_PAIRS, N_CHUNKS); and
        whether nobody has measured that, and the pair is expected to be faster with it than all that is known well.

        NCCL's own is taken where no other is ahead of it by ``_AHEAD``. What channels say is with NCCL's own chunk:
        where that is far from the best, it says nothing of the pair.
        """
        (chunks, of_chunks), (time, sure) = said.chunks, said.channels
        expected = np.where(allowed & (of_chunks > 0), chunks, np.inf)
        fastest = expected.argmin(-1)
        least = np.take_along_axis(expected, fastest[..., None], -1)[..., 0]
        chunk = np.where(least < expected[..., 0] - _AHEAD, fastest, 0)
        known = np.where(deviation(sure) <= _KNOWN_WELL, time, np.inf)
        known[:, OWN_PAIR, 0] = 0.0
        measured = np.take_along_axis(self.by_chunk[rows], chunk[..., None], -1)[..., 0] >= 1
        return chunk, np.asarray((chunk > 0) & ~measured & (least < known.min((1, 2))[:, None]))

    # -- durability --

    def state(self) -> dict[str, Any]:
        """Plain arrays, for a checkpoint; of what has a value for each action, only what is not 0."""
        state: dict[str, Any] = {}
        for name, (shape, _, _) in _ROWS.items():
            values = getattr(self, name)
            if shape:
                at = np.flatnonzero(values)
                state[f"{name}.at"], values = at.astype(np.uint32), values.ravel()[at]
            state[name] = values
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """After ``grow`` by the same keys."""
        for name, (shape, _, _) in _ROWS.items():
            values = getattr(self, name)
            if shape:
                values.ravel()[state[f"{name}.at"]] = state[name]
            else:
                values[:] = state[name]


def _expected(*priors: Prior) -> tuple[Float32, Float32]:
    """(R, N_PAIRS, N_CHANNELS) log time ratios by the priors alone, NaN where none says anything, and their standard
    deviation."""
    total, precision = np.zeros((2, *priors[0].time[..., :N_CHANNELS].shape), np.float32)
    for prior in priors:
        of = prior.time[..., :N_CHANNELS]
        weight = np.isfinite(of) / (prior.error**2)[:, None, None]
        total += weight * np.nan_to_num(of)
        precision += weight
    precision[precision == 0] = np.nan
    return np.asarray(total / precision, np.float32), np.asarray(1 / np.sqrt(precision), np.float32)
