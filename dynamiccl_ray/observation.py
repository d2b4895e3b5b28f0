"""What the policy sees of one key at one decision epoch, and what it may choose.

Each block is a typed record of arrays over keys; ``encode`` lays the blocks out in one float32 vector per key and
``decode`` reads it back for ``dynamiccl explain``. Every number comes from the communicator, the experiment YAML, or
an aggregate over all ranks, so that every rank sees the same observation.

Times enter as log ratios to the key's baseline (NCCL's own choice): negative is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_COLLECTIVES, N_PAIRS

Floats = npt.NDArray[np.float32]

INTRA_LINKS: Final = ("nvlink", "pcie", "c2c", "none")
INTER_LINKS: Final = ("nvswitch", "ib", "roce", "efa", "slingshot", "tcp", "none")
N_CHANNELS: Final = len(CHANNEL_VALUES)
N_CHUNKS: Final = len(CHUNK_VALUES)
# A log ratio beyond this says no more than "far worse" or "far better".
LOG_RATIO_LIMIT: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Static; from the communicator and the cluster description."""

    ranks: int
    nodes: int
    intra: str = "none"
    """Link between the GPUs of a node, one of ``INTRA_LINKS``."""
    inter: str = "none"
    """Link between nodes, one of ``INTER_LINKS``."""
    nvls: bool = False


@dataclass(frozen=True, kw_only=True)
class KeyView:
    """All active keys of a communicator at one epoch. K keys; times are log ratios to the baseline."""

    collective: npt.NDArray[np.int64]
    """(K,) NCCL's function number."""
    nbytes: npt.NDArray[np.int64]
    """(K,) message size."""
    pipelined: npt.NDArray[np.bool_]
    """(K,)"""
    last_time: Floats
    """(K,) of the last epoch in which the key was used."""
    idle_epochs: Floats
    """(K,) epochs since the key was last used."""
    last_pair: npt.NDArray[np.int64]
    """(K,) pair head of the action in force; -1 before the first decision."""
    cost: Floats
    """(K, N_PAIRS) log of NCCL's own predicted cost over its cheapest; 0 where unavailable."""
    evidence: Floats
    """(K, N_PAIRS, N_CHANNELS) mean time seen with the action since the last shift; 0 where none."""
    samples: Floats
    """(K, N_PAIRS, N_CHANNELS) how many collectives that mean is made of."""
    cusum: Floats
    """(K,) drift score over its threshold, 1 is an alarm."""
    skew: Floats
    """(K,) log of the slowest rank's time over the median rank's."""
    heat: float
    """Logits are divided by 1 + heat: 0 outside of adaptation, raised by a trigger and decaying."""
    valid_channels: npt.NDArray[np.bool_]
    """(K, N_PAIRS, N_CHANNELS) what may be chosen; a pair with no valid channel count is not available."""
    valid_chunks: npt.NDArray[np.bool_]
    """(K, N_PAIRS, N_CHUNKS)"""


PAIR_FIELDS: Final = ("available", "cost", "best", "known", "samples", "current")
_SEGMENTS: Final[tuple[tuple[str, tuple[int, ...]], ...]] = (
    ("shape", (3,)),
    ("intra", (len(INTRA_LINKS),)),
    ("inter", (len(INTER_LINKS),)),
    ("nvls", (1,)),
    ("collective", (N_COLLECTIVES,)),
    ("log_bytes", (1,)),
    ("pipelined", (1,)),
    ("last_time", (1,)),
    ("idle", (1,)),
    ("cusum", (1,)),
    ("skew", (1,)),
    ("heat", (1,)),
    ("pairs", (N_PAIRS, len(PAIR_FIELDS))),
    ("channels", (N_PAIRS, N_CHANNELS, 2)),
    ("valid_channels", (N_PAIRS, N_CHANNELS)),
    ("valid_chunks", (N_PAIRS, N_CHUNKS)),
)
_OFFSETS: Final = np.cumsum([0, *(int(np.prod(shape)) for _, shape in _SEGMENTS)]).tolist()
SIZE: Final[int] = _OFFSETS[-1]
# Everything before the per-action features: what the recurrent part of the policy reads.
HEAD_SIZE: Final[int] = _OFFSETS[[name for name, _ in _SEGMENTS].index("pairs")]
N_PAIR_FIELDS: Final = len(PAIR_FIELDS)


