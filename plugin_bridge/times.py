"""The file of times that the virtual GPU plays: how long each collective takes in each configuration.

The layout is ``gpu/times.h``. A :class:`Times` collects rows; what fills them is the project's physics (``modelled``)
or a measured response surface (``asked``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.knobs import CHANNEL_VALUES, N_ALGORITHMS, N_PAIRS, N_PROTOCOLS

_MAGIC: Final = b"DCCLTIME"
_VERSION: Final = 1
CHUNKS: Final = tuple(1 << k for k in range(10, 23))
"""Chunks, in bytes, between which times are on straight lines over their logarithm."""
_USED, _ASKED, _SENT = 0, 1, 2
_HEADER: Final = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("n_rows", "<u4"),
        ("n_phases", "<u4"),
        ("n_noise", "<u4"),
        ("file_bytes", "<u8"),
        ("noise_seed", "<u8"),
        ("rank_jitter", "<f8"),
    ]
)
_ROW: Final = np.dtype(
    [
        ("comm", "<u4"),
        ("func", "<u4"),
        ("bytes", "<u8"),
        ("kind", "<u4"),
        ("channels", "<u4"),
        ("sigma", "<f4"),
        ("reserved", "<u4"),
        ("offset", "<u8"),
    ]
)
assert (_HEADER.itemsize, _ROW.itemsize) == (48, 40)

Floats = npt.NDArray[np.float32]


@dataclass(kw_only=True)
class Times:
    """Rows of a file of times; P phases."""

    n_phases: int = 1
    noise_seed: int = 0
    rank_jitter: float = 0.0
    """Standard deviation of a rank's own share of the log of a time."""
    noise: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """(N,) log of the factor on collective i of a communicator, over and over; on top of each row's own noise."""
    _rows: dict[tuple[int, int, int], tuple[int, int, float, Floats]] = field(default_factory=dict)

    def used(self, comm: int, func: int, nbytes: int, us: npt.ArrayLike, *, sigma: float = 0.0) -> None:
        """Times (P, 21, channels, len(CHUNKS)) by what NCCL used: pair 3 * algorithm + protocol, channels from 1."""
        table = np.asarray(us, np.float32)
        shape = (self.n_phases, N_ALGORITHMS * N_PROTOCOLS, table.shape[2], len(CHUNKS))
        self._put((comm, func, nbytes), _USED, table.shape[2], sigma, _shaped(table, shape))

    def asked(self, comm: int, func: int, nbytes: int, us: npt.ArrayLike, sigma: npt.ArrayLike) -> None:
        """Times and the deviation of their logs, each (P, 22, 9), by what was asked for, as a decision table has it."""
        shape = (self.n_phases, N_PAIRS, len(CHANNEL_VALUES))
        tables = [_shaped(np.asarray(x, np.float32), shape) for x in (us, np.nan_to_num(np.asarray(sigma)))]
        self._put((comm, func, nbytes), _ASKED, 0, 0.0, np.concatenate([t.reshape(-1) for t in tables]))

    def sent(self, comm: int, nbytes: int, us: npt.ArrayLike, *, sigma: float = 0.0) -> None:
        """Times (P, 2) of a message inside a node and between two."""
        self._put((comm, 5, nbytes), _SENT, 0, sigma, _shaped(np.asarray(us, np.float32), (self.n_phases, 2)))

    def _put(self, key: tuple[int, int, int], kind: int, channels: int, sigma: float, table: Floats) -> None:
        self._rows[key] = (kind, channels, sigma, table)

    def __contains__(self, key: tuple[int, int, int]) -> bool:
        return key in self._rows

    def price_us(self, key: tuple[int, int, int], phase: int, pair: int, channels: int, chunk_bytes: int) -> float:
        """What the virtual GPU plays for a ``used`` row (communicator, function, bytes), without noise: pair
        3 * algorithm + protocol. NaN where the row has no time.
        """
        _, most, _, table = self._rows[key]
        if not 1 <= channels <= most:
            return float("nan")
        at = np.log2(chunk_bytes or CHUNKS[-1])
        return float(np.interp(at, np.log2(CHUNKS), table[phase, pair, channels - 1]))

    def write(self, path: Path) -> None:
        """Writes the file that the virtual GPU maps."""
        rows = np.zeros(len(self._rows), _ROW)
        noise = np.asarray(self.noise, np.float32)
        offset = _HEADER.itemsize + rows.nbytes + noise.nbytes
        tables = []
        for row, (key, (kind, channels, sigma, table)) in zip(rows, sorted(self._rows.items()), strict=True):
            row["comm"], row["func"], row["bytes"] = key
            row["kind"], row["channels"], row["sigma"], row["offset"] = kind, channels, sigma, offset
            tables.append(table.tobytes())
            offset += table.nbytes
        header = np.zeros((), _HEADER)
        values: dict[str, Any] = {
            "magic": _MAGIC,
            "version": _VERSION,
            "n_rows": len(rows),
            "n_phases": self.n_phases,
            "n_noise": len(noise),
            "file_bytes": offset,
            "noise_seed": self.noise_seed,
            "rank_jitter": self.rank_jitter,
        }
        for name, value in values.items():
            header[name] = value
        path.write_bytes(header.tobytes() + rows.tobytes() + noise.tobytes() + b"".join(tables))


def _shaped(table: Floats, shape: tuple[int, ...]) -> Floats:
    if table.shape != shape:
        raise ValueError(f"times have shape {table.shape}; expected {shape}")
    return np.ascontiguousarray(table)
