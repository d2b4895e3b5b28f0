"""A round's episodes in one piece: hundreds of short ones cost more apart than the update that they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt


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

    def __len__(self) -> int:
        """Environment steps."""
        return self.rewards.size

    def split(self, parts: int) -> list[Episodes]:
        """As many pieces, of as many episodes each. Raises ValueError where they do not divide evenly."""
        names = [field.name for field in fields(self)]
        pieces = zip(*(np.split(getattr(self, name), parts) for name in names), strict=True)
        return [Episodes(**dict(zip(names, piece, strict=True))) for piece in pieces]

    @staticmethod
    def join(pieces: Sequence[Episodes]) -> Episodes:
        """All episodes of all pieces in one, in new and writable arrays."""
        return Episodes(
            **{f.name: np.concatenate([getattr(piece, f.name) for piece in pieces]) for f in fields(Episodes)}
        )
