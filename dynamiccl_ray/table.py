"""Decision tables: what every rank of a communicator does with each key.

A key is (collective, pipelined or not, size bin), all of it equal on every rank by construction. Bins are eight per
octave: bytes below 8 each have their own, above that the exponent and the next three bits of the size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.knobs import (
    CHANNEL_VALUES,
    CHUNK_VALUES,
    N_COLLECTIVES,
    N_PROTOCOLS,
    OWN_PAIR,
    Collective,
    Path,
    pair_index,
    pair_name,
)

MAGIC: Final = 0x31425443
ABI: Final = 3
N_BINS: Final = 312
N_KEYS: Final = N_COLLECTIVES * 2 * N_BINS
OWN: Final = 255

ENTRY_DTYPE: Final = np.dtype(
    [
        ("set", "u1"),
        ("path", "u1"),
        ("algo", "u1"),
        ("proto", "u1"),
        ("channels", "u1"),
        ("reserved", "u1"),
        ("chunk_log2", "u1"),
        ("reserved2", "u1"),
    ]
)
_HEADER: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("abi", "<u4"),
        ("version", "<u8"),
        ("digest", "<u8"),
        ("max_channels", "<u4"),
        ("apply", "<u4"),
    ]
)


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


@dataclass(frozen=True, kw_only=True)
class Action:
    """One decision: indices into the heads of ``dynamiccl_ray.knobs``. The default leaves everything to NCCL."""

    path: Path = Path.NCCL
    pair: int = OWN_PAIR
    channels: int = 0
    chunk: int = 0

    @property
    def name(self) -> str:
        parts = [pair_name(self.pair)]
        if self.channels:
            parts.append(f"{CHANNEL_VALUES[self.channels]}ch")
        if self.chunk:
            parts.append(f"chunk {bytes_name(CHUNK_VALUES[self.chunk])}")
        return " ".join(parts)


@dataclass(frozen=True, eq=False)
class DecisionTable:
    """Key -> action for one communicator. ``entries`` has shape (N_KEYS,) and dtype ``ENTRY_DTYPE``."""

    version: int
    entries: npt.NDArray[Any]
    max_channels: int
    apply: bool = True

    @classmethod
    def of(
        cls,
        version: int,
        actions: dict[int, Action],
        *,
        max_channels: int,
        apply: bool = True,
    ) -> DecisionTable:
        """A table that says ``actions`` and leaves every other key to NCCL."""
        entries = np.zeros(N_KEYS, ENTRY_DTYPE)
        for key, action in actions.items():
            algo, proto = OWN, OWN
            if action.pair != OWN_PAIR:
                algo, proto = divmod(action.pair - 1, N_PROTOCOLS)
            chunk = CHUNK_VALUES[action.chunk]
            entries[key] = (
                1,
                int(action.path),
                algo,
                proto,
                CHANNEL_VALUES[action.channels],
                0,
                max(0, chunk.bit_length() - 1),
                0,
            )
        return cls(version, entries, max_channels, apply)

    @classmethod
    def from_bytes(cls, raw: bytes) -> DecisionTable:
        """The inverse of ``to_bytes``. Raises ValueError if it is not a table of this build or its digest is off."""
        if len(raw) != _HEADER.itemsize + N_KEYS * ENTRY_DTYPE.itemsize:
            raise ValueError(f"a table has {_HEADER.itemsize + N_KEYS * ENTRY_DTYPE.itemsize} bytes, not {len(raw)}")
        header = np.frombuffer(raw, _HEADER, count=1)[0]
        table = cls(
            int(header["version"]),
            np.frombuffer(raw, ENTRY_DTYPE, offset=_HEADER.itemsize),
            int(header["max_channels"]),
            bool(header["apply"]),
        )
        # The digest takes one bit of `apply`; any other value is damage.
        known = header["magic"] == MAGIC and header["abi"] == ABI and header["apply"] <= 1
        if not known or header["digest"] != table.digest:
            raise ValueError("not a decision table of this build, or a damaged one")
        return table

    def actions(self) -> dict[int, Action]:
        """The inverse of ``of``."""
        found = {}
        for key in np.flatnonzero(self.entries["set"]):
            entry = self.entries[key]
            pair = OWN_PAIR if entry["algo"] == OWN else pair_index(int(entry["algo"]), int(entry["proto"]))
            chunk = 1 << int(entry["chunk_log2"]) if entry["chunk_log2"] else 0
            found[int(key)] = Action(
                path=Path(int(entry["path"])),
                pair=pair,
                channels=CHANNEL_VALUES.index(int(entry["channels"])),
                chunk=CHUNK_VALUES.index(chunk),
            )
        return found

    @property
    def digest(self) -> int:
        """What all ranks compare before they switch: the same sum of mixed words that the plugin computes."""
        words = self.entries.view("<u8")
        set_words = np.flatnonzero(words)
        seed = self.version ^ self.max_channels << 32 ^ int(self.apply) << 63
        mixed = _mix(words[set_words] ^ _mix((set_words + 1).astype(np.uint64)))
        head = _mix(np.array([seed & (2**64 - 1)], np.uint64))[0]
        return int((int(head) + int(mixed.sum(dtype=np.uint64))) & (2**64 - 1))

    def with_version(self, version: int) -> DecisionTable:
        """The same decisions under another version."""
        return DecisionTable(version, self.entries, self.max_channels, self.apply)

    def to_bytes(self) -> bytes:
        """``struct dcc_table`` of native/channel.h."""
        header = np.zeros(1, _HEADER)
        header[0] = (MAGIC, ABI, self.version, self.digest, self.max_channels, int(self.apply))
        return header.tobytes() + self.entries.tobytes()


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), element by element."""
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
