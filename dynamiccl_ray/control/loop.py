"""The control loop of a set of keys: baseline, learn, exploit; after an alarm check, and if need be adapt, exploit.

Every key goes through these phases at its own pace: a decision of a key is over when the key has as many samples of it
as it takes, whatever the other keys do. So a key that is rare, or that nothing measures, holds nobody up; all that it
has is NCCL's own choice.

Whoever runs the loop says what was measured (``observe``), asks which keys need a decision (``due``), draws for those
that are to be drawn (``drawing.py``), and says what was decided (``decide``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from dynamiccl_ray.actions import N_ACTIONS, OWN_ACTION, action_parts
from dynamiccl_ray.agent.observation import SIZE
from dynamiccl_ray.arrays import Bool, Float64, Int64
from dynamiccl_ray.control import check
from dynamiccl_ray.control.columns import (
    Closed,
    Drift,
    Keys,
    Measured,
    Outcome,
    closed,
    joined,
    salt_of,
    take,
)
from dynamiccl_ray.control.contest import compared, contest
from dynamiccl_ray.control.due import Due
from dynamiccl_ray.control.length import SURPRISE
from dynamiccl_ray.control.signs import TOGETHER, Signs
from dynamiccl_ray.control.state import Phase
from dynamiccl_ray.control.trigger import BATCH
from dynamiccl_ray.control.verdicts import Verdicts, no_verdicts, verdicts

__all__ = ["Drift", "Due", "Keys", "Loop", "Measured", "Outcome", "Phase", "Verdicts", "salt_of"]

# Collectives of an action before drift is looked for in further ones.
_KNOWN: Final = 4
# What is as near to an alarm as this is not added to what is known well of an action.
_DOUBTFUL: Final = 0.6
# A time counts as no more than so many standard deviations above the median of its decision, of two the lesser.
_OUTLIER: Final = 4.0
# Draws of an action after which one more says little.
_OFTEN: Final = 4
# The least that NCCL's own choice is off by, as a log, on a network that has changed since it was measured; and what is
# in force, where a key has begun to exploit, or its choice has stood, and the detector has seen too little of it.
_LEAST_MOVED: Final = 0.05
_UNUSUAL: Final = 0.3
# On a network that has changed, but not so that it shows in a check, what was measured counts for no more collectives;
# and where not even that shows.
_FADED: Final = 32.0
_KEPT: Final = 128.0
# Where this share of a communicator's keys have begun anew within ``TOGETHER`` of their samples, its network changed.
_AGREED: Final = 0.25


class Loop(Signs):
    """What is done with what is known of the keys."""

    # -- measurements --

    @property
    def need(self) -> Int64:
        """(K,) samples that the decision of each key still takes."""
        return np.maximum(self._missing(self._pending), 0)

    def observe(self, samples: Measured) -> list[Drift]:
        """What ran since the last call."""
        self.idle += 1
        self.idle[samples.row] = 0
        self.closed = no_verdicts()
        self.measured += np.bincount(samples.row, minlength=len(self))
        current = samples.action == self.wanted[samples.row]
        self.late += int(np.count_nonzero(~current))
        index = np.concatenate([np.full(len(self._pending.row), -1), np.flatnonzero(current)])
        have = joined(self._pending, take(samples, current))
        closing = (self._missing(have) <= 0)[have.row]
        self._pending = take(have, ~closing)
        return self._close(take(have, closing), index[closing])

    def _missing(self, samples: Measured) -> Int64:
        """(K,) samples that each decision takes beyond these; one that is over takes no more, whatever comes."""
        takes = np.where(self._over, 0, self._takes())
        return np.asarray(takes - np.bincount(samples.row, minlength=len(self)), np.int64)

    def _close(self, samples: Measured, index: Int64) -> list[Drift]:
        """Decisions that have all of their samples."""
        if not len(samples.row):
            return []
        order = np.argsort(samples.row, kind="stable")
        samples, index = take(samples, order), index[order]
        of, log_us = closed(samples, self.wanted, _OUTLIER * self.evidence.noise)
        rows, actions, ran, counts = of.rows, of.actions, of.samples, of.samples.astype(np.int64)
        first = np.cumsum(counts) - counts
        phase = self.phase[rows]
        baseline, checking = phase == Phase.BASELINE, phase == Phase.CHECK
        self._go_back(of.part(np.flatnonzero(phase == Phase.EXPLOIT)))
        decided, resting = self.decisions[rows], self.resting[rows] > 0
        drawn = (decided <= self.draws()[rows]) & ~resting
        self.closed = verdicts(of, self.evidence, phase=phase, ordinal=decided, drawn=drawn)
        # Of a fast job many times as many run as a decision takes before the next one is in force. While keys learn,
        # these share what the others do meanwhile, which does not average out: they count as no more than it takes.
        alone = (phase == Phase.EXPLOIT) & (self._stirred[rows] == 0)
        of = of.as_if(np.where(alone, ran, np.maximum(self._takes()[rows], BATCH)))
        probed = (phase == Phase.EXPLOIT) & (self.evidence.samples[rows, actions] == 0)
        aside = self._aside(rows)
        self._spend(of, ran, (((phase == Phase.LEARN) | (phase == Phase.ADAPT)) & ~resting) | probed | aside)
        found = rows[self._found_ahead(of)]
        alarm = np.full(len(rows), -1)
        # What looks back is judged below: that NCCL's own choice alone has become slower is no alarm.
        looked = self._looks_last(rows, decided - 1) & (phase != Phase.EXPLOIT)
        known = self.evidence.samples[rows, actions] >= _KNOWN
        watched = np.flatnonzero(~baseline & ~checking & ~looked & known & ~aside)
        alarm[watched] = self._watch(of.part(watched), counts[watched], log_us[np.isin(samples.row, rows[watched])])
        quiet = alarm < 0
        self.evidence.skew[rows] = np.add.reduceat(samples.skew, first) / counts
        together = self._watch_together(of.part(watched[quiet[watched] & (phase[watched] == Phase.EXPLOIT)]))

        self._judge(rows, actions, of.mean, ~baseline & ~checking & ~self._over[rows])
        begun = baseline & ~self._over[rows]
        before = self.evidence.baseline.copy()
        of.part(np.flatnonzero(begun)).into(self.evidence.begin)
        learning = ((phase == Phase.LEARN) | (phase == Phase.ADAPT)) & ~resting & ~self._over[rows]
        # What is asked for after the draws is NCCL's own choice, or the best where that is hopeless.
        asked = (actions == OWN_ACTION) | self.hopeless_earlier[rows] | (decided > self.draws()[rows])
        last = self._looks_back(rows, decided - 1) & asked
        last &= self._off(of, _LEAST_MOVED)
        # On a network that has become faster, what was measured too seldom for an alarm to come soon would be the best
        # of all, and nothing would ever say that the others are as fast. What exploits and is slower gives way.
        well_known = self.evidence.samples[rows, actions] >= check.WELL_KNOWN
        seldom = ~drawn & ~well_known & self._off(of, SURPRISE)
        faster = of.mean < self.evidence.mean(rows, actions)
        seldom &= learning | ((phase == Phase.EXPLOIT) & faster)
        # What changes before the detector knows what is usual is usual to it.
        young = (phase == Phase.EXPLOIT) & self.cusum.young(rows) & self._off(of, _UNUSUAL)
        moved = rows[quiet & ((learning & last) | ((seldom | young) & self.cusum.watches))]
        left = rows[(phase == Phase.EXPLOIT) & self._left_behind(of)]
        # What may be of another network says nothing of this one; where little is known yet, or a check is far off, it
        # has to.
        calm = self.measured[rows] < self.checks.calm_until[rows]
        doubtful = (self.cusum.score[rows] > _DOUBTFUL) & well_known & ~calm
        # What shows that an action has moved is what it takes now: the check is against what it took.
        ahead = self._own_ahead(of)
        same = ~np.isin(rows, moved) & ~ahead
        of.part(np.flatnonzero(quiet & ~begun & ~checking & ~doubtful & same)).into(self.evidence.record)
        turned = np.flatnonzero(checking & ~self._over[rows])
        is_own = rows[actions == OWN_ACTION]
        self._own_at[is_own], self._own_ran[is_own] = self.measured[is_own], ran[actions == OWN_ACTION]
        self._doubted[is_own] = 0
        self._over[rows] = True
        own = self.evidence.baseline.copy()
        own[left], self._told_at[left] = self._own_near[left], self.measured[left]
        self._own_near[rows] = np.nan
        now = ahead | (last & (actions == OWN_ACTION))
        own[rows[now]] = of.mean[now]
        # Before others agree that the network has changed: what begins anew with them has nothing to be checked by.
        self._check(np.unique(np.concatenate([moved, together, found, left, rows[ahead]])), own)
        drifts = self._turn(of.part(turned))
        self._tell_near(rows[np.where(checking, self.checks.own_contends(rows), actions == OWN_ACTION)], before)
        at = {int(rows[i]): int(index[first[i] + alarm[i]]) for i in np.flatnonzero(~quiet)}
        return drifts + [Drift(row=row, sample=at[row], anew=True) for row in self._alarmed(rows[~quiet])]

    def _go_back(self, of: Closed) -> None:
        """What a check has moved is moved back where times go back, and what it had not measured with it: otherwise
        that would look slower, or faster, than what is in force by as much as the network was, for a while."""
        way = self.checks.way_back[of.rows]
        back = self.checks.gone_back(of.rows, of.mean - self.evidence.mean(of.rows, of.actions))
        self.evidence.move(of.rows[back], way[back])

    def _spend(self, of: Closed, ran: Float64, exploring: Bool) -> None:
        """What decisions, with so many collectives (R,), took is known, and by how much that is more than the best
        known action takes."""
        group = self.keys.group[of.rows]
        took_us = ran * np.exp(of.mean)
        best_us = ran * np.exp(np.where(np.isfinite(self._best[of.rows]), self._best[of.rows], of.mean))
        cost_us = np.where(exploring, took_us - best_us, 0.0)
        self.budget.spend(group, ran, took_us, cost_us, np.bincount(self.keys.group)[group])

    def _alarmed(self, rows: Int64) -> list[int]:
        """Times of these keys have moved. What exploits, or only compares, is checked, unless they have moved far;
        returns the others, which begin anew at once."""
        if not len(rows):
            return []
        drawing = (self.phase[rows] != Phase.EXPLOIT) & (self.decisions[rows] <= self.draws()[rows])
        checked = ~drawing & ~self.cusum.sudden(rows)
        # What contends is compared in the check.
        compared = self.draws()[rows[checked]] + self.control.learning.compares + 1
        self.decisions[rows[checked]] = np.maximum(self.decisions[rows[checked]], compared)
        self._check(rows[checked])
        if not checked.all():
            self._agree(rows[~checked])
        return [int(row) for row in rows[~checked]]

    def _check(self, rows: Int64, own: Float64 | None = None) -> None:
        """Begins checks. ``own`` (K,) has what NCCL's own choice took last, its log time: the baseline by default."""
        if not len(rows):
            return
        self._doubt(rows)
        means, own = self.evidence.means(rows), self.evidence.baseline if own is None else own
        allowed, wanted = self._allowed(rows, means).reshape(-1, N_ACTIONS), self.wanted[rows]
        # While a key learns, NCCL's own choice is in force for once: where it is hopeless, or all was compared, what is
        # checked is the best.
        best = contest(means, allowed, _OFTEN).best
        for_once = (self.phase[rows] != Phase.EXPLOIT) & (wanted == OWN_ACTION)
        far = for_once & (own[rows] - self.evidence.mean(rows, best) > check.HOPELESS)
        compared = self.decisions[rows] >= self.draws()[rows] + self.control.learning.compares
        # What a neighbour has found is in force for once, too, until it is measured.
        for_once = far | (for_once & compared) | (self.evidence.samples[rows, wanted] == 0) | self._aside(rows)
        wanted = np.where(for_once, best, wanted)
        hopeless = self.hopeless_earlier[rows] | (own[rows] - self.evidence.mean(rows, wanted) > check.HOPELESS)
        self.phase[rows], self.resting[rows] = Phase.CHECK, 0
        deviation = self.cusum.deviation(rows)
        self.checks.begin(rows, wanted, self.decisions[rows], self.evidence, deviation, allowed, hopeless)
        self._over[rows] = True
        self._pending = take(self._pending, ~np.isin(self._pending.row, rows))

    def _turn(self, of: Closed) -> list[Drift]:
        """Turns of checks are over, and with the last one the check."""
        if not len(of.rows):
            return []
        void = of.actions != self.checks.next(of.rows)
        self._go_on(of.rows[void])  # something may not be asked for any more: there is no check then
        self.cusum.reset(of.rows[void])
        of = of.part(np.flatnonzero(~void))
        self.checks.record(of.rows, of.samples, of.mean, of.square, self.evidence, self.cusum.deviation(of.rows))
        contended = of.rows[self.checks.contended(of.rows)]
        contended = contended[~self.checks.moved(contended, self.cusum.deviation(contended))]
        new = (self.shifts[contended] == 0) & self._early(contended)
        differs = self.checks.differs(contended, self.evidence, self.cusum.deviation(contended), new)
        anew, alike = contended[differs], contended[~differs]
        self.checks.look(alike, self.settled[alike], self.evidence, self.allowed(alike).reshape(-1, N_ACTIONS))
        stands = of.rows[self.checks.over(of.rows) & ~np.isin(of.rows, anew)]
        stands = stands[~self.checks.again(stands, self.cusum.deviation(stands))]
        rows = np.union1d(anew, stands)
        if not len(rows):
            return []
        by, of_each = self.checks.moved_by(stands, self.evidence, self.cusum.deviation(stands))
        self.evidence.move(stands, by)
        self.checks.may_go_back(stands, by, self.cusum.deviation(stands))
        for place, further in enumerate(of_each.T):
            there = self.checks.actions[stands, place] >= 0
            self.evidence.correct(stands[there], self.checks.actions[stands[there], place], further[there])
        self.evidence.fade(stands, np.where(np.abs(by) > _LEAST_MOVED, _FADED, _KEPT))
        # What was checked before all was compared is compared now; and there was no alarm.
        early = self._early(stands)
        self.decisions[stands[early]] = self.checks.began[stands[early]]
        self.checks.stand(stands[~early], self.measured[stands[~early]])
        if len(anew):
            self._agree(anew)
            # Where NCCL's own choice was checked it is known by now, and so is how what contended before does.
            begun = anew[self.checks.own_contends(anew)]
            self.phase[begun], self._over[begun] = Phase.ADAPT, True
            # What is left from before is moved with it first: the others are of the network as it is.
            self._learn(begun, self.evidence.begin, own=True)
            self._learn(begun, self.evidence.record, own=False)
        self._learn(stands, self.evidence.record, own=True)
        self._learn(stands, self.evidence.record, own=False)
        self._go_on(stands)
        self.cusum.reset(rows)
        self.watch.forget(rows)
        return [Drift(row=int(row), sample=-1, anew=bool(np.isin(row, anew))) for row in rows]

    def _early(self, rows: Int64) -> Bool:
        """(R,) whether the checks of these keys began before they exploited."""
        return np.asarray(self.checks.began[rows] <= self.draws()[rows] + self.control.learning.compares)

    def _go_on(self, rows: Int64) -> None:
        """Checks of these keys are over, and nothing is learned anew."""
        learning = np.where(self.shifts[rows] > 0, Phase.ADAPT, Phase.LEARN)
        self.phase[rows] = np.where(self._early(rows), learning, Phase.EXPLOIT)

    def _learn(self, rows: Int64, into: Callable[..., None], *, own: bool) -> None:
        """What checks of these keys measured of NCCL's own choice, or of all others."""
        for place in range(self.checks.actions.shape[1]):
            actions = self.checks.actions[rows, place]
            there = rows[(actions >= 0) & ((actions == OWN_ACTION) == own)]
            Closed(
                rows=there,
                actions=self.checks.actions[there, place],
                samples=self.checks.samples[there, place],
                mean=self.checks.level(there)[:, place],
                square=self.checks.square[there, place],
            ).into(into)

    def _judge(self, rows: Int64, actions: Int64, mean: Float64, known: Bool) -> None:
        """The outcome of decisions, before they are recorded."""
        evidence, outcome = self.evidence, self._outcome
        outcome.known[rows] = known
        outcome.log_speedup[rows] = evidence.baseline[rows] - mean
        outcome.switched[rows] = actions != self._before[rows]
        outcome.probed[rows] = ~evidence.tried[rows, actions]
        outcome.congestion[rows] = mean - np.minimum(evidence.fastest[rows], mean)

    def _agree(self, rows: Int64) -> None:
        """These keys begin anew. Where many of a communicator do, the network has changed for all of them: what
        exploits is checked, at once or soon, and what learns begins anew as well."""
        self._anew_at[rows] = self.measured[rows]
        recent = self.measured - self._anew_at <= TOGETHER
        watched = (self.phase != Phase.BASELINE) | recent
        group = self.keys.group
        share = np.bincount(group, recent) / np.maximum(np.bincount(group, watched), 1)
        agreed = (share >= _AGREED)[group] & np.isin(group, group[rows]) & ~recent
        exploit, calm = agreed & (self.phase == Phase.EXPLOIT), self.measured < self.checks.calm_until
        # What is left in peace was checked lately, and what moves it far is an alarm all the same. So that comes first.
        later = np.flatnonzero(exploit & calm)
        self.checks.ask(later, self.measured[later] + TOGETHER)
        self._check(np.flatnonzero(exploit & ~calm))
        others = np.flatnonzero(agreed & ((self.phase == Phase.LEARN) | (self.phase == Phase.ADAPT)))
        self._anew_at[others] = self.measured[others]
        self.shift(np.union1d(rows, others))

    def shift(self, rows: Int64) -> None:
        """The network of these keys has changed: they begin anew with NCCL's own choice."""
        self._doubt(rows)
        self._remember(rows)
        self.evidence.shift(rows)
        self.cusum.reset(rows)
        self.watch.forget(rows)
        self.checks.forget(rows)
        self.phase[rows] = Phase.BASELINE
        self._stir(rows[self.wanted[rows] != OWN_ACTION])
        self.wanted[rows] = OWN_ACTION
        self.decisions[rows] = self.resting[rows] = 0
        self.shifts[rows] += 1
        self._over[rows] = False
        self._own_near[rows] = np.nan
        self._outcome.known[rows] = False
        self._pending = take(self._pending, ~np.isin(self._pending.row, rows))

    def _doubt(self, rows: Int64) -> None:
        """The network of these keys may have changed, and with it for others of their communicators that have not
        measured NCCL's own choice lately."""
        old = self.measured - self._own_at > TOGETHER
        self._doubted[old & np.isin(self.keys.group, self.keys.group[rows])] = 1

    def _remember(self, rows: Int64) -> None:
        """What these keys exploited, for whoever wants to go back to it: what they measured most, where the change has
        put in force what is hardly known."""
        exploited, samples = self.exploited()[rows], self.evidence.samples[rows]
        known = np.take_along_axis(samples, np.maximum(exploited, 0)[:, None], -1)[:, 0] >= check.WELL_KNOWN
        settled = np.where(known, exploited, samples.argmax(-1))
        self.settled[rows] = np.where(exploited >= 0, settled, self.settled[rows])

    def exploited(self) -> Int64:
        """(K,) flat action that each key exploits, or has exploited until its check began; -1 for a key that learns."""
        decided = np.where(self.phase == Phase.CHECK, self.checks.began, self.decisions)
        compared = decided > self.draws() + self.control.learning.compares
        # Until something else is decided, what a check measured last is in force, also once it is over.
        checked = (self.phase == Phase.CHECK) | self.checks.turns.any(-1)
        exploits = np.isin(self.phase, (Phase.EXPLOIT, Phase.CHECK)) & compared
        # What a neighbour has found is in force for once, and nobody knows how good it is here; or NCCL's own choice.
        every = np.arange(len(self))
        once = (self.evidence.samples[every, self.wanted] == 0) | self._aside(every)
        wanted = np.where(once, self._found, self.wanted)
        return np.where(exploits, np.where(checked, self.checks.actions[:, 0], wanted), -1)

    # -- decisions --

    def due(self) -> Due:
        """Keys that need a decision."""
        rows = np.flatnonzero(self._over)
        means = self.evidence.means(rows)
        allowed = self._allowed(rows, means)
        learning, done = self.control.learning, self.decisions[rows]
        flat = allowed.reshape(-1, N_ACTIONS)
        measured = contest(means, flat, _OFTEN * learning.draw_samples)
        draws = self.draws()[rows]
        best, following = measured.best.copy(), measured.best.copy()
        drawn = np.flatnonzero(done >= draws)
        if drawn.size:
            best[drawn], following[drawn] = compared(
                means.part(drawn), flat[drawn], self._modelled(rows[drawn]), learning.compare_samples
            )
        self._best[rows], self._found[rows] = self.evidence.mean(rows, best), best
        spent, exploit = self.budget.spent(self.keys.group)[rows], done >= draws + learning.compares
        self.resting[rows] = spent & ~exploit
        rests = self.resting[rows] > 0
        # The network may have changed while a key learned: then what was measured before is not to be compared with
        # what was measured after, and NCCL's own choice takes another time now. The last draw goes to that, and so does
        # the last decision that compares; or to the best where that is hopeless.
        # Where an earlier run turns out to be wrong, others go to it too, until it is known as well as elsewhere.
        spared = (self.misled[rows] > 0) & (self.evidence.samples[rows, OWN_ACTION] < learning.baseline_samples)
        again = self._looks_back(rows, done) | (spared & (done < draws) & (self.shifts[rows] == 0))
        again &= ~rests
        far = (done >= draws) & (self.evidence.baseline[rows] - self._best[rows] > check.HOPELESS)
        hopeless = self.hopeless_earlier[rows] | far
        draw = (done < draws) & ~rests & ~again
        comparing = (done >= draws) & (done < draws + learning.compares) & ~rests & ~again
        compares = np.flatnonzero(comparing)
        if compares.size:
            of = means.part(compares)
            idle = best[compares] == following[compares]
            new = self._unmeasured(rows[compares], of, flat[compares], measured.tried[compares], idle)
            following[compares] = np.where(new >= 0, new, following[compares])
        fixed = np.where(comparing, following, np.where(again & ~hopeless, OWN_ACTION, best))
        exploits = np.flatnonzero(exploit & ~spent & (self.phase[rows] != Phase.CHECK))
        aside = exploits[self._looks_aside(rows[exploits])]
        fixed[aside] = OWN_ACTION
        theirs = self._found_near(rows[exploits], flat[exploits])
        fixed[exploits] = np.where(theirs >= 0, theirs, fixed[exploits])
        looks = draw | (again & ((done < draws) | self._looks_once(rows, done, fixed))) | self._first(rows, fixed)
        looks[aside] |= self._shows(rows[aside], fixed[aside])
        takes = np.where(looks, learning.draw_samples, learning.compare_samples)
        checking = np.flatnonzero(self.phase[rows] == Phase.CHECK)
        asked = self.checks.next(rows[checking])
        fixed[checking] = np.where(flat[checking, asked], asked, best[checking])
        takes[checking] = 1
        observation, new = np.zeros((len(rows), SIZE), np.float32), np.full(len(rows), -1)
        # What follows the last draw tells the learner what it was worth.
        seen = np.flatnonzero(done <= draws)
        if seen.size:
            of = means.part(seen)
            observation[seen], new[seen] = self._explore(
                rows[seen], of, allowed[seen], draw[seen], measured.tried[seen]
            )
        return Due(
            row=rows,
            identity=self.keys.identity[rows],
            salt=self.keys.salt[rows],
            ordinal=done,
            shifts=self.shifts[rows],
            draw=draw,
            fixed=fixed,
            behind=measured.behind[draw[measured.behind[:, 0]]],
            known=measured.known,
            untried=new,
            takes=takes,
            observation=observation,
            outcome=take(self._outcome, rows),
        )

    def decide(self, rows: Int64, actions: Int64) -> None:
        """What has been decided (R,) for some of the keys that are due."""
        self._before[rows] = self.wanted[rows]
        self._stirred[rows] = 0
        self._stir(rows[actions != self.wanted[rows]])
        self.wanted[rows] = actions
        self.decisions[rows] += 1 - self.resting[rows]
        self._over[rows] = False
        self._outcome.known[rows] = False
        learning = self.control.learning
        again = np.where(self.shifts[rows] > 0, Phase.ADAPT, Phase.LEARN)
        compared = self.decisions[rows] > self.draws()[rows] + learning.compares
        after = np.where(compared, Phase.EXPLOIT, again)
        checking = self.phase[rows] == Phase.CHECK
        self.phase[rows] = np.where(checking, Phase.CHECK, after)
        self.checks.turns[rows[~checking]] = 0

    def _stir(self, rows: Int64) -> None:
        """These keys do something else from now on, which the others of their communicators feel, too."""
        self._stirred[np.isin(self.keys.group, self.keys.group[rows])] = 1

    # -- durability --

    def restore(self, state: dict[str, Any]) -> None:
        """After ``grow`` by the same keys. What had been measured of open decisions is measured anew, and a key whose
        action may not be chosen any more begins anew.
        """
        super().restore(state)
        pair, channels, chunk = action_parts(self.wanted)
        rows = np.arange(len(self))
        valid = self.keys.channels[rows, pair, channels] & self.keys.chunks[rows, pair, chunk]
        self.shift(np.flatnonzero(~valid & (self.wanted != OWN_ACTION)))
