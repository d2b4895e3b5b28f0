"""A trained policy beside the baselines: decides epoch by epoch, from what it has measured itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch

from dynamiccl_ray import policy
from dynamiccl_ray.actions import OWN_ACTION, action_parts, flat_action
from dynamiccl_ray.baselines.method import Bool, Factory, Float64, Int64, Method
from dynamiccl_ray.evidence import noise_of, worse_than_own
from dynamiccl_ray.experiment import Guardrail, Trigger
from dynamiccl_ray.knowledge import Keys, Knowledge
from dynamiccl_ray.observation import KeyView, encode, encode_context
from dynamiccl_ray.scenario import Scenario
from dynamiccl_ray.simulation import BASELINE_SAMPLES, COOLING
from dynamiccl_ray.trigger import Cusum

DRAWN, EPOCH = 2, 8
"""Collectives of each key between two decisions: while they are drawn, and after that."""
SETTLED: Final = 96
"""Decisions after which nothing new is tried until the next shift. Until then they are drawn from the policy, so that
what it holds likely is measured; its certainty comes from a model, so that it is taken with a grain of salt."""
COMPARED: Final = 24
"""Further decisions, in which what may still be the best is measured in turn."""
_HEAT: Final = 0.5
# Collectives of an action before drift is looked for in further ones.
_KNOWN: Final = 8
# A time counts as no more than so many standard deviations above the fastest of its epoch.
_OUTLIER: Final = 4.0
# Decisions after which the recurrent state begins anew, as in training and in the online loop.
_ROUND: Final = 32


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
    drawn for ``SETTLED`` decisions; after ``COMPARED`` more, what was measured to be the best. A drift detector watches
    every key for times that are not what is known of its action. An alarm of one key means that the network has
    changed: NCCL's own choice is measured anew, and older evidence becomes a hint. The guardrail forbids what was worse
    than NCCL's own choice with confidence, and what was measured better with confidence goes before what the policy
    likes.
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator, net: policy.PolicyNetwork) -> None:
        super().__init__(scenario, rng)
        self._net: Final = net
        self._draws: Final = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
        self._knowledge: Final = Knowledge(
            Keys(
                group=np.zeros(self.n_keys, np.int64),
                collective=scenario.collective,
                nbytes=scenario.nbytes,
                cost=scenario.cost,
                valid=scenario.valid.reshape(scenario.times_us.shape[1:]),
            )
        )
        self._context: Final = encode_context(scenario.context)
        self._guardrail: Final = Guardrail()
        self._cusum: Final = Cusum(Trigger().arl0)
        self._cusum.grow(self.n_keys)
        self._actions: Int64 = np.full(self.n_keys, OWN_ACTION)
        self._log_us: list[Float64] = []
        self._baseline, self._epoch = True, DRAWN
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
        if len(self._log_us) == (BASELINE_SAMPLES if self._baseline else self._epoch):
            log_us = np.stack(self._log_us)
            self._log_us.clear()
            self._end(log_us)

    def _end(self, log_us: Float64) -> None:
        """An epoch, or a baseline, of (samples, K) log times is over."""
        # What held one collective up says nothing of its action.
        log_us = np.minimum(log_us, log_us.min(0) + _OUTLIER * self._knowledge.noise)
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
            self._knowledge.record(np.stack(action_parts(self._actions), -1), mean, len(log_us), COOLING)
        self._sum[self.rows, self._actions] += log_us.sum(0)
        self._samples[self.rows, self._actions] += len(log_us)
        self._square += ((log_us - log_us.mean(0)) ** 2).sum(0)
        self._freedom += len(log_us) - 1
        self._knowledge.noise = noise_of(self._square, self._freedom)
        self._decide()

    def _drifted(self, log_us: Float64) -> bool:
        # Against what is known of the very action: that another has another time is no drift.
        samples = self._samples[self.rows, self._actions]
        residual = log_us - self._sum[self.rows, self._actions] / np.maximum(samples, 1.0)
        known = np.flatnonzero(samples >= _KNOWN)
        return any(self._cusum.update(int(k), residual[:, k]) is not None for k in known)

    def _decide(self) -> None:
        view = self._knowledge.view()
        forbidden = worse_than_own(
            view.evidence, view.samples, view.noise, margin=self._guardrail.margin, least=self._guardrail.samples
        )
        view = replace(view, valid_channels=view.valid_channels & ~forbidden)
        if self._decisions % _ROUND == 0:
            self._state = {name: h.expand(self.n_keys, *h.shape) for name, h in self._net.initial_state().items()}
        drawing = self._decisions < SETTLED
        self._actions = self._drawn(view) if drawing else self._measured()
        self._decisions += 1
        self._epoch = DRAWN if drawing else EPOCH

    def _drawn(self, view: KeyView) -> Int64:
        """(K,) drawn from the policy; the best that was measured where that is better with confidence."""
        with torch.no_grad():
            obs = torch.from_numpy(encode(self._context, replace(view, heat=_HEAT))).unsqueeze(1)
            features, self._state = self._net.features(obs, self._state)
            drawn, _ = policy.sample(self._net, obs, features, self._draws)
        wanted = flat_action(*drawn[:, 0].numpy().T)
        best, contends = self._contenders()
        tried = self._samples[self.rows, wanted] > 0
        return np.asarray(np.where(tried & ~contends[self.rows, wanted], best, wanted))

    def _measured(self) -> Int64:
        """(K,) of what may still be the best, what was measured least; in the end the best."""
        best, contends = self._contenders()
        if self._decisions >= SETTLED + COMPARED:
            return best
        return np.asarray(np.where(contends, self._samples, np.inf).argmin(-1), np.int64)

    def _contenders(self) -> tuple[Int64, Bool]:
        """(K,) the best that was measured, and (K, A) what is not behind it with confidence."""
        samples = np.maximum(self._samples, 1.0)
        mean = np.where(self._samples > 0, self._sum / samples, np.inf)
        best = mean.argmin(-1)
        counted = 1 / samples + 1 / samples[self.rows, best][:, None]
        ahead = 2 * self._knowledge.noise[:, None] * np.sqrt(counted)
        return best, mean - mean[self.rows, best][:, None] <= ahead
