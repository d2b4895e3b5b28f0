"""Gradient compression as what it leaves on the wire: effective bytes per message. Its arithmetic is not priced.

Error feedback changes what is sent later, not how much, so it has no field.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from dynamiccl_ray.settings import Section

Method = Literal["none", "quantised", "top-k", "random-k", "sign", "low-rank", "combined"]

_NEEDS: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "quantised": frozenset({"bits"}),
    "top-k": frozenset({"density"}),
    "random-k": frozenset({"density"}),
    "sign": frozenset(),
    "low-rank": frozenset({"rank"}),
    "combined": frozenset({"ratio"}),
}


class Compression(Section):
    """A method and its one rate."""

    method: Method = "none"
    bits: Annotated[int | None, Field(ge=1, le=16)] = None
    """quantised: bits per element (QSGD, Alistarh et al. 2017), plus one fp32 scale per message."""
    density: Annotated[float | None, Field(gt=0, le=1)] = None
    """top-k, random-k: share of the elements that is sent. top-k (Lin et al. 2018) sends a 32-bit index with each
    value; random-k with a seed that all ranks share (Stich et al. 2018) sends values only, and 8 bytes of seed."""
    rank: Annotated[int | None, Field(ge=1)] = None
    """low-rank: an n x m matrix becomes factors of (n + m) x rank elements (PowerSGD, Vogels et al. 2019); vectors, and
    matrices that would grow, go uncompressed. Convolutions are flattened to (out, rest)."""
    ratio: Annotated[float | None, Field(ge=1)] = None
    """combined: nominal over effective bytes, as published: 117 for CocktailSGD (Wang et al. 2023), which sends random
    entries, of them the largest, in few bits."""

    @model_validator(mode="after")
    def _only_the_rate_of_the_method(self) -> Self:
        given = {name for name in ("bits", "density", "rank", "ratio") if getattr(self, name) is not None}
        needed = _NEEDS[self.method]
        if given != needed:
            raise ValueError(
                f"method {self.method!r} takes {sorted(needed) or 'no rate'}, found {sorted(given) or 'none'}"
            )
        return self

    def effective_bytes(self, shapes: tuple[tuple[int, ...], ...], element_bytes: int = 4) -> npt.NDArray[np.float64]:
        """For tensors of these shapes, each sent alone: shape (tensors,). Never more than the nominal bytes, except the
        few bytes of a scale or seed; ``sign`` sends one bit per element and a scale (Bernstein et al. 2018)."""
        elements = np.array([prod(s) for s in shapes], dtype=np.float64)
        nominal = elements * element_bytes
        match self.method:
            case "none":
                return nominal
            case "quantised":
                assert self.bits is not None
                return np.ceil(elements * self.bits / 8) + 4
            case "top-k":
                assert self.density is not None
                kept = np.ceil(elements * self.density)
                return np.array(np.minimum(kept * (element_bytes + 4), nominal))
            case "random-k":
                assert self.density is not None
                return np.ceil(elements * self.density) * element_bytes + 8
            case "sign":
                return np.ceil(elements / 8) + 4
            case "low-rank":
                assert self.rank is not None
                rows = np.array([s[0] if len(s) > 1 else 0 for s in shapes], dtype=np.float64)
                columns = np.array([prod(s[1:]) if len(s) > 1 else 0 for s in shapes], dtype=np.float64)
                factors = (rows + columns) * self.rank * element_bytes
                return np.where(rows > 0, np.minimum(factors, nominal), nominal)
            case "combined":
                assert self.ratio is not None
                return nominal / self.ratio
