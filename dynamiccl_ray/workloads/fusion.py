"""Which gradients MG-WFBP sends together: Shi, Chu, Li 2019 (arXiv:1811.11141), its Algorithm 1 read forwards.

Merging two messages saves one latency and delays the first by the wait for the second. In the order of the backward, a
message takes the next gradient along while that comes before the message could start, or within one latency of it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_ALWAYS_MERGED_BYTES: Final = 4 * 8192.0
"""The authors' code never sends less than 8192 fp32 numbers alone."""


def merge(
    ready_us: npt.NDArray[np.float64], nbytes: npt.NDArray[np.float64], latency_us: float, us_per_byte: float
) -> npt.NDArray[np.int64]:
    """The index of the last gradient of each message, for gradients in the order in which they become ready."""
    ready, sizes, n = ready_us.tolist(), nbytes.tolist(), len(nbytes)
    last: list[int] = []
    free, i = 0.0, 0
    while i < n:
        size, j = sizes[i], i
        while j + 1 < n:
            start = max(free, ready[j])
            sent_before = ready[j + 1] >= start + latency_us + us_per_byte * size
            if (sent_before or ready[j + 1] - start >= latency_us) and size >= _ALWAYS_MERGED_BYTES:
                break
            j += 1
            size += sizes[j]
        free = max(free, ready[j]) + latency_us + us_per_byte * size
        last.append(j)
        i = j + 1
    return np.array(last, dtype=np.int64)
