"""What keys that learn may draw, what the policy is shown of them, and where a draw goes that says nothing new."""

from __future__ import annotations

from typing import Final

import numpy as np

from dynamiccl_ray.actions import N_ACTIONS, N_CHANNELS, N_CHUNKS, action_parts, flat_action
from dynamiccl_ray.agent.lending import deviation
from dynamiccl_ray.agent.observation import KeyView, encode
from dynamiccl_ray.arrays import Bool, Float32, Float64, Int64, any_along
from dynamiccl_ray.control.comparing import knowledge_gradient
from dynamiccl_ray.control.contest import overlooked, promising, rechunked
from dynamiccl_ray.control.due import untried
from dynamiccl_ray.control.evidence import Estimates, Means
from dynamiccl_ray.control.state import State
from dynamiccl_ray.knobs import CHUNK_VALUES, N_PAIRS

# What NCCL takes for slower than its cheapest by no more than this, as a log, is tried whatever a model says of it.
_LIKELY: Final = 0.3
# Share of the draws in which what a prior rules out is not drawn.
_TRUSTED: Final = 0.75
# What is expected to be slower than the fastest by more than this, as a log, is hopeless, whatever has changed.
_HOPELESS: Final = 0.8
# What is off by more than this, as the standard deviation of a log, knows nothing of chunks. The models of 15 held-out
# clusters were off by 0.14 to 0.27, and another's by 0.19 to 0.56.
_WRONG_MODEL: Final = 0.25
# What is off by more than this when a key first learns is of another cluster, and knows nothing of channels either.
_MISTAKEN: Final = 0.3
# Where what earlier runs measured is off by more than this, as the standard deviation of a log, they are wrong. Twice
# what they are taken for at first (agent/prior.py).
_MISLEADING: Final = 0.06
# By how much more, as a log for each octave between the two and for so much of one at least, what a key that is near
# has found has to be ahead of NCCL's own choice there; and in how many collectives.
_FURTHER: Final = 0.1
_LEAST_APART: Final = 0.5
_FOUND: Final = 4
# What the wrong chunk may cost, as a log; and NCCL's own where a message is too small for it to be pipelined, which is
# looked at while keys draw, and for less while they compare.
_CHUNK: Final = 0.5
_LARGE: Final = 1.5
_LARGE_COMPARED: Final = 0.3
_OWN_CHUNK: Final = CHUNK_VALUES.index(0)
_SMALL: Final = CHUNK_VALUES.index(32 << 10)


