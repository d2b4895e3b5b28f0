"""Prices the rows of a machine: the physical model, and what its equations leave of the measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.calibration.samples import COLLNET, FREE, Machine
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.corrections import RatioCurve, blended, usual_variant
from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.knobs import N_ALGORITHMS, N_PROTOCOLS, Algorithm

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

# Of the pairs in the order in which all of them are priced.
_ALGORITHM: Final = np.arange(N_ALGORITHMS * N_PROTOCOLS) // N_PROTOCOLS
_PROTOCOL: Final = np.arange(N_ALGORITHMS * N_PROTOCOLS) % N_PROTOCOLS


def scales(machine: Machine) -> list[tuple[int, int]]:
    """(nodes, GPUs per node) that the rows have, ascending."""
    return sorted(set(zip(machine.nodes.tolist(), machine.gpus_per_node.tolist(), strict=True)))


@dataclass(frozen=True, eq=False)
class Rows:
    """A machine's rows, laid out once to be priced many times."""

    machine: Machine
    parts: tuple[tuple[int, int, Int64, Int64, NDArray[np.bool_]], ...]
    """Per scale: nodes, GPUs per node, rows (r,), channels and admissible pairs, both (r, 21)."""

    @classmethod
    def of(cls, machine: Machine, cluster: Cluster) -> Rows:
        """``cluster`` only says how many channels NCCL gives a message where none were asked for."""
        parts = []
        for nodes, local in scales(machine):
            rows = np.flatnonzero((machine.nodes == nodes) & (machine.gpus_per_node == local))
            belief = at_scale(cluster, local).nccl_belief(nodes)
            asked = machine.channels[rows, None]
            own, _ = belief.channels_and_warps(machine.nbytes[rows, None], _ALGORITHM, _PROTOCOL)
            algorithm, protocol = machine.algorithm[rows, None], machine.protocol[rows, None]
            collnet = (_ALGORITHM == Algorithm.COLLNET_DIRECT) | (_ALGORITHM == Algorithm.COLLNET_CHAIN)
            fits = (algorithm == FREE) | (algorithm == _ALGORITHM) | ((algorithm == COLLNET) & collnet)
            fits &= (protocol == FREE) | (protocol == _PROTOCOL)
            parts.append((nodes, local, rows, np.where(asked > 0, asked, np.maximum(1, own)), fits))
        return cls(machine, tuple(parts))

    def price_us(self, cluster: Cluster) -> Float64:
        """(rows,) times; NaN where the cluster has nothing of the kind.

        Where NCCL chose, the fastest it could have chosen: what its search found on the machine is not known, and
        its choice is close to the best far more often than not.
        """
        machine, times = self.machine, np.full(len(self.machine), np.nan)
        for nodes, local, rows, channels, fits in self.parts:
            priced = Physics(at_scale(cluster, local), nodes).price_us(
                machine.collective[rows, None], machine.nbytes[rows, None], _ALGORITHM, _PROTOCOL, channels
            )
            best = np.where(fits & np.isfinite(priced), priced, np.inf).min(1)
            times[rows] = np.where(np.isfinite(best), best, np.nan)
        return times


def at_scale(cluster: Cluster, gpus_per_node: int) -> Cluster:
    """The cluster with another number of GPUs in each node, and a device for each."""
    if cluster.gpus_per_node == gpus_per_node:
        return cluster
    inter = cluster.inter and cluster.inter.model_copy(update={"nics": gpus_per_node})
    return cluster.model_copy(update={"gpus_per_node": gpus_per_node, "inter": inter})


# Of what is written down: 0.0001 % of a time.
_DIGITS: Final = 6


