"""Machines whose times are known because the test made them."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.calibration.samples import COLUMNS, Machine, read_library
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol

HARDWARE = {"gpu": "A100", "intra": "NVLink3 NVSwitch", "inter": "InfiniBand HDR"}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """A table of measurements; what a row does not give is a plain all-reduce on two nodes."""
    usual = {
        **dict.fromkeys(COLUMNS, ""),
        **HARDWARE,
        "source_id": "run",
        "collective": "all_reduce",
        "nodes": 2,
        "ranks": 16,
        "gpus_per_node": 8,
        "algo": "default",
        "proto": "default",
        "bytes": 1024,
        "time_us": 20.0,
    }
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:
            writer.writerow(usual | row)
    return path


def sweep(cluster: Cluster, nodes: Iterable[int], *, noise: float, seed: int = 0) -> Iterable[dict[str, Any]]:
    """What a sweep of ring and tree, all protocols and three channel counts, would measure on a cluster."""
    rng = np.random.default_rng(seed)
    sizes = 1 << np.arange(10, 31)
    for count, algorithm, protocol, channels in product(nodes, Algorithm, Protocol, (1, 4, 16)):
        if algorithm not in (Algorithm.RING, Algorithm.TREE):
            continue
        times = Physics(cluster, count).price_us(Collective.ALL_REDUCE, sizes, algorithm, protocol, channels)
        for size, time in zip(sizes.tolist(), times * np.exp(noise * rng.standard_normal(len(sizes))), strict=True):
            yield {
                "nodes": count,
                "ranks": count * cluster.gpus_per_node,
                "gpus_per_node": cluster.gpus_per_node,
                "algo": algorithm.name,
                "proto": protocol.name,
                "nchannels": channels,
                "bytes": size,
                "time_us": time,
            }


def machine(path: Path, rows: Iterable[dict[str, Any]]) -> Machine:
    """The one machine of a table."""
    write(path / "sweep.csv", rows)
    (only,) = read_library(path).machines
    return only