class Exploration(State):
    """Of K keys."""

    def draws(self) -> Int64:
        """(K,) decisions of each key that are drawn: fewer where it learns anew, and where an earlier run has learned,
        for much is known then; three times as many there once that run has turned out to be wrong."""
        learning = self.control.learning
        earlier = np.minimum(learning.earlier_share * (1 + 2 * self.misled), 1.0)
        share = np.where(self.shifts > 0, learning.adapt_share, np.where(self.warm, earlier, 1.0))
        return np.asarray(np.ceil(share * learning.draws), np.int64)

    def allowed(self, rows: Int64) -> Bool:
        """(R, N_PAIRS, N_CHANNELS, N_CHUNKS) what may be chosen, and the guardrail does not forbid."""
        return self._allowed(rows, self.evidence.means(rows))

    def _allowed(self, rows: Int64, means: Means) -> Bool:
        guardrail = self.control.guardrail
        allowed = self.offers.allowed(self.keys, rows)
        index, action = means.worse_than_own(margin=guardrail.margin, least=guardrail.samples)
        allowed.reshape(-1, N_ACTIONS)[index, action] = False
        return np.asarray(allowed)

    def _modelled(self, rows: Int64) -> Float64:
        """(R, N_ACTIONS) what a model expects of actions, see ``Evidence.modelled``; 0 where it turned out to be wrong
        before the network ever changed."""
        return np.where(self.mistaken[rows, None] > 0, 0.0, self.evidence.modelled(rows))

    def view(self, rows: Int64, allowed: Bool, said: Estimates | None = None) -> KeyView:
        """What the policy sees of these keys (R,). It draws channels and chunk apart: a value is masked where all that
        it can be part of is; what else is not ``allowed`` (R, N_PAIRS, N_CHANNELS, N_CHUNKS) is replaced once it is
        drawn. ``said`` is what ``Evidence.estimates`` says of them.
        """
        keys, evidence, learning = self.keys, self.evidence, self.control.learning
        said = said or evidence.estimates(rows)
        done = self.decisions[rows]
        cusum = np.where((self.shifts[rows] > 0) & (done == 0), 1.0, self.cusum.score[rows])
        heat = np.where(done < self.draws()[rows], learning.heat, 0.0)
        return KeyView(
            collective=keys.collective[rows],
            nbytes=keys.nbytes[rows],
            pipelined=keys.pipelined[rows],
            last_time=_known(evidence.last[rows] - evidence.baseline[rows]),
            idle_epochs=self.idle[rows].astype(np.float32),
            last_pair=action_parts(self.wanted[rows])[0],
            cost=keys.cost[rows],
            samples=evidence.by_channels[rows].astype(np.float32),
            channels=said.channels,
            chunks=said.chunks,
            noise=evidence.noise[rows],
            excess=evidence.excess(rows),
            cusum=cusum.astype(np.float32),
            congestion=_known(evidence.last[rows] - evidence.fastest[rows]),
            skew=evidence.skew[rows].astype(np.float32),
            heat=heat.astype(np.float32),
            valid_channels=any_along(allowed, -1),
            valid_chunks=any_along(allowed, -2),
        )

    def _explore(self, rows: Int64, means: Means, allowed: Bool, draw: Bool, tried: Bool) -> tuple[Float32, Int64]:
        """Of keys (R,) that draw, or have drawn all, what the policy sees, (R, observation.SIZE), and ``Due.untried``,
        (R,), where they ``draw`` (R,). Of what is ``allowed``, pairs were ``tried`` (R, N_PAIRS) since the last shift.
        """
        keys, evidence, learning, done = self.keys, self.evidence, self.control.learning, self.decisions[rows]
        last = done >= _TRUSTED * self.draws()[rows]
        said = evidence.estimates(rows)
        self.misled[rows] |= said.earlier.off(_MISLEADING)
        # After a shift any model is off, but what it says of the actions of a pair may still be right.
        first = self.shifts[rows] == 0
        self.mistaken[rows[first]] = said.model.off(_MISTAKEN)[first]
        may = any_along(allowed, -1)
        worth = evidence.may_be_best(rows, may, said)
        chunk, with_chunk = evidence.with_its_chunk(rows, any_along(allowed, -2), said)
        # A prior may be wrong about what nobody draws because of it: the last draws are free. But what an earlier run
        # has measured itself is known, as long as that run is right.
        known = np.isfinite(keys.earlier[rows, :, :N_CHANNELS]) & (self.misled[rows] == 0)[:, None, None]
        drawable = allowed & (worth | (last[:, None, None] & ~known))[..., None]
        observation = encode(keys.context[rows], self.view(rows, drawable, said))
        # A model of another cluster may be wrong about what NCCL takes for nearly the best.
        # So may be what earlier runs say: from where they are as wrong as such a model, they have tried nothing.
        cost, ran_earlier = keys.cost[rows], evidence.ran_earlier(rows)
        ran_earlier[said.earlier.off(_WRONG_MODEL)] = False
        likely = (cost <= _LIKELY) & ~ran_earlier
        fresh = draw[:, None] & (with_chunk | ((any_along(worth, -1) | likely) & ~tried))
        unheard, wrong = np.zeros((len(rows), N_PAIRS), np.bool_), np.zeros(len(rows), np.float32)
        turn = draw & evidence.turn(rows, done)
        unheard[turn], wrong[turn] = ~evidence.tried_near(rows[turn]), evidence.faster_than(rows[turn], cost[turn])
        new = untried(cost, fresh, unheard, wrong, allowed, chunk)
        # The first sequence, and what is seen after it, is as in training. From there a draw that would repeat what is
        # known goes on: first to what was in force before the shift, or a key could end with what is slower than that.
        former = self.settled[rows]
        forgotten = draw & (done > learning.sequence) & (evidence.samples[rows, former] == 0)
        forgotten &= allowed.reshape(-1, N_ACTIONS)[np.arange(len(rows)), former]
        new[forgotten] = former[forgotten]
        late = np.flatnonzero(draw & (done > learning.sequence) & (new < 0))
        if late.size:
            flat, of_late = allowed[late].reshape(-1, N_ACTIONS), means.part(late)
            promises = promising(
                of_late, flat, said.of_actions(late), self._modelled(rows[late]), learning.draw_samples
            )
            own = rechunked(of_late, flat, _OWN_CHUNK, _CHUNK)
            with_other = np.where(own >= 0, own, self._with_small_chunk(rows[late], of_late, flat, _LARGE))
            new[late] = np.where((said.error > _WRONG_MODEL)[late] & (with_other >= 0), with_other, promises)
            # A shift may turn what a model says upside down: what is not hopeless is tried once, by one of those that
            # are near.
            least = np.where(may[late], said.channels[0][late], np.inf).min(-1)
            again = (least <= least.min(-1, keepdims=True) + _HOPELESS) & (turn & ~first)[late, None]
            again &= ~evidence.tried_near(rows[late], since=True)
            once = untried(cost[late], again, np.zeros_like(again), wrong[late], allowed[late], chunk[late])
            new[late] = np.where(once >= 0, once, new[late])
        return observation, new

    def _unmeasured(self, rows: Int64, means: Means, allowed: Bool, tried: Bool, idle: Bool) -> Int64:
        """(R,) what keys that compare measure though they have not since the last shift; -1 for nothing. Of what is
        ``allowed`` (R, N_ACTIONS), the best of a key that is near, or of pairs that were not ``tried`` (R, N_PAIRS)
        what others have found since, or what nobody near has tried and is worth it, or where nobody knows the cluster a
        small chunk; or where keys are ``idle`` (R,), for nothing that they have measured is worth more, what no model
        speaks of."""
        said = self.evidence.estimates(rows)
        new = self._found_near(rows, allowed)
        expected = overlooked(means, allowed, said.of_actions(np.arange(len(rows))), tried)
        small = self._with_small_chunk(rows, means, allowed, _LARGE_COMPARED)
        small[said.error <= _WRONG_MODEL] = -1
        for otherwise in (expected, self._untried_near(rows, allowed, said), small):
            new = np.where(new >= 0, new, otherwise)
        modelled = self._modelled(rows)
        alone = np.flatnonzero((new < 0) & idle & ~modelled.any(-1))
        if alone.size:
            nothing = np.full((len(alone), N_ACTIONS), np.inf, np.float32)
            takes = self.control.learning.draw_samples
            new[alone] = promising(means.part(alone), allowed[alone], nothing, modelled[alone], takes)
        return new

    def _with_small_chunk(self, rows: Int64, means: Means, allowed: Bool, behind: float) -> Int64:
        """(R,) of what is ``allowed`` (R, N_ACTIONS), with a small chunk, the fastest action of a pair that neither
        these keys nor any that are near have measured with another than NCCL's own since the last shift, unless it is
        ``behind`` by more; see ``rechunked``. One of those that are near tries it; -1 for nothing."""
        action = rechunked(means, allowed, _SMALL, behind)
        turn = self.evidence.turn(rows, self.decisions[rows])
        action[~turn | self.evidence.rechunked_near(rows, action)] = -1
        return action

    def _untried_near(self, rows: Int64, allowed: Bool, said: Estimates) -> Int64:
        """(R,) of what is ``allowed`` (R, N_ACTIONS), and of pairs that neither these keys nor any that are near have
        tried since their last shift, what is worth a collective by what is ``said`` of it, and how wrong that may be;
        -1 for nothing. One of those that are near tries it, the others see what it takes."""
        evidence, every = self.evidence, np.arange(len(rows))
        actions = allowed.reshape(-1, N_PAIRS, N_CHANNELS, N_CHUNKS)
        turn = evidence.turn(rows, self.decisions[rows])
        may = any_along(actions, -1) & evidence.expects(rows)
        may &= (turn[:, None] & ~evidence.tried_near(rows, since=True))[..., None]
        time, doubt = said.channels[0], deviation(said.channels[1])
        behind = time - (self._best - evidence.baseline)[rows, None, None]
        moves = doubt**2 / np.hypot(doubt, evidence.noise[rows, None, None])
        worth = np.where(may, knowledge_gradient(behind, moves, 1), -np.inf).reshape(len(rows), -1)
        most = worth.argmax(-1)
        pair, channels = np.divmod(most, N_CHANNELS)
        chunk = evidence.with_its_chunk(rows, any_along(actions, -2), said)[0][every, pair]
        with_chunk = actions[every, pair, channels]
        chunk = np.where(with_chunk[every, chunk], chunk, with_chunk.argmax(-1))
        return np.where(worth[every, most] > 0, flat_action(pair, channels, chunk), -1)

    def _found_near(self, rows: Int64, allowed: Bool) -> Int64:
        """(R,) what is the best of a key that is near, and ahead of NCCL's own choice there by far more than anything
        that these keys have measured is here; of what is ``allowed`` (R, N_ACTIONS) and they have not. -1 for nothing.
        """
        evidence, (at, other, apart) = self.evidence, self.evidence.near(rows)
        found = self._found[other]
        ratio = evidence.mean(other, found) - evidence.baseline[other]
        further = ratio < (self._best[rows] - evidence.baseline[rows])[at] - _FURTHER * np.maximum(apart, _LEAST_APART)
        known = evidence.samples[other, found] >= _FOUND
        of = further & known & allowed[at, found] & (evidence.samples[rows[at], found] == 0)
        at, found, ratio = at[of], found[of], ratio[of]
        out = np.full(len(rows), -1)
        by = np.argsort(-ratio, kind="stable")
        out[at[by]] = found[by]
        return out


def _known(x: Float64) -> Float32:
    """0 for what is not known."""
    return np.where(np.isfinite(x), x, 0.0).astype(np.float32)
