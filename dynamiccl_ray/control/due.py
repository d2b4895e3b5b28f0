"""Keys that need a decision, and what is decided where a policy has drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, flat_action
from dynamiccl_ray.arrays import Bool, Float32, Int64, UInt64
from dynamiccl_ray.control.columns import Outcome
from dynamiccl_ray.knobs import OWN_PAIR

# By how much, as a log, NCCL may believe a pair to be slower than the fastest where it is tried once all the same.
_BELIEVED: Final = 1.0
# And by how much it may have been wrong about others before that counts.
_WRONG: Final = 0.5
_OF_DUE: Final = ("row", "identity", "salt", "ordinal", "shifts", "draw", "fixed", "untried", "takes", "observation")


@dataclass(frozen=True, kw_only=True, eq=False)
class Due:
    """Keys whose decision is over, and that need another; R of them."""

    row: Int64
    """(R,) ascending."""
    identity: UInt64
    salt: UInt64
    """(R,) see ``Keys``."""
    ordinal: Int64
    """(R,) decisions since the key began to learn."""
    shifts: Int64
    """(R,) how often it has begun anew."""
    draw: Bool
    """(R,) whether the policy decides."""
    fixed: Int64
    """(R,) flat action where it does not: what is worth measuring; in the end the best. And where it does, the best, in
    place of what is behind."""
    behind: Int64
    """(N, 2) index into these R, and a flat action that was measured and is behind the best with confidence."""
    known: Int64
    """(M, 2) the same of actions that were measured often."""
    untried: Int64
    """(R,) a flat action that was not measured yet: of a pair that was not, and that NCCL believes in, or else one that
    promises to be the best; -1 where there is none."""
    takes: Int64
    """(R,) samples that the decision will take."""
    observation: Float32
    """(R, observation.SIZE) before and after each decision that is drawn; else 0."""
    outcome: Outcome

    def part(self, chosen: Int64) -> Due:
        """Those at these places, in order."""
        columns = {name: getattr(self, name)[chosen] for name in _OF_DUE}
        back = np.full(len(self.row), -1)
        back[chosen] = np.arange(len(chosen))
        of_part = {}
        for name in ("behind", "known"):
            pairs = getattr(self, name)
            kept = pairs[back[pairs[:, 0]] >= 0]
            of_part[name] = np.stack([back[kept[:, 0]], kept[:, 1]], -1)
        return Due(**columns, **of_part, outcome=self.outcome.part(chosen))

    def actions(self, drawn: Int64) -> Int64:
        """(R,) what is decided where the policy has drawn flat actions for those keys that it decides, in order.

        A draw that would only repeat what is known goes to what nobody has tried: however sure a policy is, it may
        never have seen a machine like this one.
        """
        wanted = self.fixed.copy()
        wanted[self.draw] = drawn
        behind = self.behind[wanted[self.behind[:, 0]] == self.behind[:, 1], 0]
        wanted[behind] = self.fixed[behind]
        known = self.known[wanted[self.known[:, 0]] == self.known[:, 1], 0]
        known = known[self.draw[known] & (self.untried[known] >= 0)]
        wanted[known] = self.untried[known]
        return wanted


def untried(cost: Float32, pairs: Bool, unheard: Bool, wrong: Float32, allowed: Bool, chunk: Int64) -> Int64:
    """(R,) flat action of that pair in which NCCL believes most by its ``cost`` (R, N_PAIRS), with NCCL's own channels
    and the pair's ``chunk`` (R, N_PAIRS) if that is ``allowed`` (R, N_PAIRS, N_CHANNELS, N_CHUNKS); -1 where there is
    none. Of the ``pairs`` (R, N_PAIRS) those in which it believes at all; and where it was ``wrong`` (R,) by much about
    others, those of the ``unheard`` (R, N_PAIRS), which nobody near has tried, in which it would believe if it were
    wrong by as much.
    """
    excused = np.where(wrong >= _WRONG, _BELIEVED + wrong, -np.inf)[:, None]
    believed = (pairs & (cost <= _BELIEVED)) | (unheard & (cost <= excused))
    believed &= allowed.any((-2, -1))
    believed[:, OWN_PAIR] = False
    pair = np.where(believed, cost, np.inf).argmin(-1)
    at = np.arange(len(cost))
    of_pair = allowed[at, pair]
    # The first channels that may have this chunk, or else the first of all.
    of_chunk = of_pair & (np.arange(N_CHUNKS) == chunk[at, pair][:, None])[:, None]
    of_pair = np.where(of_chunk.any((1, 2))[:, None, None], of_chunk, of_pair)
    channels, taken = np.divmod(of_pair.reshape(len(cost), N_CHANNELS * N_CHUNKS).argmax(-1), N_CHUNKS)
    return np.where(believed.any(-1), flat_action(pair, channels, taken), -1)
