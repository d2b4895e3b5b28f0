"""Episodes taken apart and put together again are the same, in the same order."""

from __future__ import annotations

import numpy as np
import pytest

from dynamiccl_ray.actors.episodes import Episodes, mean_terms

TERMS = {"primary": 0.5, "sm": -0.25}


def _episodes(count: int, first: int = 0, **terms: float) -> Episodes:
    """Two steps each; every number says which episode it is of."""
    of = np.arange(first, first + count)

    def each(*shape: int) -> np.ndarray:
        return np.broadcast_to(of.reshape(-1, *(1,) * len(shape)), (count, *shape))

    return Episodes(
        observations=each(3, 4), actions=each(2, 3), log_probs=each(2), teacher=each(2, 3), rewards=each(2),
        values=each(3), reward_terms=terms or TERMS,
    )  # fmt: skip


def test_what_was_split_is_joined_again() -> None:
    whole = _episodes(6)
    assert len(whole) == 12
    pieces = whole.split(3)
    assert [len(piece) for piece in pieces] == [4, 4, 4]
    assert pieces[1].actions[:, 0, 0].tolist() == pieces[1].values[:, 0].tolist() == [2, 3]
    again = Episodes.join(pieces)
    for name in ("observations", "actions", "log_probs", "teacher", "rewards", "values"):
        assert np.array_equal(getattr(again, name), getattr(whole, name)), name
        assert getattr(again, name).flags.writeable
    assert again.reward_terms == TERMS
    with pytest.raises(ValueError, match="equal division"):
        whole.split(4)


def test_terms_are_means_over_pieces() -> None:
    pieces = [_episodes(1, 0, sm=-1.0), _episodes(1, 1, sm=-2.0)]
    assert mean_terms(pieces) == Episodes.join(pieces).reward_terms == {"sm": -1.5}
