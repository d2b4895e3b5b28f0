"""A cluster's network from a few microbenchmarks: messages between two nodes, and one all-reduce inside a node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from dynamiccl_ray.settings import Count, NotNegative, Positive, Section, read_yaml
from dynamiccl_ray.sizes import Bytes


@dataclass(frozen=True, kw_only=True)
class Link:
    """A message of N bytes takes ``alpha_us + N * us_per_byte`` (the postal model: Hockney 1994)."""

    alpha_us: float
    us_per_byte: float

    def time_us(self, nbytes: float) -> float:
        """One message, one way."""
        return self.alpha_us + nbytes * self.us_per_byte

    def gb_per_s(self, nbytes: float) -> float:
        """Achieved by one message of that size."""
        return nbytes / self.time_us(nbytes) / 1e3


class MessageTime(Section):
    """One message size of a point-to-point benchmark."""

    bytes: Bytes
    us: Positive


class NodeAllReduce(Section):
    """One all-reduce over all the GPUs of a node, with nothing else running."""

    gpus: Annotated[int, Field(ge=2)]
    bytes: Bytes
    us: Positive


class Network(Section):
    """What ``predict`` needs to know of a cluster."""

    name: str
    match: str = ""
    """How a facts file names it: part of its hardware text after the semicolon, case ignored. The name if empty."""
    between_nodes: tuple[MessageTime, ...]
    """Two sizes or more, one stream. Alpha and bandwidth are fitted to them with equal relative weight."""
    within_node: NodeAllReduce
    within_step_us: NotNegative = 7.0
    """Latency of a step between two GPUs of a node. The default is the fit of MG-WFBP's repository for 4 GPUs on PCIe,
    42 us, over its 6 steps."""

    @cached_property
    def between(self) -> Link:
        """Least squares on relative errors; alpha is never below 0."""
        nbytes = np.array([p.bytes for p in self.between_nodes])
        us = np.array([p.us for p in self.between_nodes])
        if len(nbytes) == 1:
            return Link(alpha_us=0.0, us_per_byte=float(us[0] / nbytes[0]))
        alpha, slope = np.linalg.lstsq(np.stack([1 / us, nbytes / us], axis=1), np.ones(len(us)), rcond=None)[0]
        if alpha < 0 or slope <= 0:
            alpha, slope = 0.0, float(np.exp(np.mean(np.log(us / nbytes))))
        return Link(alpha_us=float(alpha), us_per_byte=float(slope))

    @property
    def within_us_per_byte(self) -> float:
        """Time of a byte on the busiest link inside a node: all-reduce moves each byte 2(g-1)/g times over it."""
        run = self.within_node
        wire_us = run.us - 2 * (run.gpus - 1) * self.within_step_us
        return max(wire_us, 0.1 * run.us) / (2 * (run.gpus - 1) / run.gpus * run.bytes)

    @classmethod
    def from_alpha_bandwidth(
        cls, name: str, alpha_us: float, gb_per_s: float, within_node: NodeAllReduce, within_step_us: float = 7.0
    ) -> Network:
        """For a network that is known by its latency and bandwidth instead of measured points."""
        sizes = (1024, 1 << 24)
        points = tuple(MessageTime(bytes=n, us=alpha_us + n / gb_per_s / 1e3) for n in sizes)
        return cls(name=name, between_nodes=points, within_node=within_node, within_step_us=within_step_us)


class Networks(Section):
    """A file of networks."""

    networks: Annotated[tuple[Network, ...], Field(min_length=1)]
    default_gpus_per_node: Count = 4
    """Where the hardware text of a facts file does not say "N nodes x G"."""

    def find(self, hardware: str) -> Network | None:
        """The network that a hardware text names: the longest match wins, so that 100GbE is not taken for 10GbE."""
        text = hardware.rsplit(";", 1)[-1].lower()
        hits = [n for n in self.networks if (n.match or n.name).lower() in text]
        return max(hits, key=lambda n: len(n.match or n.name)) if hits else None


def load_networks(path: Path | None = None) -> Networks:
    """The networks of a YAML; by default those that ship with the package. Raises ConfigError."""
    if path is not None:
        return read_yaml(path, Networks, "networks file")
    with resources.as_file(resources.files("dynamiccl_ray") / "data" / "networks.yaml") as shipped:
        return read_yaml(shipped, Networks, "networks file")
