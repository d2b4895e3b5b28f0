"""One GPU's compute and its communication, side by side: an event simulation of an iteration."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Messages of one iteration, all arrays of shape (messages,)."""

    layer: npt.NDArray[np.int64]
    """The message may start when the backward of this layer has ended."""
    alone_us: Floats
    """Its time while the GPU computes nothing."""
    overlapped_us: Floats
    """Its time while the GPU computes: kernels of both kinds share the multiprocessors and the host link."""


def synchronous_iteration_us(forward_us: Floats, backward_us: Floats, messages: Operations) -> float:
    """Forward, backward, and messages in the order of their gradients; the next forward waits for all of them.

    ``forward_us`` and ``backward_us`` have shape (layers,). Gradients come from the last layer to the first.
    """
    done = np.cumsum(backward_us[::-1])[::-1]
    order = np.argsort(-messages.layer, kind="stable")
    ready = done[messages.layer[order]]
    backward_end = float(done[0])
    now = 0.0
    for start, alone, overlapped in zip(
        ready.tolist(), messages.alone_us[order].tolist(), messages.overlapped_us[order].tolist(), strict=True
    ):
        now = max(now, start)
        # Beyond the end of the backward the rest of the message goes at its own speed.
        share = min(1.0, max(0.0, backward_end - now) / overlapped) if overlapped > 0 else 1.0
        now += share * overlapped + (1.0 - share) * alone
    return float(forward_us.sum()) + max(now, backward_end)


def prioritised_iteration_us(forward_us: Floats, backward_us: Floats, messages: Operations, *, warm: int = 2) -> float:
    """As above, but the message of the lowest layer goes first, and a layer's next forward waits for its own only.

    A message under way is not interrupted: messages should be small. The time of an iteration after ``warm`` others, by
    when it repeats.
    """
    n_layers = len(forward_us)
    by_layer: list[list[int]] = [[] for _ in range(n_layers)]
    for index, layer in enumerate(messages.layer.tolist()):
        by_layer[layer].append(index)
    alone, overlapped = messages.alone_us.tolist(), messages.overlapped_us.tolist()
    missing = [0] * n_layers
    waiting: list[tuple[int, int]] = []
    steps = [(layer, False) for layer in range(n_layers)] + [(layer, True) for layer in reversed(range(n_layers))]
    durations = [*forward_us.tolist(), *backward_us[::-1].tolist()]

    now, ends, step = 0.0, [0.0], 0
    remaining: float | None = None  # of the compute step under way
    sending, share = -1, 0.0  # message under way, and the part of it that is left
    while len(ends) < warm + 2:
        layer, is_backward = steps[step]
        if remaining is None and (is_backward or not missing[layer]):
            remaining = durations[step]
        if sending < 0 and waiting:
            sending, share = heapq.heappop(waiting)[1], 1.0
        message_us = 0.0
        if sending >= 0:
            message_us = overlapped[sending] if remaining is not None else alone[sending]
        elapsed = min(inf if remaining is None else remaining, share * message_us if sending >= 0 else inf)
        now += elapsed
        if sending >= 0:
            share = 0.0 if elapsed >= share * message_us else share - elapsed / message_us
            if share <= 0.0:
                missing[int(messages.layer[sending])] -= 1
                sending = -1
        if remaining is not None:
            remaining -= elapsed
            if remaining <= 0.0:
                remaining = None
                if is_backward:
                    missing[layer] = len(by_layer[layer])
                    for index in by_layer[layer]:
                        heapq.heappush(waiting, (layer, index))
                step += 1
                if step == len(steps):
                    step = 0
                    ends.append(now)
    return ends[-1] - ends[-2]
