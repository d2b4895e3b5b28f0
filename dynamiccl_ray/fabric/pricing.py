"""The time of every action for every key, as the physical model of a cluster has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import ArrayLike

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS
from dynamiccl_ray.arrays import Float32, Float64
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.load import IDLE, Load
from dynamiccl_ray.fabric.physics import BUFFER_BYTES, Physics
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_PAIRS, N_PROTOCOLS, OWN_PAIR, Collective


def action_times_us(
    physics: Physics, collective: ArrayLike, nbytes: ArrayLike, loads: Sequence[Load] = (IDLE,)
) -> Float32:
    """(P, K, N_PAIRS, N_CHANNELS, N_CHUNKS) of keys (K,) under each of P loads, without noise.

    Only what the plugin would write and NCCL would take has a time, all else is NaN: channel counts up to the largest
    that NCCL itself uses for one of the keys, chunks that fit into half of the protocol's buffer. Raises what
    ``Physics.price_us`` does.
    """
    collectives, sizes = np.broadcast_arrays(np.atleast_1d(collective), np.atleast_1d(nbytes))
    belief = physics.belief
    choice = belief.choose(collectives, sizes)
    counts, chunks = np.array(CHANNEL_VALUES), np.array(CHUNK_VALUES)
    offered = belief.cost_table_us(collectives, sizes) >= 0
    granted = physics.grantable() & (counts <= choice.channels.max())
    fits = chunks <= BUFFER_BYTES[:, None] // 2
    allowed = offered[..., None, None] & granted[:, None, :, None] & fits[:, None, :]
    key, algorithm, protocol, channels, chunk = np.nonzero(allowed)
    own, _ = belief.channels_and_warps(sizes[key], algorithm, protocol)
    used = np.where(channels > 0, counts[channels], np.maximum(1, own))
    load = Load(**{f.name: np.array([[getattr(each, f.name)] for each in loads], np.float64) for f in fields(Load)})
    priced = physics.price_us(
        collectives[key], sizes[key], algorithm, protocol, used, chunk_bytes=chunks[chunk], load=load
    )
    times = np.full((len(loads), len(sizes), N_PAIRS, N_CHANNELS, N_CHUNKS), np.nan, np.float32)
    # A pair that the belief offers and the model has no pattern for stays NaN.
    times[:, key, 1 + N_PROTOCOLS * algorithm + protocol, channels, chunk] = priced
    own_pair = 1 + N_PROTOCOLS * choice.algorithm + choice.protocol
    times[:, :, OWN_PAIR, 0, 0] = times[:, np.arange(len(sizes)), own_pair, 0, 0]
    return times


def expected(cluster: Cluster, nodes: int, collective: ArrayLike, nbytes: ArrayLike) -> Float32:
    """(K, N_PAIRS, N_CHANNELS + N_CHUNKS) what the idle cluster's model expects: logs of the times of each pair's
    channel counts (NCCL's own chunk) and chunks (NCCL's own channels) over the time of NCCL's own choice.

    NaN for what has no time, and for NCCL's own choice: that is measured. Raises what ``Physics`` does.
    """
    physics = Physics(cluster, nodes)
    collectives, sizes = np.broadcast_arrays(np.atleast_1d(collective), np.atleast_1d(nbytes))
    log_us = np.log(action_times_us(physics, collectives, sizes)[0].astype(np.float64))
    own = log_us[:, OWN_PAIR, 0, 0]
    # Of a calibrated cluster NCCL's own choice was measured itself.
    for each in np.unique(collectives) if cluster.corrections else ():
        of = collectives == each
        own[of] = np.log(physics.time_us(Collective(each), sizes[of])[:, OWN_PAIR, 0])
    ratio: Float64 = log_us - own[:, None, None, None]
    out = np.concatenate([ratio[..., 0], ratio[:, :, 0, :]], -1)
    out[:, OWN_PAIR] = np.nan
    return out.astype(np.float32)