def part(vector: Any, name: str) -> Any:
    """One named segment of encoded observations (..., SIZE), reshaped: a view, of an array or of a torch tensor."""
    for i, (segment, shape) in enumerate(_SEGMENTS):
        if segment == name:
            return vector[..., _OFFSETS[i] : _OFFSETS[i + 1]].reshape(*vector.shape[:-1], *shape)
    raise KeyError(name)


def encode(topology: Topology, keys: KeyView) -> Floats:
    """Observations of shape (K, SIZE), float32, every entry within [-2, 4]."""
    n = len(keys.nbytes)
    out = np.zeros((n, SIZE), np.float32)

    def put(name: str, value: npt.ArrayLike) -> None:
        part(out, name)[...] = value

    put(
        "shape",
        [
            np.log2(topology.ranks) / 10,
            np.log2(topology.nodes) / 10,
            np.log2(max(1.0, topology.ranks / topology.nodes)) / 4,
        ],
    )
    put("intra", np.eye(len(INTRA_LINKS))[INTRA_LINKS.index(topology.intra)])
    put("inter", np.eye(len(INTER_LINKS))[INTER_LINKS.index(topology.inter)])
    put("nvls", float(topology.nvls))
    put("collective", np.eye(N_COLLECTIVES)[keys.collective])
    put("log_bytes", (np.log2(np.maximum(1, keys.nbytes)) / 40)[:, None])
    put("pipelined", keys.pipelined[:, None])
    put("last_time", _ratio(keys.last_time)[:, None])
    put("idle", (np.log1p(keys.idle_epochs) / 4)[:, None])
    put("cusum", np.clip(keys.cusum, 0, 2)[:, None])
    put("skew", np.clip(keys.skew, 0, 2)[:, None])
    put("heat", keys.heat)

    known = keys.samples > 0
    best = np.where(known, keys.evidence, np.inf).min(-1)
    known_pair = known.any(-1)
    put(
        "pairs",
        np.stack(
            [
                keys.valid_channels.any(-1),
                np.clip(keys.cost, 0, 4) / 4,
                np.where(known_pair, _ratio(np.where(known_pair, best, 0.0)), 0.0),
                known_pair,
                np.minimum(np.log1p(keys.samples.sum(-1)) / 4, 4),
                np.arange(N_PAIRS) == keys.last_pair[:, None],
            ],
            -1,
        ),
    )
    put("channels", np.stack([np.where(known, _ratio(keys.evidence), 0.0), known], -1))
    put("valid_channels", keys.valid_channels)
    put("valid_chunks", keys.valid_chunks)
    return out


def decode(vector: Floats) -> dict[str, object]:
    """One encoded observation (SIZE,) as named numbers in their natural units."""
    shape = part(vector, "shape")
    pairs = part(vector, "pairs")
    return {
        "ranks": round(2 ** (float(shape[0]) * 10)),
        "nodes": round(2 ** (float(shape[1]) * 10)),
        "intra": INTRA_LINKS[int(part(vector, "intra").argmax())],
        "inter": INTER_LINKS[int(part(vector, "inter").argmax())],
        "nvls": bool(part(vector, "nvls")[0]),
        "collective": int(part(vector, "collective").argmax()),
        "bytes": round(2 ** (float(part(vector, "log_bytes")[0]) * 40)),
        "pipelined": bool(part(vector, "pipelined")[0]),
        "last_time_ratio": float(np.exp(part(vector, "last_time")[0])),
        "cusum": float(part(vector, "cusum")[0]),
        "skew": float(np.exp(part(vector, "skew")[0])),
        "pairs": [dict(zip(PAIR_FIELDS, map(float, row), strict=True)) for row in pairs],
    }


def _ratio(x: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    return np.asarray(np.clip(x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
