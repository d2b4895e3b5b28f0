"""What an online run may take of the job that it tunes."""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from dynamiccl_ray.settings import Section

MOST_ONE_IN: Final = 256


class Overhead(Section):
    """A budget for the plugin. Where it would take more, fewer collectives are profiled; all are tuned as before."""

    max_percent: Annotated[float, Field(gt=0, le=100)] = 0.5
    """Of a step's time, as the job reports it, or else of wall time. Communicators that only use what they have learned
    are profiled less first, those that learn only if that is not enough. 100 for no limit."""
    profile_one_in: Annotated[int, Field(ge=1, le=MOST_ONE_IN)] | None = None
    """Instead of what the budget asks for, always one window of calls in so many: a power of 2. With --serial, where a
    run must be the same each time, nothing else limits profiling."""

    @model_validator(mode="after")
    def _is_a_power(self) -> Self:
        n = self.profile_one_in
        if n is not None and n & (n - 1):
            raise ValueError(f"profile_one_in: {n} is no power of 2; 1, 2, 4, ... up to {MOST_ONE_IN}")
        return self
