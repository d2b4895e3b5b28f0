"""NCCL's vocabulary: collectives, algorithms, protocols, and the values each action head may take.

The numbers are NCCL's own (``ncclFunc_t``, ``NCCL_ALGO_*``, ``NCCL_PROTO_*``), so they can cross the
plugin boundary unchanged. Nothing here depends on anything else in the project.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Collective(IntEnum):
    """NCCL's ``ncclFunc_t`` for the collectives that go through the tuner."""

    BROADCAST = 0
    REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_REDUCE = 4


class Algorithm(IntEnum):
    """``NCCL_ALGO_*``; NCCL versions before 2.23 know fewer, always a prefix of these."""

    TREE = 0
    RING = 1
    COLLNET_DIRECT = 2
    COLLNET_CHAIN = 3
    NVLS = 4
    NVLS_TREE = 5
    PAT = 6


class Protocol(IntEnum):
    """``NCCL_PROTO_*``."""

    LL = 0
    LL128 = 1
    SIMPLE = 2


class Carrier(IntEnum):
    """What carries the collective; only ``NCCL`` lets the tuner write anything."""

    NCCL = 0
    INA_PASSTHROUGH = 1
    SYNTHESIZED = 2


N_COLLECTIVES: Final = len(Collective)
N_ALGORITHMS: Final = len(Algorithm)
N_PROTOCOLS: Final = len(Protocol)

# Index 0 of the pair head leaves NCCL's own algorithm and protocol alone; index 1 + 3 * algorithm + protocol
# asks for that pair.
OWN_PAIR: Final = 0
N_PAIRS: Final = 1 + N_ALGORITHMS * N_PROTOCOLS

# 0 means NCCL's own count.
CHANNEL_VALUES: Final = (0, 1, 2, 4, 8, 12, 16, 24, 32)
# 0 means NCCL's own chunk; otherwise bytes.
CHUNK_VALUES: Final = (0, *(1 << k for k in range(14, 23)))
# 0 means NCCL's own; of a communicator, not of a call.
THREAD_VALUES: Final = (0, 64, 128, 256, 512)


def pair_index(algorithm: int, protocol: int) -> int:
    """The pair head's index of (algorithm, protocol)."""
    return 1 + N_PROTOCOLS * algorithm + protocol


def pair_name(index: int) -> str:
    """``ring/ll128`` for a pair, ``nccl`` for NCCL's own choice."""
    if index == OWN_PAIR:
        return "nccl"
    algorithm, protocol = divmod(index - 1, N_PROTOCOLS)
    return f"{Algorithm(algorithm).name.lower()}/{Protocol(protocol).name.lower()}"
