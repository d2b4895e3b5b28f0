"""Decisions that are drawn from the policy: the same wherever they are drawn, from the same weights and keys.

A draw depends on the seed, the key and how many decisions it has had, and on nothing else: not on when it is made, nor
on what other keys are decided beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from dynamiccl_ray.actions import flat_action
from dynamiccl_ray.agent import policy
from dynamiccl_ray.arrays import Bool, Float32, Int64, UInt64
from dynamiccl_ray.control.loop import Due
from dynamiccl_ray.control.mixing import gumbel, mix


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """D keys, those of ``Due`` that the policy decides."""

    heads: Int64
    """(D, 3) indices into the heads."""
    log_prob: Float32
    """(D,)"""
    entropy: Float32
    """(D,) nats."""
    states: dict[str, Float32]
    """Recurrent state after each decision, (D, layers, hidden)."""

    @property
    def actions(self) -> Int64:
        """(D,) flat."""
        return flat_action(*self.heads.T)


_KEPT: Final = 4096
"""Keys of which a recurrent state is kept beside those that are being drawn for: of others, what was drawn last went
long ago, or they are no more. Where the state was needed after all, it begins anew."""


class Drawer:
    """Draws from ``net``, which is only read, and keeps each key's recurrent state from decision to decision."""

    def __init__(self, net: policy.PolicyNetwork, *, seed: int, sequence: int) -> None:
        """The state begins anew every ``sequence`` decisions."""
        self._net, self._seed, self._sequence = net, seed, sequence
        # By key, in the order of identities: the last decision, and the state before and after it.
        self._identity = np.zeros(0, np.uint64)
        self._last = np.zeros((0, 2), np.int64)
        self._drawn_at = np.zeros(0, np.int64)
        self._draws = 0
        initial = net.initial_state()
        self._before = {name: h.unsqueeze(0)[:0] for name, h in initial.items()}
        self._after = dict(self._before)
        self._initial = initial

    def draw(self, due: Due, *, greedy: bool = False) -> Drawn:
        """For those that are to be drawn; asked again for the same decision, the same. ``greedy``: the likeliest."""
        chosen = due.draw
        if not chosen.any():
            return _nothing(self._initial)
        identity, of = due.identity[chosen], np.stack([due.shifts[chosen], due.ordinal[chosen]], -1)
        order = np.argsort(identity)
        state = self._recall(identity[order], of[order])
        back = np.argsort(order)
        before = {name: h[torch.from_numpy(back)] for name, h in state.items()}
        x = torch.from_numpy(due.observation[chosen]).unsqueeze(1)
        noise = None if greedy else torch.from_numpy(self.noise(due.salt[chosen], of)).unsqueeze(1)
        with torch.no_grad():
            features, after = self._net.features(x, before)
            heads, log_prob, entropy = (y[:, 0].numpy() for y in policy.decide(self._net, x, features, noise))
        self._remember(identity[order], of[order], state, {k: h[torch.from_numpy(order)] for k, h in after.items()})
        return Drawn(
            heads=heads, log_prob=log_prob, entropy=entropy, states={name: h.numpy() for name, h in after.items()}
        )

    def noise(self, salt: UInt64, of: Int64) -> Float32:
        """(D, policy.N_NOISE) for decisions ``of`` (D, 2), shifts and ordinals, of keys ``salt`` (D,)."""
        shifts, ordinal = of.astype(np.uint64).T
        return gumbel(mix(salt ^ mix(mix(shifts + np.uint64(self._seed << 32)) + ordinal)), policy.N_NOISE)

    def _recall(self, identity: UInt64, of: Int64) -> dict[str, torch.Tensor]:
        """The state before decisions ``of`` (D, 2) of keys in ascending order."""
        at = np.searchsorted(self._identity, identity)
        at = np.where(at < len(self._identity), at, 0)
        state = {name: h.unsqueeze(0).repeat(len(identity), 1, 1) for name, h in self._initial.items()}
        if not len(self._identity):
            return state
        there = (self._identity[at] == identity) & (self._last[at, 0] == of[:, 0]) & (of[:, 1] % self._sequence != 0)
        for step, kept in ((1, self._after), (0, self._before)):
            rows = np.flatnonzero(there & (self._last[at, 1] == of[:, 1] - step))
            for name in state:
                state[name][rows] = kept[name][at[rows]]
        return state

    def _remember(
        self, identity: UInt64, of: Int64, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
    ) -> None:
        self._draws += 1
        others: Bool = ~np.isin(self._identity, identity)
        if np.count_nonzero(others) > _KEPT:
            at = np.flatnonzero(others)
            others[at[np.argsort(self._drawn_at[at], kind="stable")[:-_KEPT]]] = False
        merged = np.concatenate([self._identity[others], identity])
        order = np.argsort(merged)
        self._identity = merged[order]
        self._last = np.concatenate([self._last[others], of])[order]
        self._drawn_at = np.append(self._drawn_at[others], np.full(len(identity), self._draws))[order]
        for kept, new in ((self._before, before), (self._after, after)):
            for name in kept:
                kept[name] = torch.cat([kept[name][torch.from_numpy(others)], new[name]])[torch.from_numpy(order)]


def _nothing(initial: dict[str, torch.Tensor]) -> Drawn:
    none = np.zeros(0, np.float32)
    states = {name: np.zeros((0, *h.shape), np.float32) for name, h in initial.items()}
    return Drawn(heads=np.zeros((0, 3), np.int64), log_prob=none, entropy=none, states=states)
