"""A model cut into what one call can wait for: blocks of a transformer, or single layers; and those into stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One block, or one layer outside of blocks."""

    name: str
    tensors: npt.NDArray[np.int64]
    """Indices into the model's tensors, in forward order."""
    forward_us: float
    """Of one micro-batch on one GPU, after tensor parallelism."""
    sharded_bytes: float
    """Parameters that ZeRO-3 gathers: this rank's part under tensor parallelism, experts of other ranks left out."""
    is_block: bool
    exchanges_tables: bool


def stage_segments(workload: Workload, stage: int, n_stages: int) -> list[Segment]:
    """The segments of one stage of the model, in forward order.

    Blocks are spread evenly; what comes before them belongs to the first stage, what comes after to the last.
    """
    found = _segments(workload)
    if n_stages == 1:
        return found
    blocks = [i for i, s in enumerate(found) if s.is_block]
    bounds = np.linspace(0, len(blocks), n_stages + 1).round().astype(int)
    start = 0 if stage == 0 else blocks[bounds[stage]]
    stop = len(found) if stage == n_stages - 1 else blocks[bounds[stage + 1]]
    return found[start:stop]


def _segments(w: Workload) -> list[Segment]:
    net, d = w.network_model, w.degrees
    flops = net.forward_flops(w.sequence_length) * w.batch / d.tp
    names = [x.name for x in net.layers]
    if net.blocks:
        # What follows the blocks (norms, heads) is one unit: nobody gathers a norm of a few KB on its own.
        names = [name.split(".")[0] for name in names]
        names = ["head" if i and not name.startswith(("block", "embeddings")) else name for i, name in enumerate(names)]
    first = [i for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    segment_of_layer = np.cumsum(np.isin(np.arange(len(names)), first)) - 1
    owner = segment_of_layer[[t.layer for t in net.tensors]]
    held = net.elements * float(w.dtype_bytes) / d.tp
    held /= np.where([t.expert >= 0 for t in net.tensors], d.ep, 1)
    return [
        Segment(
            name=names[layer],
            tensors=np.flatnonzero(owner == i),
            forward_us=float(flops[segment_of_layer == i].sum()) / (w.gpu_tflops * 1e6),
            sharded_bytes=float(held[owner == i].sum()),
            is_block=names[layer].startswith("block"),
            exchanges_tables=names[layer] == "interaction",
        )
        for i, layer in enumerate(first)
    ]
