"""Whatever is observed, decided, added and forgotten in whatever order: the loop counts as plain Python counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import Phase as HypothesisPhase
from hypothesis import event, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from looped import loop_of, some_keys

from dynamiccl_ray.actions import N_ACTIONS, OWN_ACTION, flat_action
from dynamiccl_ray.agent.observation import part
from dynamiccl_ray.control import check
from dynamiccl_ray.control.loop import Measured, Phase
from dynamiccl_ray.control.trigger import BATCH

FADED, KEPT = 32, 128
LEARNING = {"baseline_samples": 3, "draws": 3, "draw_samples": 2, "compares": 2, "compare_samples": 4}
GROUPS = 2
# Shrinking takes minutes; the steps of a failure are printed as they are.
WITHOUT_SHRINKING = [HypothesisPhase.explicit, HypothesisPhase.generate]
EDGES = {
    (Phase.BASELINE, Phase.LEARN),
    (Phase.BASELINE, Phase.ADAPT),
    (Phase.LEARN, Phase.EXPLOIT),
    (Phase.ADAPT, Phase.EXPLOIT),
    (Phase.LEARN, Phase.CHECK),
    (Phase.ADAPT, Phase.CHECK),
    (Phase.CHECK, Phase.LEARN),
    (Phase.LEARN, Phase.BASELINE),
    (Phase.ADAPT, Phase.BASELINE),
    (Phase.EXPLOIT, Phase.BASELINE),
    (Phase.EXPLOIT, Phase.CHECK),
    (Phase.CHECK, Phase.EXPLOIT),
    (Phase.CHECK, Phase.ADAPT),
    (Phase.CHECK, Phase.BASELINE),
}


@dataclass
class Key:
    """What one key should be."""

    identity: int
    group: int
    level: float = 3.0
    """Mean log time now."""
    wanted: int = OWN_ACTION
    pending: int = 0
    over: bool = False
    decisions: int = 0
    shifts: int = 0
    recorded: Counter[int] = field(default_factory=Counter)
    """Samples since the last shift, by action."""
    observed: int = 0
    used: int = 0
    late: int = 0
    lost: int = 0
    """Of an open decision that a shift cut short, that raised an alarm, or that NCCL does not take."""
    checking: bool = False
    turned: int = 0
    """Samples of the check that is under way: they are recorded at its end."""
    began: int = 0
    """Decisions when the check began."""
    adapting: bool = False
    """A check has measured NCCL's own choice anew."""
    hopeless: bool = False
    """NCCL's own choice took more than twice as long as something else before the last shift."""
    last_phase: Phase = Phase.BASELINE

    @property
    def takes(self) -> int:
        if self.checking:
            return 1
        if not self.decisions:
            return 1 if self.hopeless else LEARNING["baseline_samples"]
        looks = self.decisions <= LEARNING["draws"] or not self.recorded[self.wanted]
        return LEARNING["draw_samples" if looks else "compare_samples"]

    @property
    def phase(self) -> Phase:
        if self.checking:
            return Phase.CHECK
        if self.adapting and not self.decisions:
            return Phase.ADAPT
        if not self.decisions:
            return Phase.BASELINE
        if self.decisions > LEARNING["draws"] + LEARNING["compares"]:
            return Phase.EXPLOIT
        return Phase.ADAPT if self.shifts else Phase.LEARN

    def observe(self, right: int, late: int, *, doubtful: bool, stirred: bool) -> bool:
        """Samples of what is wanted, and of something else; whether a decision came to its end. Unless it exploits, and
        no key of its communicator is ``stirred``, no more of them count than it takes, or make a batch."""
        self.observed += right + late
        self.late += late
        self.pending += right
        if not self.pending or not (self.over or self.pending >= self.takes):
            return False
        counts = self.pending
        if stirred or self.phase != Phase.EXPLOIT:
            counts = min(self.pending, max(self.takes, BATCH))
        if self.checking:
            # What comes once a turn is over is not used.
            self.turned += 0 if self.over else counts
            self.lost += self.pending if self.over else 0
            self.used += 0 if self.over else self.pending
        elif doubtful and self.recorded[self.wanted] >= 24:
            self.lost += self.pending
        else:
            self.recorded[self.wanted] += counts
            self.used += self.pending
        self.pending, self.over = 0, True
        return True

    def check(self, recorded: Counter[int]) -> None:
        """Begins: the decision that raised it, or is open, is not recorded."""
        gone = self.recorded - recorded
        assert not recorded - self.recorded
        assert set(gone) <= {self.wanted}
        self.lost += sum(gone.values()) + self.pending
        self.used -= sum(gone.values())
        self.recorded, self.pending, self.over, self.checking = recorded, 0, True, True
        self.began = self.decisions

    def check_again(self) -> None:
        """What was looked at is ahead: that and the action in force contend, and what else was measured is not used."""
        self.lost += self.turned
        self.used -= self.turned
        self.turned = 0

    def checked(self, recorded: Counter[int], *, anew: bool) -> None:
        """Is over: what its turns have measured is recorded, and after ``anew`` nothing else; nothing at all if NCCL's
        own choice was not among it."""
        if anew and not recorded:
            self.call_off()
            self.shift()
            return
        known = Counter[int]() if anew else self.recorded
        # What was measured before counts for no more than so much, and for less where all have moved.
        few, before = (Counter({action: min(n, most) for action, n in known.items()}) for most in (FADED, KEPT))
        if sum(recorded.values()) - sum(before.values()) != self.turned:
            before = few
        self.lost += sum((known - before).values())
        self.used -= sum((known - before).values())
        assert sum((recorded - before).values()) == sum(recorded.values()) - sum(before.values()) == self.turned
        self.recorded, self.turned, self.checking = recorded, 0, False
        if self.began <= LEARNING["draws"] + LEARNING["compares"] and not anew:
            self.decisions = self.began
        if anew:
            assert recorded[OWN_ACTION]
            self.wanted, self.decisions, self.adapting = OWN_ACTION, 0, True
            self.shifts += 1

    def call_off(self) -> None:
        """An action of the check may not be asked for any more."""
        self.lost += self.turned
        self.used -= self.turned
        self.turned, self.checking = 0, False

    def shift(self) -> None:
        self.lost += self.pending
        self.wanted, self.pending, self.over, self.decisions = OWN_ACTION, 0, False, 0
        self.shifts += 1
        self.adapting = False
        self.recorded.clear()

    def withdraw(self) -> None:
        """What is wanted is not to be had, unless it is NCCL's own choice."""
        if self.wanted != OWN_ACTION:
            self.lost += self.pending
            self.pending, self.over = 0, True

    def decide(self, action: int) -> None:
        self.wanted, self.over = action, False
        self.decisions += 1


