"""A trained policy beside the baselines: decides epoch by epoch, from what it has measured itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch

from dynamiccl_ray import policy
from dynamiccl_ray.baselines.method import Bool, Factory, Float64, Int64, Method
from dynamiccl_ray.experiment import Guardrail, Trigger
from dynamiccl_ray.knobs import OWN_PAIR
from dynamiccl_ray.knowledge import Keys, Knowledge
from dynamiccl_ray.observation import KeyView, encode, encode_context
from dynamiccl_ray.scenario import OWN_ACTION, Scenario, action_parts, flat_action
from dynamiccl_ray.simulation import BASELINE_SAMPLES, COOLING
from dynamiccl_ray.trigger import Cusum

EPOCH: Final = 8
"""Collectives of each key between two decisions."""
SETTLED: Final = 48
"""Decisions after which nothing new is tried until the next shift. Until then they are drawn from the policy, so that
what it holds likely is measured; its certainty comes from a model and is halved."""
_CERTAINTY: Final = 0.5
# As in the online loop: no estimate of the noise is taken to be smaller.
_LEAST_VARIANCE: Final = 1e-4


def learned(net: policy.PolicyNetwork) -> Factory:
    """How a run makes a ``LearnedPolicy`` that decides by ``net``, which is only read.

    From here on PyTorch computes with one thread in this process: networks this small lose a hundredfold to more where
    cores are shared.
    """
    torch.set_num_threads(1)
    return lambda scenario, rng: LearnedPolicy(scenario, rng, net)


class LearnedPolicy(Method):
    """The product's loop without updates of the weights.

    First NCCL's own choice is measured, for ``BASELINE_SAMPLES`` collectives; then the policy chooses, once an epoch:
    drawn for ``SETTLED`` decisions, after that what it holds most likely to be best. A drift detector watches every
    key while its action stays the same. An alarm of one key means that the network has changed: NCCL's own choice is
    measured anew, and older evidence becomes a hint. The guardrail forbids what was worse than NCCL's own choice with
    confidence, and what was measured better with confidence goes before what the policy likes.
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator, net: policy.PolicyNetwork) -> None:
        super().__init__(scenario, rng)
        self._net: Final = net
        self._draws: Final = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
        self._knowledge: Final = Knowledge(
            Keys(
                collective=scenario.collective,
                nbytes=scenario.nbytes,
                cost=scenario.cost,
                valid=scenario.valid.reshape(scenario.times_us.shape[1:]),
            )
        )
        self._context: Final = encode_context(scenario.context)
        self._state = {name: h.expand(self.n_keys, *h.shape) for name, h in net.initial_state().items()}
        self._guardrail: Final = Guardrail()
        self._cusum: Final = Cusum(Trigger().arl0)
        self._cusum.grow(self.n_keys)
        self._actions: Int64 = np.full(self.n_keys, OWN_ACTION)
        self._watched: Int64 = np.full(self.n_keys, -1)
        self._log_us: list[Float64] = []
        self._baseline = True
        # Since the last shift, by action.
        self._sum, self._samples = np.zeros(self.valid.shape), np.zeros(self.valid.shape)
        self._decisions = 0
        # Squared deviations within epochs, and their degrees of freedom: the noise without what the actions differ by.
        self._square, self._freedom = np.zeros(self.n_keys), 0
        self.alarms = 0
        """Shifts that were found."""

    def choose(self, step: int) -> Int64:
        return self._actions

    def observe(self, actions: Int64, time_us: Float64) -> None:
        self._log_us.append(np.log(time_us))
        if len(self._log_us) == (BASELINE_SAMPLES if self._baseline else EPOCH):
            log_us = np.stack(self._log_us)
            self._log_us.clear()
            self._end(log_us)

    def _end(self, log_us: Float64) -> None:
        """An epoch, or a baseline, of (samples, K) log times is over."""
        mean = log_us.mean(0).astype(np.float32)
        everywhere = np.ones(self.n_keys, np.bool_)
        if self._baseline:
            if self.alarms:
                self._knowledge.shift(everywhere, mean, BASELINE_SAMPLES, heat=0.0)
            else:
                self._knowledge.begin(everywhere, mean, BASELINE_SAMPLES)
            self._baseline = False
        elif self._drifted(log_us):
            # This epoch belongs to neither network, so nothing is learned from it.
            self.alarms += 1
            self._baseline = True
            self._cusum.reset()
            self._sum[:] = self._samples[:] = self._decisions = 0
            self._actions = np.full(self.n_keys, OWN_ACTION)
            return
        else:
            self._knowledge.record(np.stack(action_parts(self._actions), -1), mean, EPOCH, COOLING)
        self._sum[self.rows, self._actions] += log_us.sum(0)
        self._samples[self.rows, self._actions] += len(log_us)
        self._square += ((log_us - log_us.mean(0)) ** 2).sum(0)
        self._freedom += len(log_us) - 1
        self._decide()

    def _drifted(self, log_us: Float64) -> bool:
        # Another action has another time: that is no drift.
        self._cusum.reset(np.flatnonzero(self._actions != self._watched))
        self._watched = self._actions
        return any(self._cusum.update(k, log_us[:, k]) is not None for k in range(self.n_keys))

    def _decide(self) -> None:
        view = self._knowledge.view()
        view = replace(view, valid_channels=view.valid_channels & ~self._ruled_out(view))
        with torch.no_grad():
            obs = torch.from_numpy(encode(self._context, view)).unsqueeze(1)
            features, self._state = self._net.features(obs, self._state)
            logits = self._net.logits(obs, features)[:, 0]
            if self._decisions < SETTLED:
                actions, _ = policy.sample(logits * _CERTAINTY, self._draws)
            else:
                actions = policy.greedy(logits)
        self._decisions += 1
        self._actions = self._proven(flat_action(*actions.numpy().T))

    def _proven(self, wanted: Int64) -> Int64:
        """(K,) what the policy wants, or the best that was measured where that is better with confidence.

        What was not measured is tried only among the first decisions: the policy has learned from shorter episodes,
        and would now and then go on trying for ever.
        """
        mean = np.where(self._samples > 0, self._sum / np.maximum(self._samples, 1.0), np.inf)
        best = mean.argmin(-1)
        tried, samples = self._samples[self.rows, wanted] > 0, np.maximum(self._samples, 1.0)
        doubt = 2 * np.sqrt(
            self._square / self._freedom * (1 / samples[self.rows, best] + 1 / samples[self.rows, wanted])
        )
        ahead = mean[self.rows, wanted] - mean[self.rows, best] > doubt
        return np.asarray(np.where(ahead & (tried | (self._decisions > SETTLED)), best, wanted))

    def _ruled_out(self, view: KeyView) -> Bool:
        """(K, N_PAIRS, N_CHANNELS), as ``KeyBook`` does it."""
        variance = np.maximum(self._square / self._freedom, _LEAST_VARIANCE)[:, None, None]
        doubt = 2 * np.sqrt(variance / np.maximum(view.samples, 1.0))
        worse = (view.samples >= self._guardrail.samples) & (view.evidence - doubt > self._guardrail.margin)
        worse[:, OWN_PAIR, 0] = False
        return np.asarray(worse)
