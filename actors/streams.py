"""From decisions and rewards to the episodes that PPO learns from, one stream per key."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from dynamiccl_ray.actors.episodes import Experience
from dynamiccl_ray.actors.messages import CommContext
from dynamiccl_ray.agent import observation, policy
from dynamiccl_ray.arrays import Float32, Int64
from dynamiccl_ray.control.drawing import Drawn

OBSERVATION_SPACE = gym.spaces.Box(-4.0, 4.0, (observation.SIZE,), np.float32)
ACTION_SPACE = gym.spaces.MultiDiscrete(list(policy.ACTION_HEADS))


@dataclass(eq=False)
class _Decision:
    """What was drawn for a key, and waits for its reward."""

    ordinal: int
    heads: Int64
    log_prob: float
    state: dict[str, Float32]
    """After it, (layers, hidden)."""


@dataclass(eq=False)
class _Stream:
    """One key's episode in the making."""

    of: dict[str, int]
    """Communicator, key and ordinal, as in ``Experience``."""
    observations: list[Float32]
    heads: list[Int64] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    states: list[dict[str, Float32]] = field(default_factory=list)
    open: _Decision | None = None

    def judge(self, ordinal: int, reward: float, after: Float32) -> bool:
        """The key needs decision ``ordinal``, so the one before it is over; false if the stream ends before that: a
        shift has cut it short, or it was not this stream's.
        """
        decision, self.open = self.open, None
        if decision is None or decision.ordinal != ordinal - 1 or not np.isfinite(reward):
            return False
        self.heads.append(decision.heads)
        self.rewards.append(reward)
        self.log_probs.append(decision.log_prob)
        self.states.append(decision.state)
        self.observations.append(after)
        return True

    def episode(self) -> SingleAgentEpisode:
        return SingleAgentEpisode(
            observations=self.observations,
            actions=self.heads,
            rewards=self.rewards,
            infos=[self.of, *({} for _ in self.heads)],
            truncated=True,
            extra_model_outputs={
                Columns.ACTION_LOGP: self.log_probs,
                # Only PPO's KL term, which is off, would look into these.
                Columns.ACTION_DIST_INPUTS: np.zeros((len(self.heads), 1), np.float32),
                Columns.STATE_OUT: self.states,
            },
            observation_space=OBSERVATION_SPACE,
            action_space=ACTION_SPACE,
            len_lookback_buffer=0,
        ).to_numpy()


def experience(episode: SingleAgentEpisode) -> Experience:
    """What a stream's episode holds, without RLlib."""
    return Experience(
        **episode.get_infos(0),
        observations=np.asarray(episode.get_observations(), np.float32),
        heads=np.asarray(episode.get_actions(), np.int64),
        log_probs=np.asarray(episode.get_extra_model_outputs(Columns.ACTION_LOGP), np.float32),
        rewards=np.asarray(episode.get_rewards(), np.float32),
    )


class Streams:
    """One stream per key that is learning; an episode is one sequence of its decisions.

    ``mine`` says which keys this runner returns: all runners decide the same.
    """

    def __init__(self, mine: Callable[[int], bool], sequence: int) -> None:
        self._mine, self._sequence = mine, sequence
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._done: list[_Stream] = []

    def advance(self, comm: CommContext, drawn: Drawn) -> None:
        """What was due in an epoch's context: rewards for the decisions that are over, and what was drawn next."""
        due = comm.due
        at = np.cumsum(due.draw) - 1
        for row, key in enumerate(comm.keys[due.row].tolist()):
            if not self._mine(key):
                continue
            ordinal, stream = int(due.ordinal[row]), self._streams.get((comm.comm, key))
            if stream is not None:
                if stream.open is not None and stream.open.ordinal == ordinal:
                    continue  # asked again: what was drawn first was never in force, and this is the same
                going_on = stream.judge(ordinal, float(comm.reward[row]), due.observation[row])
                if not going_on or ordinal % self._sequence == 0 or not due.draw[row]:
                    self._end(comm.comm, key)
            if not due.draw[row]:
                continue
            if (comm.comm, key) not in self._streams:
                of = {"comm": comm.comm, "key": key, "ordinal": ordinal}
                self._streams[comm.comm, key] = _Stream(of=of, observations=[due.observation[row]])
            self._streams[comm.comm, key].open = _Decision(
                ordinal=ordinal,
                heads=drawn.heads[at[row]],
                log_prob=float(drawn.log_prob[at[row]]),
                state={name: h[at[row]] for name, h in drawn.states.items()},
            )

    def keep(self, comms: Collection[int]) -> None:
        """Communicators that are no more take what was open of their keys with them."""
        for comm, key in [of for of in self._streams if of[0] not in comms]:
            self._end(comm, key)

    def _end(self, comm: int, key: int) -> None:
        stream = self._streams.pop((comm, key))
        if stream.heads:
            self._done.append(stream)

    def episodes(self) -> list[SingleAgentEpisode]:
        """Those that have come to their end since the last call."""
        done, self._done = self._done, []
        return [stream.episode() for stream in done]
