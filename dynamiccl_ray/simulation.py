"""Training without a job: many keys of many scenarios decided at once, one NumPy call per step for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.actions import OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.knowledge import Keys, Knowledge
from dynamiccl_ray.observation import Floats, encode, encode_context
from dynamiccl_ray.reward import Reward, total
from dynamiccl_ray.scenario import Scenario
from dynamiccl_ray.stream_rewards import StreamRewards

Int64 = NDArray[np.int64]

# Collectives that measure NCCL's own choice before anything is tried.
BASELINE_SAMPLES: Final = 4
# After a shift, logits are divided by 1 + this, and it shrinks by the factor every epoch.
HEAT: Final = 1.0
COOLING: Final = 0.7
_AS_GOOD: Final = 0.002
# An epoch measures up to so many times the collectives, by factors of 2: runs differ in how busy they are.
_BUSIER: Final = 8
# Standard deviation of the log of the noise as it is estimated.
_NOISE_SPREAD: Final = 0.15


class Simulation:
    """Streams over some scenarios: each key of each is a stream of its own.

    An episode is ``epochs`` decisions. It begins in a random phase of its scenario, and where there are several, every
    second one goes over into another phase at a random epoch. What the policy learns of a shift is what the trigger
    would tell it: the next epoch begins with NCCL's own choice measured anew.
    """

    def __init__(
        self, scenarios: Sequence[Scenario], *, epochs: int, collectives: int, seed: int, reward: Reward | None = None
    ) -> None:
        """Of a key ``collectives`` or more are measured in each epoch. ``reward`` has the weights; None: their
        defaults.
        """
        self.epochs: Final = epochs
        self._least: Final = collectives
        self._collectives = np.zeros(0, np.float32)
        self._rng: Final = np.random.default_rng(seed)
        counts = [len(s.nbytes) for s in scenarios]
        self._scenario: Final = np.repeat(np.arange(len(scenarios)), counts)
        self.keys: Final = Keys(
            group=self._scenario,
            collective=np.concatenate([s.collective for s in scenarios]),
            nbytes=np.concatenate([s.nbytes for s in scenarios]),
            cost=np.concatenate([s.cost for s in scenarios]),
            valid=np.concatenate([s.valid.reshape(s.times_us.shape[1:]) for s in scenarios]),
        )
        contexts = [encode_context(s.context) for s in scenarios]
        self._context: Final = np.repeat(np.stack(contexts), counts, 0)
        self._sigma: Final = np.repeat([s.sigma for s in scenarios], counts).astype(np.float32)
        # (phases x streams, actions): a row per stream and phase, phases of a stream next to each other.
        self._log_us: Final = np.concatenate(
            [np.log(s.flat_us).transpose(1, 0, 2).reshape(-1, s.flat_us.shape[-1]) for s in scenarios]
        )
        phases = np.array([len(s.starts) for s in scenarios])
        self._phases: Final = phases[self._scenario]
        self._first: Final = np.concatenate([[0], np.cumsum(self._phases)[:-1]])
        self._teacher: Final = _teach(self._log_us)
        self.knowledge: Final = Knowledge(self.keys)
        self._rewards: Final = StreamRewards(reward or Reward(), scenarios)
        self.terms: Mapping[str, NDArray[np.floating[Any]]] = {}
        """Of the last step's reward, (B,) each."""
        self._phase = np.zeros(len(self.keys), np.int64)
        self._shift_at = np.full(len(self.keys), epochs)
        self._next = self._phase.copy()
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.keys)

    def reset(self) -> Floats:
        """Begins an episode on every stream: observations (B, SIZE)."""
        n = int(self._scenario[-1]) + 1
        rng = self._rng
        first = rng.integers(1 << 30, size=n)[self._scenario] % self._phases
        onward = 1 + rng.integers(1 << 30, size=n)[self._scenario] % np.maximum(1, self._phases - 1)
        shifts = (rng.random(n) < 0.5)[self._scenario] & (self._phases > 1)
        when = rng.integers(2, max(3, self.epochs - 1), size=n)[self._scenario]
        self._phase, self._next = first, (first + onward) % self._phases
        self._shift_at = np.where(shifts, when, self.epochs)
        self._epoch = 0
        busier = 2 ** rng.uniform(0, np.log2(_BUSIER), n)[self._scenario]
        self._collectives = np.round(self._least * busier).astype(np.float32)
        estimated = self._sigma * np.exp(_NOISE_SPREAD * rng.standard_normal(len(self), np.float32))
        self.knowledge.noise = np.maximum(estimated, np.float32(0.005))
        everywhere, baseline = np.ones(len(self), np.bool_), self._measure(self._own(), BASELINE_SAMPLES)
        self.knowledge.begin(everywhere, baseline, BASELINE_SAMPLES)
        self._rewards.begin(baseline)
        return self._observe()

    def step(self, actions: Int64) -> tuple[Floats, Floats]:
        """One epoch under actions (B, 3): the next observations (B, SIZE) and rewards (B,), see ``reward.py``."""
        flat = flat_action(actions[:, 0], actions[:, 1], actions[:, 2])
        measured = self._measure(flat, self._collectives)
        self.terms = self._rewards.terms(flat, measured, self.knowledge.baseline)
        self.knowledge.record(actions, measured, self._collectives, COOLING)
        self._epoch += 1
        shifting = self._shift_at == self._epoch
        if shifting.any():
            self._phase = np.where(shifting, self._next, self._phase)
            baseline = self._measure(self._own(), BASELINE_SAMPLES)
            self.knowledge.shift(shifting, baseline, BASELINE_SAMPLES, HEAT)
            self._rewards.shift(shifting, baseline)
        return self._observe(), np.asarray(total(self.terms), np.float32)

    def teacher(self) -> Int64:
        """(B, 3) what a policy that knew every time would choose now; see ``_teach``."""
        return np.stack(action_parts(self._teacher[self._first + self._phase]), -1)

    def clean_us(self, actions: Int64) -> tuple[Floats, Floats, Floats]:
        """Times (B,) without noise, in the phase in force: of these actions, of NCCL's own, of the best."""
        row = self._first + self._phase
        flat = flat_action(actions[:, 0], actions[:, 1], actions[:, 2])
        log_us = self._log_us[row]
        best = np.nanmin(log_us, -1)
        return np.exp(self._log_us[row, flat]), np.exp(log_us[:, OWN_ACTION]), np.exp(best)

    def _own(self) -> Int64:
        return np.full(len(self), OWN_ACTION)

    def _measure(self, flat: Int64, collectives: int | Floats) -> Floats:
        """Mean log time of so many collectives."""
        noise = self._rng.standard_normal(len(self), np.float32) * self._sigma / np.sqrt(np.float32(collectives))
        return np.asarray(self._log_us[self._first + self._phase, flat] + noise)

    def _observe(self) -> Floats:
        return encode(self._context, self.knowledge.view())


def _teach(log_us: Floats) -> Int64:
    """The first action of each row (R, A) that is as good as the best to 0.2 %.

    The first are NCCL's own choice, its own channels and its own chunk: what is not worth changing is left alone, and
    what makes no difference is decided alike everywhere.
    """
    return np.asarray((log_us <= np.nanmin(log_us, -1, keepdims=True) + _AS_GOOD).argmax(-1), np.int64)