def curves_of(machine: Machine, modelled_us: Float64, variants: dict[str, str]) -> list[RatioCurve]:
    """What the model leaves of the rows, medians over repeats."""
    log_ratio = np.log(machine.time_us / modelled_us)
    cells: dict[tuple[str, int, str, int, int], dict[int, list[float]]] = {}
    for *key, size, ratio in zip(
        (variants[source] for source in machine.source.tolist()),
        machine.collective.tolist(),
        machine.settings.tolist(),
        machine.nodes.tolist(),
        machine.gpus_per_node.tolist(),
        machine.nbytes.tolist(),
        log_ratio.tolist(),
        strict=True,
    ):
        cells.setdefault(tuple(key), {}).setdefault(size, []).append(ratio)
    return [
        RatioCurve(
            variant=variant,
            collective=collective,
            setting=setting,
            nodes=nodes,
            gpus_per_node=local,
            log2_bytes=tuple(round(float(np.log2(size)), _DIGITS) for size in sorted(sizes)),
            log_ratio=tuple(round(float(np.median(sizes[size])), _DIGITS) for size in sorted(sizes)),
        )
        for (variant, collective, setting, nodes, local), sizes in sorted(cells.items())
    ]


def corrections(machine: Machine, curves: Sequence[RatioCurve], variants: dict[str, str]) -> Float64:
    """(rows,) logs to add to the modelled ones; 0 for a setting that was never measured."""
    known: dict[tuple[str, int, str], list[RatioCurve]] = {}
    for curve in curves:
        known.setdefault((curve.variant, curve.collective, curve.setting), []).append(curve)
    usual = usual_variant(curves)
    rows: dict[tuple[str, int, str], list[int]] = {}
    for row, (source, collective, setting) in enumerate(
        zip(machine.source.tolist(), machine.collective.tolist(), machine.settings.tolist(), strict=True)
    ):
        rows.setdefault((variants.get(source, usual), collective, setting), []).append(row)
    logs = np.zeros(len(machine))
    for key, members in rows.items():
        if key not in known:
            continue
        index = np.array(members)
        x, nodes, local = np.log2(machine.nbytes[index]), machine.nodes[index], machine.gpus_per_node[index]
        logs[index] = blended(known[key], x, nodes, local)
    return logs


# Runs that differ by more than this where both were measured, in the median of logs, are not repeats of each other.
_SAME: Final = 0.1
_Run = dict[tuple[object, ...], list[tuple[float, float]]]
"""Setting and scale -> logs of sizes and of times."""


def variants_of(machine: Machine) -> dict[str, str]:
    """Source -> the first source of those that agree with it.

    A file may hold runs under settings that its columns do not show (a graph file, a patched buffer size). Runs are
    compared wherever one has a size within the range of the other, under one setting at one scale; runs that share
    nothing are taken to agree.
    """
    runs: dict[str, _Run] = {}
    for source, size, time, *key in zip(
        machine.source.tolist(),
        np.log2(machine.nbytes).tolist(),
        np.log(machine.time_us).tolist(),
        machine.collective.tolist(),
        machine.nodes.tolist(),
        machine.gpus_per_node.tolist(),
        machine.settings.tolist(),
        strict=True,
    ):
        runs.setdefault(source, {}).setdefault(tuple(key), []).append((size, time))
    same_as: dict[str, str] = {}
    # Of each variant all that its sources measured: logs have one setting each, and the first knows nothing of others'.
    variants: dict[str, _Run] = {}
    for source in sorted(runs):
        same_as[source] = next((v for v, known in variants.items() if _agree(runs[source], known)), source)
        variant = variants.setdefault(same_as[source], {})
        for setting, measured in runs[source].items():
            variant.setdefault(setting, []).extend(measured)
    return same_as


def _agree(ours: _Run, theirs: _Run) -> bool:
    gaps = [
        gap
        for key in ours.keys() & theirs.keys()
        for gap in _gaps(ours[key], theirs[key]) + _gaps(theirs[key], ours[key])
    ]
    return not gaps or float(np.median(gaps)) < _SAME


def _gaps(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> list[float]:
    """Differences of log time at our sizes that lie within theirs, theirs straight between their sizes."""
    sizes, times = np.array(sorted(theirs)).T
    x, y = np.array(ours).T
    inside = (x >= sizes[0]) & (x <= sizes[-1])
    return [float(gap) for gap in np.abs(np.interp(x[inside], sizes, times) - y[inside])]
