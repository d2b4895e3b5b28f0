"""Iteration time of data-parallel training under the seven schedules that Shi et al. 2020 compare.

Compute: the published single-GPU time, a third of it forward, spread over the layers by their FLOPs. A message costs a
latency and the slower of two stages that work at the same time, the links inside the nodes and the network. Ring
all-reduce moves 2(n-1)/n of the bytes through both; a parameter server first reduces inside each node, copies through
the host, and pushes and pulls every byte once per node, to as many servers as there are nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.workloads.fusion import merge
from dynamiccl_ray.workloads.layers import Model
from dynamiccl_ray.workloads.models import model as named_model
from dynamiccl_ray.workloads.models import pretraining_bert
from dynamiccl_ray.workloads.network import Network
from dynamiccl_ray.workloads.stack import Stack
from dynamiccl_ray.workloads.timeline import (
    Floats,
    Operations,
    prioritised_iteration_us,
    synchronous_iteration_us,
)

Schedule = Literal["BSP-PS", "BSP-A2A", "WFBP-PS", "WFBP-A2A", "MG-WFBP", "ByteScheduler-PS", "ByteScheduler-A2A"]
SCHEDULES: Final[tuple[Schedule, ...]] = get_args(Schedule)
DEFAULT_STACK: Final = Stack()
SEQUENCE_LENGTH: Final = 64
"""Of the BERT benchmark. It only shifts work between layers: their sum is the measured time."""


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """One message of N bytes: ``latency_us`` and the slower of the two stages."""

    latency_us: float
    node_us_per_byte: float
    network_us_per_byte: float
    overlapped_rate: float

    @property
    def us_per_byte(self) -> float:
        return max(self.node_us_per_byte, self.network_us_per_byte)

    def operations(self, layer: npt.NDArray[np.int64], nbytes: Floats, messages: Floats | float = 1.0) -> Operations:
        """``messages``: into how many pieces each is cut, each of which costs the latency. The network does not care
        what the GPU does; the kernels that start a message, and the links inside the node, do."""
        latency = self.latency_us * np.asarray(messages, dtype=np.float64)
        overlapped = np.maximum(self.node_us_per_byte / self.overlapped_rate, self.network_us_per_byte) * nbytes
        return Operations(
            layer=layer,
            alone_us=latency + self.us_per_byte * nbytes,
            overlapped_us=latency / self.overlapped_rate + overlapped,
        )


def all_reduce_costs(network: Network, nodes: int, gpus_per_node: int, stack: Stack = DEFAULT_STACK) -> _Costs:
    """Bandwidth of a ring over all ranks; latency of trees between nodes and chains inside, and of the negotiation."""
    ranks = nodes * gpus_per_node
    passes = 2 * (ranks - 1) / ranks
    inside = network.within_us_per_byte * (stack.ring_leaving if nodes > 1 else 1.0)
    chain_us = 2 * (gpus_per_node - 1) * network.within_step_us
    return _Costs(
        latency_us=stack.negotiation_us * ranks + chain_us + 2 * log2(nodes) * network.between.alpha_us,
        node_us_per_byte=passes * inside if gpus_per_node > 1 else 0.0,
        network_us_per_byte=passes * network.between.us_per_byte if nodes > 1 else 0.0,
        overlapped_rate=stack.overlapped_rate,
    )


def server_costs(network: Network, nodes: int, gpus_per_node: int, stack: Stack = DEFAULT_STACK) -> _Costs:
    """One partition: reduce-scatter and all-gather inside the node, a copy through the host, push and pull."""
    inside = 2 * (gpus_per_node - 1) / gpus_per_node * network.within_us_per_byte
    return _Costs(
        latency_us=stack.server_message_us,
        node_us_per_byte=inside + (1e-3 / stack.host_gb_per_s if nodes > 1 else 0.0),
        network_us_per_byte=stack.push_pull * network.between.us_per_byte if nodes > 1 else 0.0,
        overlapped_rate=stack.overlapped_rate,
    )


def iteration_us(
    model: Model,
    schedule: Schedule,
    network: Network,
    *,
    nodes: int,
    gpus_per_node: int,
    compute_us: float,
    dtype_bytes: int = 4,
    stack: Stack = DEFAULT_STACK,
) -> float:
    """One iteration; ``compute_us`` is forward and backward of one GPU on its own."""
    if nodes * gpus_per_node == 1:
        return compute_us
    flops = model.forward_flops(SEQUENCE_LENGTH)
    forward = flops / flops.sum() * compute_us / 3
    backward = 2 * forward
    layer = np.array([t.layer for t in model.tensors], dtype=np.int64)
    nbytes: Floats = model.elements.astype(np.float64) * dtype_bytes
    pieces = np.ceil(nbytes / stack.partition_bytes)
    first = np.zeros(1, dtype=np.int64)
    whole = nbytes.sum(keepdims=True)
    reduce = all_reduce_costs(network, nodes, gpus_per_node, stack)
    server = server_costs(network, nodes, gpus_per_node, stack)
    match schedule:
        case "BSP-A2A":
            return synchronous_iteration_us(forward, backward, reduce.operations(first, whole))
        case "BSP-PS":
            messages = server.operations(first, whole, np.ceil(whole / stack.partition_bytes))
            return synchronous_iteration_us(forward, backward, messages) + stack.fused_server_us
        case "WFBP-A2A":
            return synchronous_iteration_us(forward, backward, reduce.operations(layer, nbytes))
        case "WFBP-PS":
            # First come, first served: the last gradient finds a partition in service and waits, on average, for half
            # of it. Priorities spare the first layers that.
            wait_us = 0.5 * stack.partition_bytes * server.us_per_byte
            return synchronous_iteration_us(forward, backward, server.operations(layer, nbytes, pieces)) + wait_us
        case "MG-WFBP":
            order = np.argsort(-layer, kind="stable")
            ready = np.cumsum(backward[::-1])[::-1][layer[order]]
            last = merge(ready, nbytes[order], reduce.latency_us, reduce.us_per_byte)
            merged = np.diff(np.cumsum(nbytes[order])[last], prepend=0.0)
            messages = reduce.operations(layer[order][last], merged)
            return synchronous_iteration_us(forward, backward, messages) + stack.copy_us * len(nbytes)
        case "ByteScheduler-PS":
            # The benchmark turns on the server's priority queue; its optimizer still waits for every parameter.
            messages = server.operations(layer, nbytes, pieces)
            reorder = stack.reorder_us * pieces
            queued = Operations(
                layer=layer,
                alone_us=messages.alone_us + reorder,
                overlapped_us=messages.overlapped_us + reorder,
            )
            return synchronous_iteration_us(forward, backward, queued)
        case "ByteScheduler-A2A":
            count = pieces.astype(np.int64)
            hooks = stack.hook_us * np.bincount(layer, minlength=len(forward))
            # ``credit`` partitions are in flight, so their latencies overlap.
            cut = reduce.operations(np.repeat(layer, count), np.repeat(nbytes / pieces, count), 1 / stack.credit)
            return prioritised_iteration_us(forward + hooks / 3, backward + 2 * hooks / 3, cut)


def predict(
    model: str,
    schedule: Schedule,
    network: Network,
    nodes: int,
    gpus_per_node: int,
    single_gpu_samples_per_s: float,
    batch: int,
    *,
    stack: Stack = DEFAULT_STACK,
) -> float:
    """Samples per second of the whole cluster, with ``batch`` samples per GPU and fp32 gradients.

    ``model`` is a name of ``MODEL_NAMES``; BERT is taken with the heads of pre-training. Raises ConfigError.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"no schedule is called {schedule!r}; there are {', '.join(SCHEDULES)}")
    if min(nodes, gpus_per_node, batch) < 1 or single_gpu_samples_per_s <= 0:
        raise ConfigError(
            f"nodes = {nodes}, gpus_per_node = {gpus_per_node}, batch = {batch}, "
            f"single_gpu_samples_per_s = {single_gpu_samples_per_s}: all must be positive"
        )
    network_model = pretraining_bert(model) if model.startswith("BERT-") else named_model(model)
    compute_us = batch / single_gpu_samples_per_s * 1e6
    us = iteration_us(
        network_model, schedule, network, nodes=nodes, gpus_per_node=gpus_per_node, compute_us=compute_us, stack=stack
    )
    return nodes * gpus_per_node * batch / us * 1e6
