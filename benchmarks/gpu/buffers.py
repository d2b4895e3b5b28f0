"""A collective's buffers on one rank, filled and checked; and the call itself."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.gpu.cases import Case
from benchmarks.gpu.reference import difference, expected, given
from dynamiccl_ray.knobs import Collective

GUARD: Final = 512
"""Bytes before and after every output that nobody may touch."""
POISON: Final = 0xA5
COMPARED: Final = 1 << 14
"""Elements up to which the reference is evaluated on the CPU too."""
OUT_OF_PLACE: Final = frozenset({Collective.ALL_GATHER, Collective.REDUCE_SCATTER})

# PyTorch 2.13 renamed the two and warns about the older names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS: Final = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Buffers:
    """Input, output between guards, and what must come out, all on the rank's device."""

    def __init__(self, case: Case, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.case = case
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        dtype = getattr(torch, case.dtype)
        width, n = dtype.itemsize, case.received(self._ranks)
        start = GUARD + case.offset * width
        self._guarded = torch.empty(start + n * width + GUARD, dtype=torch.uint8, device=device)
        self._inside = slice(start, start + n * width)
        self._received = self._guarded[self._inside].view(dtype)
        self._sent = self._received
        if case.collective in OUT_OF_PLACE:
            n = case.sent(self._ranks)
            raw = torch.empty(start + n * width, dtype=torch.uint8, device=device)
            self._sent = raw[start:].view(dtype)
        self.seed(case)

    @property
    def nbytes(self) -> int:
        """On the device, with room for the reference."""
        sent = self._sent.numel() * self._sent.element_size()
        return 2 * (self._guarded.numel() + sent)

    def seed(self, case: Case) -> None:
        """Takes another input of the same shape, when it is next filled."""
        self.case = case
        self._given: torch.Tensor | None = None
        self._want: torch.Tensor | None = None

    def _know(self) -> torch.Tensor:
        """The input and what must come out, by the formula on the device; a small one is compared with the CPU's."""
        if self._given is None:
            where = (self.case, self._rank, self._ranks)
            self._given, self._want = given(*where, self._guarded.device), expected(*where, self._guarded.device)
            if self._given.numel() <= COMPARED:
                for mine, of_cpu in ((self._given, given(*where)), (self._want, expected(*where))):
                    if mine is not None and of_cpu is not None and difference(mine.cpu(), of_cpu):
                        raise RuntimeError(
                            f"{self._guarded.device} and the CPU evaluate the formula of {self.case} differently"
                        )
        return self._given

    def fill(self) -> None:
        """Input into its place, poison into everything that is only written."""
        mine = self._know()
        self._guarded.fill_(POISON)
        # A broadcast's receivers get poison, so that what the root had must really arrive.
        if self.case.collective is not Collective.BROADCAST or self._rank == self.case.root:
            self._sent.copy_(mine)

    def zero(self) -> None:
        """For timing: sums of zeros stay zeros, however often they are repeated."""
        self._guarded.zero_()
        self._sent.zero_()

    def run(self, *, async_op: bool = False) -> Any:
        """The collective, once. Returns PyTorch's handle if ``async_op``."""
        case, group = self.case, self._group
        op = _OPS[case.reduction]
        # Roots are ranks of the group; PyTorch wants the world's.
        root = dist.get_global_rank(group, case.root) if group is not None else case.root
        if case.collective is Collective.ALL_REDUCE:
            return dist.all_reduce(self._received, op=op, group=group, async_op=async_op)
        if case.collective is Collective.ALL_GATHER:
            return _gather(self._received, self._sent, group=group, async_op=async_op)
        if case.collective is Collective.REDUCE_SCATTER:
            return _scatter(self._received, self._sent, op=op, group=group, async_op=async_op)
        if case.collective is Collective.BROADCAST:
            return dist.broadcast(self._received, src=root, group=group, async_op=async_op)
        return dist.reduce(self._received, dst=root, op=op, group=group, async_op=async_op)

    def wrong(self) -> dict[str, Any] | None:
        """What is wrong with the output and around it; None if nothing is. The device has been waited for."""
        outside = torch.cat([self._guarded[: self._inside.start], self._guarded[self._inside.stop :]])
        if bool((outside != POISON).any()):
            touched = (outside != POISON).nonzero().flatten()
            return {"outside": len(touched), "first": int(touched[0]) - self._inside.start}
        return None if self._want is None else difference(self._received, self._want)
