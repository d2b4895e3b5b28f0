"""What the equations leave of measured times: curves of the log of measured over modelled time.

``calibration`` finds them. A cluster that carries them is priced by the equations times these ratios.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.knobs import N_ALGORITHMS, N_PROTOCOLS, Algorithm, Protocol
from dynamiccl_ray.settings import Count, Section

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

OWN: Final = "nccl"
"""The setting of what was left to NCCL."""
_ANY: Final = "any"
_COLLNET: Final = "collnet"
_MOST_CHANNELS: Final = 64


class RatioCurve(Section):
    """Log of measured over modelled time by size, of one setting at one scale."""

    variant: str = ""
    """Which of the machine's runs; runs that disagree are kept apart."""
    collective: int
    setting: str
    """``ring/ll128``, with the number of channels if one was asked for (``ring/ll128/8``); ``any`` for an algorithm or
    a protocol that was NCCL's choice; ``nccl`` for all of it."""
    nodes: Count
    gpus_per_node: Count
    log2_bytes: tuple[float, ...]
    log_ratio: tuple[float, ...]

    @cached_property
    def _points(self) -> tuple[Float64, Float64]:
        return np.array(self.log2_bytes), np.array(self.log_ratio)

    def at(self, log2_bytes: Float64) -> Float64:
        """Straight between sizes, level beyond them."""
        return np.asarray(np.interp(log2_bytes, *self._points))

    def distance2(self, log2_bytes: Float64, nodes: Int64 | int, gpus_per_node: Int64 | int) -> Float64:
        """Squared octaves from where the curve was measured; four octaves of size count as one of scale."""
        beyond = np.maximum(0, np.maximum(self.log2_bytes[0] - log2_bytes, log2_bytes - self.log2_bytes[-1])) / 4
        apart = np.log2(nodes / self.nodes) ** 2 + np.log2(gpus_per_node / self.gpus_per_node) ** 2
        return np.asarray(apart + beyond**2)


def blended(
    curves: Sequence[RatioCurve], log2_bytes: Float64, nodes: Int64 | int, gpus_per_node: Int64 | int
) -> Float64:
    """Logs to add to modelled ones, of the shape of ``log2_bytes``, from the curves of one setting at several scales.

    Between and beyond the measured scales the curves are weighted by the inverse fourth power of their distance
    (Shepard 1968), so that a scale that was measured keeps its own curve.
    """
    distance2 = np.stack([curve.distance2(log2_bytes, nodes, gpus_per_node) for curve in curves])
    weight = 1 / np.maximum(distance2, 1e-9) ** 2
    return np.asarray((weight * np.stack([curve.at(log2_bytes) for curve in curves])).sum(0) / weight.sum(0))


def usual_variant(curves: Sequence[RatioCurve]) -> str:
    """The one that most was measured of."""
    counts: dict[str, int] = {}
    for curve in curves:
        counts[curve.variant] = counts.get(curve.variant, 0) + len(curve.log2_bytes)
    return max(counts, key=lambda variant: counts[variant], default="")


class Corrections:
    """The curves of one variant of a machine, by what they are of, for one communicator."""

    def __init__(self, curves: Sequence[RatioCurve], nodes: int, gpus_per_node: int) -> None:
        self._scale: Final = (nodes, gpus_per_node)
        self._own: Final[dict[int, list[RatioCurve]]] = {}
        # By (collective, algorithm, protocol), then by channels that were asked for: 0 for none.
        self._pairs: Final[dict[tuple[int, int, int], dict[int, list[RatioCurve]]]] = {}
        for curve in curves:
            if curve.setting == OWN:
                self._own.setdefault(curve.collective, []).append(curve)
        # A pair that was forced itself goes before one of which half was.
        for half in (False, True):
            found: dict[tuple[int, int, int], dict[int, list[RatioCurve]]] = {}
            for curve in curves:
                parts = curve.setting.split("/")
                if len(parts) < 2 or (parts[0] in (_ANY, _COLLNET) or parts[1] == _ANY) != half:
                    continue
                asked = int(parts[2]) if len(parts) > 2 else 0
                for pair in _pairs(parts[0], parts[1]):
                    found.setdefault((curve.collective, *pair), {}).setdefault(asked, []).append(curve)
            for key, of in found.items():
                self._pairs.setdefault(key, of)

    def log_ratio(self, collective: Any, nbytes: Any, algorithm: Any, protocol: Any, channels: Any) -> Float64:
        """To add to the logs of the equations' times; the arguments broadcast. 0 for a pair that was never measured.

        Where another number of channels was asked for, the curve of NCCL's own number holds, or else the nearest.
        """
        collective, nbytes, algorithm, protocol, channels = np.broadcast_arrays(
            collective, nbytes, algorithm, protocol, channels
        )
        codes = ((collective * N_ALGORITHMS + algorithm) * N_PROTOCOLS + protocol) * (_MOST_CHANNELS + 1) + channels
        logs, x = np.zeros(codes.shape), np.log2(np.asarray(nbytes, np.float64))
        for code in np.unique(codes).tolist():
            rest, used = divmod(code, _MOST_CHANNELS + 1)
            rest, p = divmod(rest, N_PROTOCOLS)
            of, a = divmod(rest, N_ALGORITHMS)
            if asked := self._pairs.get((of, a, p)):
                curves = asked.get(used) or asked.get(0) or asked[min(asked, key=lambda n: abs(np.log2(n / used)))]
                here = codes == code
                logs[here] = blended(curves, x[here], *self._scale)
        return logs

    def own_log_ratio(self, collective: int, nbytes: Any) -> Float64 | None:
        """Of what NCCL itself chooses over the fastest that it could, by the equations; None if never measured."""
        curves = self._own.get(collective)
        return blended(curves, np.log2(np.asarray(nbytes, np.float64)), *self._scale) if curves else None


def _pairs(algorithm: str, protocol: str) -> list[tuple[int, int]]:
    algorithms = (
        list(Algorithm)
        if algorithm == _ANY
        else [Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN]
        if algorithm == _COLLNET
        else [Algorithm[algorithm.upper()]]
    )
    protocols = list(Protocol) if protocol == _ANY else [Protocol[protocol.upper()]]
    return [(int(a), int(p)) for a in algorithms for p in protocols]
