"""One collective to check or to time. What it computes is in ``reference``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dynamiccl_ray.keys import bytes_name, key_of
from dynamiccl_ray.knobs import Collective

ITEM_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint8": 1,
}
REDUCTIONS: Final = ("sum", "max")
COPIES: Final = frozenset({Collective.BROADCAST, Collective.ALL_GATHER})
ROOTED: Final = frozenset({Collective.BROADCAST, Collective.REDUCE})


@dataclass(frozen=True, kw_only=True)
class Case:
    """``count`` is what NCCL counts for a tuner: the full buffer for all-gather and reduce-scatter."""

    collective: Collective
    count: int
    dtype: str = "float32"
    reduction: str = "sum"
    root: int = 0
    offset: int = 0
    """Elements between a 512-byte boundary and the first element of every buffer."""
    seed: int = 0

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]

    @property
    def key(self) -> int:
        """The decision's key; single calls are not pipelined."""
        return key_of(self.collective, self.nbytes, False)

    @property
    def name(self) -> str:
        parts = [self.collective.name.lower(), bytes_name(self.nbytes), self.dtype]
        if self.collective not in COPIES:
            parts.append(self.reduction)
        if self.collective in ROOTED:
            parts.append(f"root {self.root}")
        return " ".join([*parts, *([f"offset {self.offset}"] if self.offset else [])])

    def sent(self, ranks: int) -> int:
        """Elements of one rank's input."""
        return self.count // ranks if self.collective is Collective.ALL_GATHER else self.count

    def received(self, ranks: int) -> int:
        """Elements of one rank's output."""
        return self.count // ranks if self.collective is Collective.REDUCE_SCATTER else self.count

    def to_json(self) -> dict[str, Any]:
        return {
            "collective": self.collective.name.lower(),
            "count": self.count,
            "dtype": self.dtype,
            "reduction": self.reduction,
            "root": self.root,
            "offset": self.offset,
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Case:
        """The inverse of ``to_json``. Raises ValueError for what is no case."""
        try:
            case = cls(**{**raw, "collective": Collective[str(raw["collective"]).upper()]})
        except (KeyError, TypeError) as e:
            raise ValueError(f"{raw} is no case: {e!r}; give what a report's `repeat` shows") from None
        for what, value, valid in (
            ("dtype", case.dtype, tuple(ITEM_BYTES)),
            ("reduction", case.reduction, REDUCTIONS),
        ):
            if value not in valid:
                raise ValueError(f"{what} is {value!r}; valid are {', '.join(valid)}")
        return case
