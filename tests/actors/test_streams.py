"""Episodes: each decision with the reward that was its own, in sequences as the policy lives them."""

from __future__ import annotations

import numpy as np
from made import comm_context, due

from dynamiccl_ray.actors.streams import Streams, experience
from dynamiccl_ray.agent.observation import SIZE
from dynamiccl_ray.arrays import Float32
from dynamiccl_ray.control.drawing import Drawn

SEQUENCE = 4


def drawn(pairs: list[int]) -> Drawn:
    n = len(pairs)
    return Drawn(
        heads=np.stack([pairs, np.zeros(n, int), np.zeros(n, int)], -1),
        log_prob=-np.array(pairs, np.float32),
        entropy=np.ones(n, np.float32),
        states={"h": np.array(pairs, np.float32).reshape(n, 1, 1)},
    )


def seen(value: float) -> Float32:
    return np.full((1, SIZE), value, np.float32)


class Key:
    """One key of one communicator, decision by decision."""

    def __init__(self, mine: bool = True) -> None:
        self.streams = Streams(lambda _: mine, SEQUENCE)

    def __call__(self, ordinal: int, pair: int, reward: float, *, draw: bool = True) -> None:
        """Decision ``ordinal`` is due, the one before it earned ``reward``; its observation is 10 times the ordinal."""
        of = due([ordinal], draw=[draw], observation=seen(10 * ordinal))
        comm = comm_context(keys=[7], due=of, reward=np.array([reward]))
        self.streams.advance(comm, drawn([pair] if draw else []))


def test_a_decision_and_its_reward_come_together_and_a_sequence_is_an_episode() -> None:
    key = Key()
    key(0, 3, np.nan)
    for ordinal in range(1, 5):
        key(ordinal, 3 + ordinal, ordinal / 10)
    (episode,) = key.streams.episodes()
    assert episode.get_actions()[:, 0].tolist() == [3, 4, 5, 6]
    assert np.allclose(episode.get_rewards(), [0.1, 0.2, 0.3, 0.4])
    assert episode.get_observations()[:, 0].tolist() == [0, 10, 20, 30, 40]
    assert episode.get_extra_model_outputs("action_logp").tolist() == [-3, -4, -5, -6]
    assert episode.get_extra_model_outputs("state_out")["h"][:, 0, 0].tolist() == [3, 4, 5, 6]
    assert key.streams.episodes() == []
    held = experience(episode)
    assert (held.key, held.ordinal, held.comm) == (7, 0, comm_context(keys=[7], due=due([0])).comm)
    assert held.observations[:, 0].tolist() == [0, 10, 20, 30, 40]
    assert held.heads[:, 0].tolist() == [3, 4, 5, 6]
    assert held.log_probs.tolist() == [-3, -4, -5, -6]
    assert np.allclose(held.rewards, [0.1, 0.2, 0.3, 0.4])


def test_what_is_asked_again_is_not_rewarded_twice() -> None:
    key = Key()
    key(0, 3, np.nan)
    key(1, 4, 0.5)
    key(1, 4, 0.5)
    key(2, 5, 0.7)
    key(3, 6, 0.1, draw=False)
    (episode,) = key.streams.episodes()
    assert np.allclose(episode.get_rewards(), [0.5, 0.7, 0.1])
    assert episode.get_actions()[:, 0].tolist() == [3, 4, 5]


def test_learning_ends_and_so_does_the_episode() -> None:
    key = Key()
    key(0, 3, np.nan)
    key(1, 0, 0.5, draw=False)
    key(2, 0, 0.5, draw=False)
    (episode,) = key.streams.episodes()
    assert len(episode) == 1


def test_a_shift_cuts_the_episode_before_the_decision_that_it_spoiled() -> None:
    key = Key()
    key(0, 3, np.nan)
    key(1, 4, 0.5)
    key(0, 9, np.nan)
    (episode,) = key.streams.episodes()
    assert episode.get_actions()[:, 0].tolist() == [3]
    key(1, 9, 0.25)
    key(2, 9, 0.25, draw=False)
    (episode,) = key.streams.episodes()
    assert np.allclose(episode.get_rewards(), [0.25, 0.25])
    assert episode.get_observations()[:, 0].tolist() == [0, 10, 20]


def test_a_runner_that_begins_in_the_middle_learns_from_there() -> None:
    key = Key()
    key(2, 5, 0.9)
    key(3, 6, 0.1)
    key(4, 7, 0.2)
    (episode,) = key.streams.episodes()
    assert np.allclose(episode.get_rewards(), [0.1, 0.2])


def test_keys_of_other_runners_are_left_to_them() -> None:
    key = Key(mine=False)
    for ordinal in range(6):
        key(ordinal, 3, 0.5)
    assert key.streams.episodes() == []


def test_communicators_that_are_no_more_leave_nothing_behind() -> None:
    key = Key()
    key(0, 3, np.nan)
    key(1, 4, 0.5)
    key.streams.keep([1])
    assert key.streams.episodes() == [], "its communicator is there"
    key.streams.keep([])
    (episode,) = key.streams.episodes()
    assert episode.get_actions()[:, 0].tolist() == [3], "what was learned of it until then is not lost"
    assert not key.streams._streams
