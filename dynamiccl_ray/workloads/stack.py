"""What the software between the framework and the wire costs: the constants of the schedule model.

The fitted ones come from ``python -m dynamiccl_ray.workloads.fit`` on the 126 rows of Shi et al. 2020. None depends on
the model, the network or the scale; docs/workloads.md says how they fare on networks and scales left out of the fit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The fitted constants first, then settings that the benchmark scripts state."""

    overlapped_rate: float = 0.467
    """Speed of a communication kernel and its host-link traffic while the GPU computes, relative to an idle GPU."""
    push_pull: float = 1.76
    """Time of a push and a pull over the time of one way: 1 would be perfect duplex, 2 none."""
    server_message_us: float = 38.9
    """Parameter server: handling of one partition on its way through the stages of a worker."""
    negotiation_us: float = 6.78
    """All-reduce: the coordinator's work per message and rank, before a message may start."""
    fused_server_us: float = 17290.0
    """Parameter server without overlap: gathering all gradients in one buffer, and filling the pipeline."""
    hook_us: float = 488.0
    """Partition over all-reduce: the scheduler's hook and lock around one tensor, on the thread that drives the GPU."""
    reorder_us: float = 18.7
    """Partition over parameter server: the priority queue, per partition."""
    copy_us: float = 29.5
    """Fusion: one tensor's copies into and out of the merged buffer."""
    ring_leaving: float = 0.896
    """All-reduce over several nodes: time of a byte inside a node over that of a ring that stays in it. A ring that
    leaves crosses the link between the sockets once instead of twice."""

    host_gb_per_s: float = 13.0
    """Not fitted: a copy over PCIe 3.0 x16 (15.75 GB/s on the wire) between GPU and host memory."""
    partition_bytes: int = 4_096_000
    """BYTEPS_PARTITION_BYTES and, within 3%, BYTESCHEDULER_PARTITION of the benchmark."""
    credit: int = 4
    """Partitions in flight: BYTESCHEDULER_CREDIT over BYTESCHEDULER_PARTITION."""


FITTED = (
    "overlapped_rate",
    "push_pull",
    "server_message_us",
    "negotiation_us",
    "fused_server_us",
    "hook_us",
    "reorder_us",
    "copy_us",
    "ring_leaving",
)
