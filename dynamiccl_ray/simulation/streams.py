"""Training without a job: the control loop over many keys of many scenarios, one NumPy call per decision for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.agent.observation import encode_context
from dynamiccl_ray.agent.reward import Floats, Reward, total
from dynamiccl_ray.arrays import Bool, Float32, Int64
from dynamiccl_ray.config.control import Control, Explore, Trigger
from dynamiccl_ray.control.columns import nothing_expected
from dynamiccl_ray.control.loop import Keys, Loop, Measured, salt_of
from dynamiccl_ray.control.watch import OWN_SHARE
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import N_PAIRS
from dynamiccl_ray.simulation.rewards import StreamRewards
from dynamiccl_ray.simulation.scenario import Scenario

# Nothing drifts within an episode, and all of it is drawn: a key's own detector has no alarm in 1e100 samples.
_NO_ALARMS: Final = Trigger(arl0=OWN_SHARE * 1e100)
_NO_LIMIT: Final = Explore(max_regret=1)
_AS_GOOD: Final = 0.002
# A decision is measured by up to so many times the collectives that it takes, by factors of 2: runs differ in how busy
# they are.
_BUSIER: Final = 8
# What has been measured before an episode is mostly what was good, with a softmax of these temperatures over log times.
_TEMPERATURES: Final = (0.02, 0.5)
# Decisions that were drawn before a shift, and collectives of the best action after them.
_DRAWN: Final = 96
_EXPLOITED: Final = 100


def keys_of(scenario: Scenario, group: int = 0) -> Keys:
    """A scenario's keys, as those of one communicator."""
    n = len(scenario.nbytes)
    valid = scenario.valid.reshape(n, N_PAIRS, N_CHANNELS, N_CHUNKS)
    numbers = [key_of(c, b, False) for c, b in zip(scenario.collective.tolist(), scenario.nbytes.tolist(), strict=True)]
    earlier = nothing_expected(n) if scenario.earlier is None else scenario.earlier
    return Keys(
        group=np.full(n, group),
        identity=np.arange(n, dtype=np.uint64) + np.uint64(group << 32),
        salt=salt_of(numbers, scenario.context.topology.ranks, scenario.nodes),
        collective=scenario.collective,
        nbytes=scenario.nbytes,
        pipelined=np.zeros(n, np.bool_),
        cost=scenario.cost,
        channels=np.asarray(valid.any(-1)),
        # Which chunks fit depends on the protocol alone, so channels and chunks can be masked apart.
        chunks=np.asarray(valid.any(2)),
        context=np.tile(encode_context(scenario.context), (n, 1)),
        prior=nothing_expected(n) if scenario.prior is None else scenario.prior,
        earlier=earlier,
        lead=-np.nan_to_num(earlier).min((1, 2), initial=0.0),
        noise=np.full(n, np.nan, np.float32),
    )


