"""What may be tried, and what an experiment says of some communicators only."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Self

from pydantic import model_validator

from dynamiccl_ray.agent.observation import Llm, Scheduler, WorkloadContext
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES
from dynamiccl_ray.settings import Count, Section
from dynamiccl_ray.sizes import BytesOrNone


class Actions(Section):
    """Which values of the heads may be tried at all."""

    channels: tuple[int, ...] = (0,)
    """From 0 (NCCL's own), 1, 2, 4, 8, 12, 16, 24, 32."""
    chunk_bytes: tuple[BytesOrNone, ...] = (0,)
    """From 0 (NCCL's own) and the powers of two from 16 KiB to 4 MiB; NCCL 2.30.3 and later."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name, given, known in (
            ("channels", self.channels, CHANNEL_VALUES),
            ("chunk_bytes", self.chunk_bytes, CHUNK_VALUES),
        ):
            bad = [x for x in given if x not in known]
            if bad:
                raise ValueError(f"{name}: {bad} not among {list(known)}")
            if 0 not in given:
                raise ValueError(f"{name}: 0 (NCCL's own) must stay possible")
        return self


class CommunicatorRule(Section):
    """For communicators of this name and size; at least one of the three is given."""

    name: str | None = None
    """NCCL's commName, with * and ? as in file names."""
    ranks: Count | None = None
    nodes: Count | None = None
    tune: bool = True
    """False: they stay NCCL's own, and nothing is measured of them."""
    actions: Actions | None = None
    """Instead of the experiment's; likewise the three below, which say what they are for."""
    workload: WorkloadContext | None = None
    scheduler: Scheduler | None = None
    llm: Llm | None = None

    @model_validator(mode="after")
    def _names_some(self) -> Self:
        if self.name is None and self.ranks is None and self.nodes is None:
            raise ValueError("say which communicators: by name, ranks or nodes")
        return self

    def matches(self, name: str, ranks: int, nodes: int) -> bool:
        """Whether it is for a communicator of this name and size."""
        named = self.name is None or fnmatchcase(name, self.name)
        return named and self.ranks in (None, ranks) and self.nodes in (None, nodes)
