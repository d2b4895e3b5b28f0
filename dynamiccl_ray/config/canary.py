"""How much of a job is tuned at first."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dynamiccl_ray.settings import Section


class Canary(Section):
    """All other keys stay NCCL's own choice, until those that are tuned have shown that it does no harm."""

    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the keys of each communicator that is tuned. 1: there is no canary."""
    communicators: tuple[str, ...] = ()
    """Only these are tuned at first, by name (NCCL's commName) or by the first digits of their id; none: all."""
    widen: bool = True
    """The share doubles whenever all keys of the canary exploit what they have learned, none of them is slower than
    NCCL's own choice, and the job's steps, where it reports them, do not take longer than before. After the last
    doubling, all communicators are tuned. False: only ``dynamiccl canary`` widens it."""

    @property
    def whole(self) -> bool:
        """Everything is tuned."""
        return self.share >= 1 and not self.communicators