class Simulation:
    """Streams over some scenarios: each key of each is a stream of its own.

    An episode is one sequence of decisions that are drawn, the first of a learning phase: after the baseline, or after
    a shift, when what was measured before it is a hint.
    """

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        *,
        control: Control,
        seed: int,
        reward: Reward | None = None,
        shifted: float = 0.0,
    ) -> None:
        """``shifted`` is the share of episodes that begin after a shift, where a scenario has several phases.
        ``reward`` has the weights; None: their defaults.
        """
        learning = control.learning.model_copy(update={"heat": 0.0})
        self.control: Final = control.model_copy(
            update={"trigger": _NO_ALARMS, "explore": _NO_LIMIT, "learning": learning}
        )
        self.epochs: Final = min(control.learning.sequence, control.learning.draws)
        self._shifted: Final = shifted
        self._rng: Final = np.random.default_rng(seed)
        counts = [len(s.nbytes) for s in scenarios]
        self._scenarios: Final = len(scenarios)
        self._scenario: Final = np.repeat(np.arange(len(scenarios)), counts)
        self._rows: Final = np.arange(len(self._scenario))
        self._keys: Final = Keys.join([keys_of(scenario, i) for i, scenario in enumerate(scenarios)])
        self.nbytes: Final = self._keys.nbytes
        """(B,) of each stream's key."""
        self._sigma: Final = np.concatenate([s.sigma for s in scenarios])
        # (phases x streams, actions): a row per stream and phase, phases of a stream next to each other.
        self._log_us: Final = np.concatenate(
            [np.log(s.flat_us).transpose(1, 0, 2).reshape(-1, s.flat_us.shape[-1]) for s in scenarios]
        )
        phases = np.array([len(s.starts) for s in scenarios])
        self._phases: Final = phases[self._scenario]
        self._first: Final = np.concatenate([[0], np.cumsum(self._phases)[:-1]])
        self._teacher: Final = _teach(self._log_us)
        self._rewards: Final = StreamRewards(reward or Reward(), scenarios)
        self.terms: Mapping[str, Floats] = {}
        """Of the last step's reward, (B,) each."""
        self.loop = Loop(self.control)
        self._due = self.loop.due()
        self._phase = np.zeros(len(self), np.int64)
        self._busier = 1

    def __len__(self) -> int:
        return len(self._scenario)

    def reset(self) -> Float32:
        """Begins an episode on every stream: observations (B, SIZE)."""
        rng, n = self._rng, self._scenarios
        self.loop = Loop(self.control)
        self.loop.grow(self._keys)
        self._busier = round(2 ** rng.uniform(0, np.log2(_BUSIER)))
        first = rng.integers(1 << 30, size=n)[self._scenario] % self._phases
        onward = 1 + rng.integers(1 << 30, size=n)[self._scenario] % np.maximum(1, self._phases - 1)
        shifted = (rng.random(n) < self._shifted)[self._scenario] & (self._phases > 1)
        self._phase = first
        self._measure_own()
        if shifted.any():
            self._remember(np.flatnonzero(shifted))
            self._exploited(np.flatnonzero(shifted))
            self._phase = np.where(shifted, (first + onward) % self._phases, first)
            self.loop.shift(np.flatnonzero(shifted))
            self._measure_own(shifted)
        self._due = self.loop.due()
        return self._due.observation

    def step(self, actions: Int64) -> tuple[Float32, Float32]:
        """One decision of every stream, (B, 3): the next observations (B, SIZE) and rewards (B,), see ``reward.py``."""
        decided = self._due.actions(flat_action(*actions.T))
        baseline, known = self.loop.evidence.baseline.copy(), self._due.fixed
        self.loop.decide(self._rows, decided)
        self._observe(self._rows, self.control.learning.draw_samples * self._busier)
        self._due = self.loop.due()
        log_us = self._log_us[self._first + self._phase]
        found = log_us[self._rows, known] - log_us[self._rows, self._due.fixed]
        self.terms = self._rewards.terms(self._due.outcome, decided, baseline, found)
        return self._due.observation, np.asarray(total(self.terms), np.float32)

    def teacher(self) -> Int64:
        """(B, 3) what a policy that knew every time would choose now; see ``_teach``."""
        return np.stack(action_parts(self._teacher[self._first + self._phase]), -1)

    def clean_us(self, actions: Int64) -> tuple[Float32, Float32, Float32]:
        """Times (B,) without noise, in the phase in force: of these actions (B, 3), of NCCL's own, of the best."""
        row = self._first + self._phase
        log_us = self._log_us[row]
        best = np.nanmin(log_us, -1)
        return np.exp(self._log_us[row, flat_action(*actions.T)]), np.exp(log_us[:, OWN_ACTION]), np.exp(best)

    def _observe(self, rows: Int64, samples: int) -> None:
        """So many collectives of some streams, under what is wanted."""
        row = np.tile(rows, samples)
        action = self.loop.wanted[row]
        noise = self._rng.standard_normal(len(row)) * self._sigma[row, action]
        log_us = self._log_us[(self._first + self._phase)[row], action] + noise
        self.loop.observe(Measured(row=row, action=action, log_us=log_us, skew=np.zeros(len(row))))

    def _measure_own(self, streams: Bool | None = None) -> None:
        rows = self._rows if streams is None else np.flatnonzero(streams)
        self._observe(rows, self.control.learning.baseline_samples)

    def _remember(self, rows: Int64) -> None:
        """What some streams have measured while they learned before a shift: actions that looked good, mostly."""
        log_us = self._log_us[(self._first + self._phase)[rows]]
        low, high = np.log(_TEMPERATURES)
        temperature = np.exp(self._rng.uniform(low, high, len(rows)))[:, None]
        likely = np.nan_to_num(np.exp((np.nanmin(log_us, -1, keepdims=True) - log_us) / temperature)).cumsum(-1)
        uniform = self._rng.random((len(rows), _DRAWN)) * likely[:, -1:]
        drawn = np.stack([np.searchsorted(*row, side="right") for row in zip(likely, uniform, strict=True)])
        for actions in drawn.T:
            self._book(rows, actions, self.control.learning.draw_samples * self._busier)

    def _exploited(self, rows: Int64) -> None:
        """The best of these streams has been in force for a while."""
        best = np.nanargmin(self._log_us[(self._first + self._phase)[rows]], -1)
        self._book(rows, best, _EXPLOITED)

    def _book(self, rows: Int64, actions: Int64, samples: int) -> None:
        """A decision that was taken before the episode."""
        sigma = self._sigma[rows, actions]
        mean = self._log_us[(self._first + self._phase)[rows], actions]
        mean = mean + self._rng.standard_normal(len(rows)) * sigma / np.sqrt(samples)
        # A chi-square, of no freedom for one sample.
        square = sigma**2 * 2 * self._rng.standard_gamma((samples - 1) / 2, len(rows))
        self.loop.evidence.record(rows, actions, np.full(len(rows), float(samples)), mean, square)
        self.loop.wanted[rows] = actions


def _teach(log_us: Float32) -> Int64:
    """The first action of each row (R, A) that is as good as the best to 0.2 %.

    The first are NCCL's own choice, its own channels and its own chunk: what is not worth changing is left alone, and
    what makes no difference is decided alike everywhere.
    """
    return np.asarray((log_us <= np.nanmin(log_us, -1, keepdims=True) + _AS_GOOD).argmax(-1), np.int64)
