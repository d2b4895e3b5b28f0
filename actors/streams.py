"""From decisions and rewards to the episodes that PPO learns from, one stream per key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from actors.messages import CommContext
from dynamiccl_ray import observation, policy

OBSERVATION_SPACE = gym.spaces.Box(-4.0, 4.0, (observation.SIZE,), np.float32)
ACTION_SPACE = gym.spaces.MultiDiscrete(list(policy.ACTION_HEADS))


@dataclass(eq=False)
class Decided:
    """One communicator's decisions of one epoch, K keys; see ``dynamiccl_ray.policy`` for shapes."""

    keys: npt.NDArray[np.int64]
    obs: npt.NDArray[np.float32]
    actions: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]
    states: dict[str, npt.NDArray[np.float32]]
    """Recurrent state after each decision, (K, layers, hidden)."""
    entropy: float | None
    learn: bool
    in_force: bool = False
    """Whether all ranks really used them."""


@dataclass(eq=False)
class _Stream:
    """One key's episode in the making."""

    observations: list[npt.NDArray[np.float32]]
    actions: list[npt.NDArray[np.int64]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    states: list[dict[str, npt.NDArray[np.float32]]] = field(default_factory=list)

    def episode(self) -> SingleAgentEpisode:
        return SingleAgentEpisode(
            observations=self.observations,
            actions=self.actions,
            rewards=self.rewards,
            infos=[{} for _ in self.observations],
            truncated=True,
            extra_model_outputs={
                Columns.ACTION_LOGP: self.log_probs,
                # Only PPO's KL term, which is off, would look into these.
                Columns.ACTION_DIST_INPUTS: np.zeros((len(self.actions), 1), np.float32),
                Columns.STATE_OUT: self.states,
            },
            observation_space=OBSERVATION_SPACE,
            action_space=ACTION_SPACE,
            len_lookback_buffer=0,
        ).to_numpy()


class Streams:
    """The streams of one round. ``mine`` says which keys this runner returns; all runners decided the same."""

    def __init__(self, mine: Callable[[int], bool]) -> None:
        self._mine = mine
        self._open: dict[tuple[int, int], _Stream] = {}
        self._closed: list[_Stream] = []

    def open(self, comm: int, decided: Decided) -> None:
        """Begins a stream for every key that has none."""
        for key, obs in zip(decided.keys, decided.obs, strict=True):
            if self._mine(int(key)):
                self._open.setdefault((comm, int(key)), _Stream(observations=[obs]))

    def close_step(self, comm: CommContext, decided: Decided) -> list[int]:
        """Adds the epoch's rewards, and returns the keys whose recurrent state begins anew.

        A decision that never came into force, or a key that did not run, has no reward: its stream ends before it and
        a new one begins, on every runner alike.
        """
        after = observation.encode(comm.context, comm.view)
        row_of = {int(key): i for i, key in enumerate(comm.keys)}
        anew = []
        for i, key in enumerate(decided.keys.tolist()):
            row = row_of[key]
            reward = comm.reward[row]
            valid = decided.in_force and bool(np.isfinite(reward))
            if not valid:
                anew.append(key)
            if not self._mine(key):
                continue
            stream = self._open[comm.comm, key]
            if not valid:
                self._closed.append(stream)
                self._open[comm.comm, key] = _Stream(observations=[after[row]])
                continue
            stream.actions.append(decided.actions[i])
            stream.rewards.append(float(reward))
            stream.log_probs.append(float(decided.log_probs[i]))
            stream.states.append({k: v[i] for k, v in decided.states.items()})
            stream.observations.append(after[row])
        return anew

    def episodes(self) -> list[SingleAgentEpisode]:
        """All streams that have at least one step."""
        return [s.episode() for s in (*self._closed, *self._open.values()) if s.actions]