class Interleavings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = loop_of(some_keys(2, small_chunk=True), trigger=1e4, guardrail={"samples": 4}, **LEARNING)
        self.keys = [Key(identity=0, group=0), Key(identity=1, group=0)]
        self.came = 2
        self.forgotten_late = 0
        self.rng = np.random.default_rng(0)

    # -- what may happen --

    @rule(n=st.integers(1, 2), group=st.integers(0, GROUPS - 1))
    @precondition(lambda self: len(self.keys) < 8)
    def grow(self, n: int, group: int) -> None:
        self.loop.grow(some_keys(n, group=group, first=self.came, small_chunk=True))
        self.keys += [Key(identity=self.came + i + (group << 32), group=group) for i in range(n)]
        self.came += n

    @rule(data=st.data())
    def keep(self, data: Any) -> None:
        kept = data.draw(st.lists(st.booleans(), min_size=len(self.keys), max_size=len(self.keys)))
        if sum(kept) < len(kept) - 2:
            return
        self.loop.keep(np.array(kept, np.bool_))
        self.forgotten_late += sum(key.late for key, stays in zip(self.keys, kept, strict=True) if not stays)
        self.keys = [key for key, stays in zip(self.keys, kept, strict=True) if stays]

    @rule(group=st.integers(0, GROUPS - 1), by=st.sampled_from([-1.0, 0.5]), share=st.sampled_from([0.2, 1.0]))
    def move(self, group: int, by: float, share: float) -> None:
        """The network of a communicator, or of some of its keys, shifts."""
        for key in self.keys:
            if key.group == group and self.rng.random() < share:
                key.level += by

    @rule(data=st.data())
    def observe(self, data: Any) -> None:
        counts = [
            (data.draw(st.sampled_from([0, 0, 1, 2, 3, 9])), data.draw(st.sampled_from([0, 0, 0, 1, 3])))
            for _ in self.keys
        ]
        self._observed(counts)

    @rule(data=st.data())
    def decide(self, data: Any) -> None:
        """For some of those that are due: a random draw of what may be chosen."""
        due = self.loop.due()
        assert due.row.tolist() == [row for row, key in enumerate(self.keys) if key.over]
        for name, expected in (("ordinal", "decisions"), ("shifts", "shifts"), ("identity", "identity")):
            assert getattr(due, name).tolist() == [getattr(self.keys[row], expected) for row in due.row]
        chosen = np.array(
            data.draw(st.lists(st.sampled_from(range(len(due.row))), unique=True)) if len(due.row) else []
        )
        self._decided(due.part(chosen.astype(np.int64)))

    @rule(cycles=st.integers(1, 12), still=st.integers(0, 3))
    def live(self, cycles: int, still: int) -> None:
        """A quiet stretch, in which every key has what it needs, but for one that does not run."""
        for _ in range(cycles):
            self._observed([(0 if row == still else need, 0) for row, need in enumerate(self.loop.need.tolist())])
            self._decided(self.loop.due())

    @rule(at=st.integers(0, 7))
    @precondition(lambda self: self.keys)
    def refuse(self, at: int) -> None:
        """NCCL does not take what is wanted of a key: its decision is over."""
        row = at % len(self.keys)
        self.loop.forbid(row, self.keys[row].wanted)
        self.keys[row].withdraw()

    def _observed(self, counts: list[tuple[int, int]]) -> None:
        row = np.repeat(np.arange(len(counts)), [right + late for right, late in counts])
        late = np.concatenate([np.zeros(0), *([0] * right + [1] * late for right, late in counts)]).astype(np.int64)
        order = self.rng.permutation(len(row))
        row, late = row[order], late[order]
        action = (self.loop.wanted[row] + late * self.rng.integers(1, N_ACTIONS, len(row))) % N_ACTIONS
        level = np.array([key.level for key in self.keys])
        log_us = level[row] + 0.001 * action + 0.02 * self.rng.standard_normal(len(row))
        skew = np.zeros(len(row))
        stirred = self.loop._stirred > 0
        alarms = self.loop.observe(Measured(row=row, action=action, log_us=log_us, skew=skew))

        doubtful = (self.loop.cusum.score > 0.6) & (self.loop.measured >= self.loop.checks.calm_until)
        for key, (right, n_late), in_doubt, moved in zip(self.keys, counts, doubtful, stirred, strict=True):
            key.observe(right, n_late, doubtful=in_doubt, stirred=moved)
        raised = {alarm.row for alarm in alarms if alarm.anew}
        shifted = {i for i, key in enumerate(self.keys) if self.loop.shifts[i] > key.shifts}
        assert raised <= shifted
        assert {self.keys[i].group for i in shifted} == {self.keys[i].group for i in raised}
        for i, (key, phase) in enumerate(zip(self.keys, self.loop.phase.tolist(), strict=True)):
            if key.checking and phase != Phase.CHECK and not any(alarm.row == i for alarm in alarms):
                key.call_off()
            elif key.checking and phase != Phase.CHECK:
                assert [alarm.anew for alarm in alarms if alarm.row == i] == [i in shifted]
                key.checked(self._recorded(i), anew=i in shifted)
                shifted.discard(i)
            elif key.checking and key.turned and not self.loop.checks.turns[i].any():
                key.check_again()
            elif phase == Phase.CHECK and not key.checking:
                key.check(self._recorded(i))
        for alarm in alarms:
            assert alarm.sample == -1 or (row[alarm.sample] == alarm.row and not late[alarm.sample])
        for i in shifted:
            assert self.keys[i].phase != Phase.BASELINE
            self.keys[i].shift()
        for i, key in enumerate(self.keys):
            key.hopeless = key.shifts > 0 and bool(self.loop.evidence.ratio(np.array([i])).min() < -check.HOPELESS)
        self._phases_follow_each_other_as_they_may()
        event(f"keys that alarmed: {min(len(raised), 2)}, that began anew beside them: {len(shifted) > len(raised)}")

    def _decided(self, due: Any) -> None:
        valid = part(due.observation[due.draw], "valid_channels") > 0
        chunks = part(due.observation[due.draw], "valid_chunks") > 0
        drawn = []
        for channels, of_chunks in zip(valid, chunks, strict=True):
            # Few pairs, so that some are met again.
            pair = self.rng.choice(np.flatnonzero(channels[:4].any(-1)))
            drawn.append(
                flat_action(
                    pair,
                    self.rng.choice(np.flatnonzero(channels[pair])[:2]),
                    self.rng.choice(np.flatnonzero(of_chunks[pair])[:2]),
                )
            )
        actions = due.actions(np.array(drawn, np.int64))
        allowed = self.loop.allowed(due.row)
        for i, (row, action) in enumerate(zip(due.row.tolist(), actions.tolist(), strict=True)):
            assert action == OWN_ACTION or allowed[i].ravel()[action]
            key = self.keys[row]
            compares = 0 <= key.decisions - LEARNING["draws"] < LEARNING["compares"]
            # What compares may be tried for the first time, and what a key that is near has measured often.
            found = any(key.group == near.group and near.recorded[action] >= 4 for near in self.keys)
            assert due.draw[i] or action == OWN_ACTION or key.recorded[action] or compares or found
            key.decide(action)
            assert due.takes[i] == self.keys[row].takes
        self.loop.decide(due.row, actions)
        self._phases_follow_each_other_as_they_may()

    def _recorded(self, row: int) -> Counter[int]:
        samples = self.loop.evidence.samples[row]
        return Counter({int(a): int(samples[a]) for a in np.flatnonzero(samples)})

    # -- what must hold --

    def _phases_follow_each_other_as_they_may(self) -> None:
        for key, phase in zip(self.keys, self.loop.phase.tolist(), strict=True):
            assert phase == key.last_phase or (key.last_phase, phase) in EDGES
            key.last_phase = Phase(phase)

    @invariant()
    def keys_are_where_they_should_be(self) -> None:
        loop = self.loop
        assert loop.keys.identity.tolist() == [key.identity for key in self.keys]
        assert loop.wanted.tolist() == [key.wanted for key in self.keys]
        assert loop.phase.tolist() == [key.phase for key in self.keys]
        assert loop.decisions.tolist() == [key.decisions for key in self.keys]
        assert loop.shifts.tolist() == [key.shifts for key in self.keys]
        need = [0 if key.over else key.takes - key.pending for key in self.keys]
        assert loop.need.tolist() == need
        assert min(need, default=0) >= 0

    @invariant()
    def every_sample_is_accounted_for(self) -> None:
        loop = self.loop
        assert loop.measured.tolist() == [key.observed for key in self.keys]
        assert loop.late == self.forgotten_late + sum(key.late for key in self.keys)
        for row, key in enumerate(self.keys):
            assert key.observed == key.used + key.late + key.pending + key.lost
            assert self._recorded(row) == +key.recorded

    @invariant()
    def numbers_are_numbers(self) -> None:
        evidence = self.loop.evidence
        measured = np.array([key.shifts > 0 or key.recorded[OWN_ACTION] > 0 for key in self.keys], np.bool_)
        assert (np.isfinite(evidence.baseline) == measured).all()
        assert np.isfinite(self.loop.due().observation).all()


Interleavings.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, phases=WITHOUT_SHRINKING
)
TestInterleavings = Interleavings.TestCase
