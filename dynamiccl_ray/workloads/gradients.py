"""Data-parallel exchange of one stage: which gradients travel together, when they are ready, and with whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.workloads.workload import Workload

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Arrays of shape (messages,), in the order in which they may start."""

    nominal_bytes: Floats
    effective_bytes: Floats
    ready_us: Floats
    """Since the stage's last backward began."""
    critical: npt.NDArray[np.bool_]


def messages(
    workload: Workload, tensors: npt.NDArray[np.int64], ready_us: Floats, first: npt.NDArray[np.bool_]
) -> Messages:
    """Groups the gradients of ``tensors`` (indices into the model's, in backward order), ready at ``ready_us``.

    ``first`` marks tensors of the stage's first segment, whose parameters the next forward needs first. Averages of
    parameters (local-sgd, fedavg, gossip) exist only after the step, so none of them is ready before the end.
    """
    how, model = workload.gradients, workload.network_model
    shapes = tuple(model.tensors[i].shape for i in tensors)
    nominal = model.elements[tensors].astype(np.float64) * workload.dtype_bytes
    effective = workload.compression.effective_bytes(shapes, workload.dtype_bytes)
    if how.schedule == "partitioned":
        pieces = np.ceil(nominal / how.partition_bytes).astype(np.int64)
        found = Messages(
            nominal_bytes=np.repeat(nominal / pieces, pieces),
            effective_bytes=np.repeat(effective / pieces, pieces),
            ready_us=np.repeat(ready_us, pieces),
            critical=np.repeat(first, pieces),
        )
    else:
        if how.schedule == "wfbp":
            bucket = np.arange(len(tensors))
        elif how.schedule == "bsp":
            bucket = np.zeros(len(tensors), dtype=np.int64)
        else:
            bucket = _buckets(nominal, how.bucket_bytes)
        n = int(bucket[-1]) + 1 if len(bucket) else 0
        last = np.searchsorted(bucket, np.arange(n), side="right") - 1
        found = Messages(
            nominal_bytes=np.bincount(bucket, weights=nominal, minlength=n).astype(np.float64),
            effective_bytes=np.bincount(bucket, weights=effective, minlength=n).astype(np.float64),
            ready_us=ready_us[last],
            critical=np.bincount(bucket, weights=first, minlength=n) > 0,
        )
    if not overlaps(workload) and len(found.ready_us):
        end = np.full(len(found.ready_us), ready_us.max())
        return Messages(
            nominal_bytes=found.nominal_bytes,
            effective_bytes=found.effective_bytes,
            ready_us=end,
            critical=np.ones(len(end), dtype=np.bool_),
        )
    return found


def overlaps(workload: Workload) -> bool:
    """Whether messages start during the backward."""
    return workload.gradients.schedule != "bsp" and workload.sync.mode in ("bsp", "ssp", "asp", "hybrid")


def _buckets(nbytes: Floats, bucket_bytes: float) -> npt.NDArray[np.int64]:
    """A bucket is closed by the tensor that fills it, as PyTorch's DDP does."""
    found = np.empty(len(nbytes), dtype=np.int64)
    bucket, held = 0, 0.0
    for i, size in enumerate(nbytes.tolist()):
        found[i] = bucket
        held += size
        if held >= bucket_bytes:
            bucket, held = bucket + 1, 0.0
    return found
