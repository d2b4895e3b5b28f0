"""Keys: what decisions are looked up by.

A key is (collective, pipelined or not, size bin), all of it equal on every rank by construction. Bins are eight per
octave: bytes below 8 each have their own, above that the exponent and the next three bits of the size.
"""

from __future__ import annotations

from typing import Final

from dynamiccl_ray.knobs import N_COLLECTIVES, Collective

N_BINS: Final = 312
N_KEYS: Final = N_COLLECTIVES * 2 * N_BINS


def size_bin(nbytes: int) -> int:
    """The size bin of a message."""
    if nbytes < 8:
        return nbytes
    exponent = nbytes.bit_length() - 1
    return min(((exponent - 2) << 3) | ((nbytes >> (exponent - 3)) & 7), N_BINS - 1)


def bin_bytes(index: int) -> int:
    """The smallest message of a size bin: the inverse of ``size_bin``."""
    if index < 8:
        return index
    exponent = (index >> 3) + 2
    return (8 | (index & 7)) << (exponent - 3)


def key_of(collective: int, nbytes: int, pipelined: bool) -> int:
    """The key of a collective of ``nbytes`` as NCCL counts them for a tuner."""
    return (collective * 2 + pipelined) * N_BINS + size_bin(nbytes)


def key_parts(key: int) -> tuple[Collective, bool, int]:
    """(collective, pipelined, smallest message in bytes) of a key."""
    head, index = divmod(key, N_BINS)
    return Collective(head >> 1), bool(head & 1), bin_bytes(index)


def key_name(key: int) -> str:
    """``all_reduce/64KiB``, with ``/pipelined`` where it is."""
    collective, pipelined, nbytes = key_parts(key)
    return f"{collective.name.lower()}/{bytes_name(nbytes)}{'/pipelined' if pipelined else ''}"


def bytes_name(nbytes: int) -> str:
    """``1.5MiB``, ``64KiB``, ``12B``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g}{unit}"
    return f"{nbytes}B"
