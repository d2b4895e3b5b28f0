"""A round's episodes in one piece: hundreds of short ones cost more apart than the update that they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Final

import numpy as np
import numpy.typing as npt

TEACHER: Final = "teacher"
"""Column of a training batch: what a policy that knew every time would have chosen."""


@dataclass(eq=False, frozen=True, kw_only=True)
class Experience:
    """One episode beside a job: T decisions in a row that were drawn for a key."""

    comm: int
    key: int
    ordinal: int
    """Decisions of the key before the first of these, since it began to learn."""
    observations: npt.NDArray[np.float32]
    """(T + 1, SIZE), the last one after the last decision."""
    heads: npt.NDArray[np.int64]
    """(T, 3) what was drawn."""
    log_probs: npt.NDArray[np.float32]
    """(T,) of the heads, under the policy that drew them."""
    rewards: npt.NDArray[np.float32]
    """(T,)"""


@dataclass(eq=False, kw_only=True)
class Episodes:
    """E episodes of T steps each, stacked, where RLlib would have a list of E.

    Of an episode RLlib's learner group wants no more than its length: it gives every learner as many steps, and does
    not take apart what fits. Through Ray's object store the arrays come without being copied, and read-only.
    """

    observations: npt.NDArray[np.float32]
    """(E, T + 1, SIZE), the last one after the last step."""
    actions: npt.NDArray[np.int64]
    """(E, T, 3)"""
    log_probs: npt.NDArray[np.float32]
    """(E, T) of the actions, under the policy that drew them."""
    teacher: npt.NDArray[np.int64]
    """(E, T, 3) what a policy that knew every time would have chosen."""
    rewards: npt.NDArray[np.float32]
    """(E, T)"""
    values: npt.NDArray[np.float32]
    """(E, T + 1) of the observations, under the same policy: the runner has what they are computed from at hand."""

    reward_terms: dict[str, float] = field(default_factory=dict)
    """Mean of each term of the reward over the round."""

    def __len__(self) -> int:
        """Environment steps."""
        return self.rewards.size

    def split(self, parts: int) -> list[Episodes]:
        """As many pieces, of as many episodes each. Raises ValueError where they do not divide evenly."""
        pieces = zip(*(np.split(getattr(self, name), parts) for name in _ARRAYS), strict=True)
        return [Episodes(**dict(zip(_ARRAYS, p, strict=True)), reward_terms=self.reward_terms) for p in pieces]

    @staticmethod
    def join(pieces: Sequence[Episodes]) -> Episodes:
        """All episodes of all pieces in one, in new and writable arrays."""
        arrays = {name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in _ARRAYS}
        return Episodes(**arrays, reward_terms=mean_terms(pieces))


def mean_terms(pieces: Sequence[Episodes]) -> dict[str, float]:
    """Of each term of the reward over pieces of one size."""
    return {name: sum(p.reward_terms[name] for p in pieces) / len(pieces) for name in pieces[0].reward_terms}


_ARRAYS: Final = [f.name for f in fields(Episodes) if f.name != "reward_terms"]
