"""What became of a job's collectives: tuned or bypassed, and why; measured, lost or not profiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from dynamiccl_ray.plugin_bridge.channel import Status


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Counts since the communicators began, over ranks: a collective of 8 ranks is 8 calls."""

    calls: int = 0
    """Of getCollInfo: each was tuned, or bypassed for a cause."""
    tuned: int = 0
    bypassed: dict[str, int] = field(default_factory=dict)
    """By cause, see ``PASSTHROUGH_CAUSES``."""
    measured: int = 0
    """Each call was measured, lost or not profiled; or it is on its way, or NCCL tells nothing of it."""
    lost: int = 0
    not_profiled: int = 0

    @classmethod
    def of(cls, status: Status) -> Self:
        """One segment's."""
        return cls(
            calls=status.dseq,
            tuned=status.applied,
            bypassed={cause: n for cause, n in status.passthrough.items() if n},
            measured=status.records - status.undecided,
            lost=sum(status.dropped.values()),
            not_profiled=status.unprofiled,
        )

    @classmethod
    def sum(cls, parts: Iterable[Coverage]) -> Self:
        total: Counter[str] = Counter()
        bypassed: Counter[str] = Counter()
        for part in parts:
            total.update({name: getattr(part, name) for name in _COUNTS})
            bypassed.update(part.bypassed)
        return cls(**total, bypassed=dict(bypassed))

    @property
    def unheard(self) -> int:
        """On their way to us, or NCCL tells nothing of them."""
        return max(self.calls - self.measured - self.lost - self.not_profiled, 0)

    def share(self, n: int) -> float:
        """Of all calls; 0 without any."""
        return n / self.calls if self.calls else 0.0

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**{name: getattr(self, name) for name in _COUNTS}, "unheard": self.unheard, "bypassed": self.bypassed}


_COUNTS = ("calls", "tuned", "measured", "lost", "not_profiled")
