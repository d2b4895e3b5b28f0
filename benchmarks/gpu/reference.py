"""What a collective is given on every rank, and what must come out, by a formula.

Inputs of reductions are whole numbers from 1 to 15. Sums over 8 ranks are then at most 120, which every type holds
exactly, so a right result is right to the last bit whatever the order of the sums, and a contribution that is missing
or counted twice is seen at every element. Inputs of collectives that only copy are arbitrary bits.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from benchmarks.gpu.cases import COPIES, ITEM_BYTES, Case
from dynamiccl_ray.knobs import Collective

CPU: Final = torch.device("cpu")
LARGEST: Final = 15
"""Of a reduction's input; 8 ranks times this fits int8."""


def _bits(n: int, salt: int, device: torch.device) -> torch.Tensor:
    """(n,) int64: 32 well mixed bits of every index. Its period is none that a chunk could be shifted by."""
    x = (torch.arange(n, dtype=torch.int64, device=device) + (salt * 0x9E3779B1 & 0xFFFFFFFF)) & 0xFFFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def given(case: Case, rank: int, ranks: int, device: torch.device = CPU) -> torch.Tensor:
    """A rank's input; of a broadcast the root's, whoever asks. The formula is evaluated on ``device``."""
    n, dtype = case.sent(ranks), getattr(torch, case.dtype)
    salt = case.seed * 64 + (case.root if case.collective is Collective.BROADCAST else rank)
    if case.collective in COPIES:
        return _bits(n * ITEM_BYTES[case.dtype], salt, device).to(torch.uint8).view(dtype)
    return (_bits(n, salt, device) % LARGEST + 1).to(dtype)


def expected(case: Case, rank: int, ranks: int, device: torch.device = CPU) -> torch.Tensor | None:
    """What a rank must find in its output. None where NCCL promises nothing: reduce, but at the root."""
    if case.collective is Collective.BROADCAST:
        return given(case, rank, ranks, device)
    if case.collective is Collective.ALL_GATHER:
        return torch.cat([given(case, peer, ranks, device) for peer in range(ranks)])
    if case.collective is Collective.REDUCE and rank != case.root:
        return None
    whole = given(case, 0, ranks, device).to(torch.int64)
    for peer in range(1, ranks):
        other = given(case, peer, ranks, device).to(torch.int64)
        whole = whole + other if case.reduction == "sum" else torch.maximum(whole, other)
    if case.collective is Collective.REDUCE_SCATTER:
        share = case.received(ranks)
        whole = whole[rank * share : (rank + 1) * share]
    return whole.to(getattr(torch, case.dtype))


def difference(got: torch.Tensor, want: torch.Tensor) -> dict[str, Any] | None:
    """None if the two are equal to the last bit, otherwise where they differ; ``got`` may be on a GPU."""
    if torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
        return None
    width = want.element_size()
    bad = (got.view(torch.uint8).view(-1, width) != want.view(torch.uint8).view(-1, width)).any(dim=1).nonzero()
    indices = bad.flatten().cpu()
    first = int(indices[0])
    near = slice(first, first + 4)
    return {
        "wrong_elements": len(indices),
        "elements": want.numel(),
        "first": first,
        "last": int(indices[-1]),
        "got": [str(x) for x in got[near].cpu().tolist()],
        "want": [str(x) for x in want[near].cpu().tolist()],
    }
