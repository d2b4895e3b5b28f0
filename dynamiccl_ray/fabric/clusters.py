"""Machines that the measured fabric can stand for: which rows they are, and what NCCL believes about them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dynamiccl_ray.fabric.belief import Belief
from dynamiccl_ray.fabric.communicator import CommunicatorInfo, Graph
from dynamiccl_ray.fabric.measured import Selection, Surface, read_measurements
from dynamiccl_ray.fabric.nccl_constants import PATH_NVL, PATH_PXN
from dynamiccl_ray.knobs import Algorithm, Collective

MEASURED: Final = Path(__file__).parents[1] / "data" / "measured"
"""Where the CSV files that come with the package are."""

P5EN_GPUS: Final = 8
"""GPUs of a p5en.48xlarge."""
P5EN: Final = "p5en-h200-efa"
"""The preset that describes it."""
P5EN_FILES: Final = ("aws_p5en_allreduce_2to128nodes.csv", "aws_p5en_tuner_comparison_8_16nodes.csv")
_P5EN_CHANNELS_FILE: Final = "aws_p5en_allreduce_nchannels.csv"


def p5en_all_reduce(nodes: int, *, forced_channels: bool = False) -> Surface:
    """All-reduce over all GPUs of 2, 4, 8, 16, 32, 64 or 128 nodes of 8 H200 each.

    NCCL's own choice and the vendor's tuner were measured at 8 and 16 nodes; elsewhere ``p5en_belief`` says
    what NCCL chooses. ``forced_channels`` adds the channel sweep of 4, 8 and 16 nodes. It is of another year
    and NCCL (2.30 instead of 2.27), so part of what its actions gain is the version's. Raises ConfigError for
    a number of nodes that was not measured.
    """
    files = (*P5EN_FILES, _P5EN_CHANNELS_FILE) if forced_channels else P5EN_FILES
    selection = Selection(
        collective=Collective.ALL_REDUCE, nodes=nodes, ranks=P5EN_GPUS * nodes, gpus_per_node=P5EN_GPUS
    )
    measurements = read_measurements(MEASURED / name for name in files)
    selection.of(measurements)  # Nodes that were not measured are refused before NCCL's model sees them.
    return Surface.of(measurements, selection, p5en_belief(nodes))


def p5en_belief(nodes: int) -> Belief:
    """NCCL's cost model on p5en.48xlarge nodes: 8 H200 on NVSwitch, 16 EFA devices of 200 Gb/s.

    The graphs are our description of what NCCL's search should find there, not a record of it: AWS's plugin
    shows NCCL one 400 Gb/s device per GPU, so 8 channels of 48 GB/s, the step of the search below 50 GB/s,
    which NCCL doubles to 16 channels on Hopper. The network latency of 35 us is what that plugin reports.

    With NVLS off, the choices at 4 nodes are those that NCCL 2.30.4 logged there at each of 21 sizes from
    1 KiB to 1 GiB. With NVLS on, as here and in the sweeps, NVLS tree wins at four of these, and the time of
    the pair that NCCL should choose is within 10% of that of its own choice at 24 of 35 sizes on 8 nodes and
    27 on 16. Raises ValueError for ``nodes`` below 1.
    """

    def graph(intra: float, inter: float) -> Graph:
        return Graph(
            bw_intra=intra,
            bw_inter=inter,
            channels=8,
            type_intra=PATH_NVL,
            type_inter=PATH_PXN,
            latency_inter=35.0,
            same_channels=True,
        )

    graphs = dict.fromkeys(Algorithm, graph(48, 48))
    # Each inner node of a tree sends to two others through one device.
    graphs[Algorithm.TREE] = graph(48, 24 if nodes > 2 else 48)
    graphs[Algorithm.NVLS] = graphs[Algorithm.NVLS_TREE] = graph(40, 40)
    return Belief(
        CommunicatorInfo(
            nodes=nodes,
            ranks=P5EN_GPUS * nodes,
            compute_capability=90,
            cpu_vendor="intel",
            nvswitches=4,
            collnet=False,
            nvls=True,
            tree_pattern_is_tree=False,
            graphs=graphs,
            channels=16,
        )
    )
