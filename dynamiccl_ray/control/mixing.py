"""Mixed bits: digests, and draws that are the same wherever they are made."""

from __future__ import annotations

import numpy as np

from dynamiccl_ray.arrays import Float32, UInt64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: UInt64) -> UInt64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), element by element."""
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel(of: UInt64, n: int) -> Float32:
    """Gumbel noise (R, n) that follows from R numbers alone."""
    bits = mix(mix(of)[:, None] + np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN)
    # Of 53 bits the largest would round to 1, whose noise is infinite.
    uniform = (bits >> np.uint64(12)) * 2.0**-52 + 2.0**-53
    return np.asarray(-np.log(-np.log(uniform)), np.float32)
