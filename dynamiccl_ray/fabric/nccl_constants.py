"""The numbers in NCCL 2.30.7's cost model; the formulas that use them are in ``belief.py``.

Index order is NCCL's own everywhere: algorithm (tree, ring, CollNet direct, CollNet chain, NVLS, NVLS tree,
PAT), protocol (LL, LL128, simple), GPU generation (Volta and older, Ampere, Hopper, Blackwell), and nodes
(one, two, more).
"""

from __future__ import annotations

from typing import Final

import numpy as np

# Rows of the tables that depend on how two ranks are connected.
NVLINK: Final = 0
PCI: Final = 1
NET: Final = 2

# Path types (src/graph/topo.h) that a rule compares with.
PATH_NVL: Final = 1
PATH_NVB: Final = 2
PATH_PXB: Final = 5
PATH_PXN: Final = 7
PATH_NET: Final = 10

# src/graph/tuning.cc, the tuner constants' defaults; [algorithm, protocol], us.
BASE_LATENCY_US: Final = np.array(
    [[6.8, 14.0, 8.4], [6.6, 14.0, 8.4], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [8.0, 8.0, 8.0]]
)

# src/graph/tuning.cc; one step over [NVLink | PCI | network, algorithm, protocol], us.
HARDWARE_LATENCY_US: Final = np.array(
    [
        [[0.6, 1.25, 4.0], [0.6, 1.9, 3.4], [0, 0, 3.7], [0, 0, 2.8], [0, 0, 25], [0, 0, 25], [0, 0, 4.0]],
        [[1.0, 1.9, 4.0], [1.0, 2.5, 5.7], [0, 0, 3.7], [0, 0, 2.8], [0, 0, 0], [0, 0, 0], [0, 0, 4.0]],
        [[5.0, 8.5, 14], [2.7, 4.0, 14], [0, 0, 31], [0, 0, 30], [0, 0, 18], [0, 0, 20.9], [0, 0, 14]],
    ]
)

# src/graph/tuning.cc; [generation, nodes], GB/s over all channels. Across nodes the row is the CPU vendor's
# instead: 1 for AMD and mixed, 0 for all others.
LL_MAX_GBPS: Final = np.array([[39.0, 39.0, 20.4], [87.7, 22.5, 19.0], [141.0, 45.0, 35.0], [282.0, 90.0, 70.0]])

# src/graph/tuning.cc; [generation, nodes], GB/s per channel.
RING_LL128_MAX_GBPS: Final = np.array([[20.0] * 3, [20.0] * 3, [36.7] * 3, [40.0] * 3])
TREE_LL128_MAX_GBPS: Final = np.array([[20.0] * 3, [20.0] * 3, [36.7, 36.7, 29.0], [55.6, 31.67, 20.0]])
TREE_MAX_GBPS: Final = np.array([[26.5, 18.5, 10.0], [24.0, 23.6, 17.8], [38.7, 41.4, 36.0], [70.0, 42.8, 24.0]])
NVLS_TREE_MAX_GBPS: Final = np.array([[26.5, 18.5, 10.0], [24.0, 23.6, 17.8], [0.0, 57.7, 45.5], [0.0, 96.0, 80.0]])

# src/graph/tuning.cc; share of NVLink bandwidth that NVLS gets, [generation].
NVLS_EFFICIENCY: Final = np.array([0.0, 0.0, 0.85, 0.74], np.float32)

# src/graph/tuning.cc; bandwidth factor of tree all-reduce, [protocol, floor(log2(bytes / 64))].
# fmt: off
TREE_CORRECTION: Final = np.array(
    [
        [1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5,
         0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6,
         0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5,
         0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9],
    ],
    np.float32,
)
# fmt: on
# Tree stops one entry short of the table's end, NVLS tree does not.
TREE_CORRECTION_SIZES: Final = 23
NVLS_TREE_CORRECTION_SIZES: Final = 24

# src/graph/tuning.cc: ring/simple all-reduce slows down across nodes from these bytes per channel and rank.
PLATEAU_BYTES: Final = 64
# Before Ampere, and from it on.
PLATEAU_FACTOR: Final = (1.9, 1.4)

# src/include/device.h: a batch is 1,024 B of 128 B work descriptors.
COLLECTIVES_PER_BATCH: Final = 8

# src/include/device.h.
WARP_SIZE: Final = 32
MAX_THREADS: Final = 640
MAX_DIRECT_ARITY: Final = 7
MAX_NVLS_ARITY: Final = 32

# src/graph/topo.h: a ring no faster than PCI, GB/s over all channels, gets fewer threads.
PCI_GBPS: Final = 12.0
PCI_RING_THREADS: Final = 256

# src/graph/tuning.cc with src/include/device.h: most threads of a block, [algorithm, protocol]; none for PAT.
THREADS: Final = np.array([[512, 640, 512]] * 2 + [[0, 0, 640]] * 4 + [[0, 0, 0]], np.int64)

# src/graph/tuning.cc with src/include/comm.h: bytes that make one more thread worth it, [algorithm,
# protocol]; ring/LL's is per rank.
THREAD_BYTES: Final = np.array([[8, 8, 64]] * 2 + [[8, 8, 512]] * 2 + [[8, 8, 64]] * 3, np.int64)
