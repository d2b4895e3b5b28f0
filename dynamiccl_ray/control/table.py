"""Decision tables: what every rank of a communicator does with each key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from dynamiccl_ray.actions import OWN_ACTION, Action, action_parts, flat_action
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.control.mixing import mix
from dynamiccl_ray.keys import N_KEYS
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_PROTOCOLS, OWN_PAIR, Carrier, pair_index

MAGIC: Final = 0x31425443
ABI: Final = 6
OWN: Final = 255

_CHUNK_LOG2: Final = np.array([max(0, chunk.bit_length() - 1) for chunk in CHUNK_VALUES])
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
        keys = np.fromiter(actions, np.int64, len(actions))
        flat = np.fromiter((action.flat for action in actions.values()), np.int64, len(actions))
        table = cls.of_flat(version, keys, flat, max_channels=max_channels, apply=apply)
        table.entries["path"][keys] = [int(action.path) for action in actions.values()]
        return table

    @classmethod
    def of_flat(cls, version: int, keys: Int64, flat: Int64, *, max_channels: int, apply: bool = True) -> DecisionTable:
        """A table that says so of these keys (N,), flat actions (N,), and leaves every other key to NCCL."""
        pair, channels, chunk = action_parts(flat)
        own = pair == OWN_PAIR
        algo, proto = np.divmod(pair - 1, N_PROTOCOLS)
        entries = np.zeros(N_KEYS, ENTRY_DTYPE)
        entries["set"][keys] = 1
        entries["algo"][keys] = np.where(own, OWN, algo)
        entries["proto"][keys] = np.where(own, OWN, proto)
        entries["channels"][keys] = np.array(CHANNEL_VALUES)[channels]
        entries["chunk_log2"][keys] = _CHUNK_LOG2[chunk]
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
                path=Carrier(int(entry["path"])),
                pair=pair,
                channels=CHANNEL_VALUES.index(int(entry["channels"])),
                chunk=CHUNK_VALUES.index(chunk),
            )
        return found

    def flat(self) -> Int64:
        """(N_KEYS,) flat actions; NCCL's own for keys without an entry."""
        keys = np.flatnonzero(self.entries["set"])
        entries = self.entries[keys]
        pair = 1 + N_PROTOCOLS * entries["algo"].astype(np.int64) + entries["proto"]
        channels = _places(CHANNEL_VALUES, entries["channels"])
        chunk = _places(_CHUNK_LOG2, entries["chunk_log2"])
        flat = np.full(N_KEYS, OWN_ACTION, np.int64)
        flat[keys] = flat_action(np.where(entries["algo"] == OWN, OWN_PAIR, pair), channels, chunk)
        return flat

    @property
    def digest(self) -> int:
        """What all ranks compare before they switch: the same sum of mixed words that the plugin computes."""
        words = self.entries.view("<u8")
        set_words = np.flatnonzero(words)
        seed = self.version ^ self.max_channels << 32 ^ int(self.apply) << 63
        mixed = mix(words[set_words] ^ mix((set_words + 1).astype(np.uint64)))
        head = mix(np.array([seed & (2**64 - 1)], np.uint64))[0]
        return int((int(head) + int(mixed.sum(dtype=np.uint64))) & (2**64 - 1))

    def with_version(self, version: int) -> DecisionTable:
        """The same decisions under another version."""
        return DecisionTable(version, self.entries, self.max_channels, self.apply)

    def to_bytes(self) -> bytes:
        """``struct dcc_table`` of native/channel.h."""
        header = np.zeros(1, _HEADER)
        header[0] = (MAGIC, ABI, self.version, self.digest, self.max_channels, int(self.apply))
        return header.tobytes() + self.entries.tobytes()


def _places(values: ArrayLike, of: Int64) -> Int64:
    """Where each of ``of`` is in ``values``, which ascend. Raises ValueError for one that is none of them."""
    known = np.asarray(values)
    places = np.minimum(np.searchsorted(known, of), len(known) - 1)
    if (known[places] != of).any():
        raise ValueError(f"a table says {of[known[places] != of].tolist()}; it can say {known.tolist()}")
    return np.asarray(places)
