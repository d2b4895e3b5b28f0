"""Published figures about links and training, and what the models of this package make of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dynamiccl_ray.fabric.closed_forms import point_to_point
from dynamiccl_ray.workloads.layers import Model
from dynamiccl_ray.workloads.models import model, pretraining_bert
from dynamiccl_ray.workloads.network import Network, NodeAllReduce, load_networks
from dynamiccl_ray.workloads.schedule import SEQUENCE_LENGTH, all_reduce_costs, predict

_SHI: Final = "Shi et al. 2020, arXiv:2005.13247"
_ARITHMETIC: Final = "arithmetic on the nominal rate"

# Samples/s of one RTX 2080 Ti and the local batch, from the same benchmark.
_SINGLE: Final = {"ResNet-50": (253.1, 64), "BERT-Base": (212.8, 64), "BERT-Large": (49.0, 8)}
_V100_FP32_TFLOPS: Final = 12.0
"""Assumed: three quarters of the V100's peak of 15.7 in fp32, which large matrix products reach."""


@dataclass(frozen=True, kw_only=True)
class ReferencePoint:
    """A published value beside the model's."""

    name: str
    published: float
    model: float
    unit: str
    source: str

    @property
    def error(self) -> float:
        """Relative."""
        return self.model / self.published - 1


def reference_points() -> tuple[ReferencePoint, ...]:
    """All of them; each computed now from the shipped microbenchmarks and constants."""
    by_name = {n.match: n for n in load_networks().networks}
    tcp10, ib, tcp100 = by_name["10GbE"], by_name["100GbIB"], by_name["100GbE"]
    return (*_messages(tcp10, ib, tcp100), *_gradients_of_100_billion(), *_training(ib), *_intensities())


def intensity(net: Model) -> float:
    """I = C / D: arithmetic of one training sample over parameters, as Shi et al. 2020 count it.

    Their figures share no single convention. For ResNet-50 they fit multiply-adds, forward and twice as many backward;
    for BERT (64 tokens, with the heads of pre-training) FLOPs, two per multiply-add, forward and as many backward.
    """
    multiply_adds = float(net.forward_flops(SEQUENCE_LENGTH).sum()) / 2
    return (3 if net.unit == "sample" else 4) * multiply_adds / net.parameters


def _messages(tcp10: Network, ib: Network, tcp100: Network) -> list[ReferencePoint]:
    def rate(network: Network, nbytes: float) -> float:
        return 8 * network.between.gb_per_s(nbytes)

    rows = [
        ("16 KiB over 100 Gb/s IB", 7.85, ib.between.time_us(16384), "us"),
        ("32 KiB over 100 Gb/s IB", 10.1, ib.between.time_us(32768), "us"),
        ("16 KiB over 100 Gb/s IB, achieved", 16.7, rate(ib, 16384), "Gb/s"),
        ("1 MB over 100 Gb/s IB", 83.2, rate(ib, 1e6), "Gb/s"),
        ("16 KB over 100 GbE TCP", 4.6, rate(tcp100, 16384), "Gb/s"),
        ("1 MB over 100 GbE TCP", 16.5, rate(tcp100, 1e6), "Gb/s"),
        ("16 KB over 10 GbE TCP", 1.2, rate(tcp10, 16384), "Gb/s"),
        ("1 MB over 10 GbE TCP", 8.2, rate(tcp10, 1e6), "Gb/s"),
    ]
    return [ReferencePoint(name=n, published=p, model=m, unit=u, source=_SHI) for n, p, m, u in rows]


def _gradients_of_100_billion() -> list[ReferencePoint]:
    rows = (("1 Gb/s", 0.125, 1600.0), ("100 Gb/s", 12.5, 16.0), ("900 GB/s NVLink", 900.0, 0.22))
    return [
        ReferencePoint(
            name=f"200 GB of fp16 gradients at {name}",
            published=published,
            model=float(point_to_point(200e9, 0.0, 1e-3 / gb_per_s)) / 1e6,
            unit="s",
            source=_ARITHMETIC,
        )
        for name, gb_per_s, published in rows
    ]


def _training(ib: Network) -> list[ReferencePoint]:
    large = pretraining_bert("BERT-Large")
    costs = all_reduce_costs(ib, 1, 4)
    at_4 = (("ResNet-50", 4, 4.0), ("BERT-Base", 4, 3.1), ("BERT-Large", 4, 1.2))
    speedups = (*at_4, ("ResNet-50", 32, 31.6), ("BERT-Base", 32, 23.2))
    rows = [
        (
            "BERT-Large, all-reduce on 4 RTX 2080 Ti",
            441.0,
            (costs.latency_us + costs.us_per_byte * 4 * large.parameters) / 1e3,
            "ms",
        ),
        *(
            (f"{name} on {gpus} GPUs, best schedule", published, _best_speedup(name, ib, gpus), "x")
            for name, gpus, published in speedups
        ),
        ("BERT-Large on 4 V100 NVLink, batch 128, WFBP", 3.82, _v100_speedup(large), "x"),
    ]
    return [ReferencePoint(name=n, published=p, model=m, unit=u, source=_SHI) for n, p, m, u in rows]


def _best_speedup(name: str, network: Network, gpus: int) -> float:
    """Of the three schedules that are best somewhere in the published rows on this network."""
    single, batch = _SINGLE[name]
    return max(
        predict(name, schedule, network, gpus // 4, 4, single, batch) / single
        for schedule in ("WFBP-PS", "MG-WFBP", "ByteScheduler-PS")
    )


def _v100_speedup(large: Model) -> float:
    """Assumed, besides the compute: the ring moves 50 GB/s over NVLink, and a step takes 3 us."""
    nbytes = 4.0 * large.parameters
    ring_us = 1.5 * nbytes / 50e3
    nvlink = Network(
        name="4 x V100 NVLink",
        between_nodes=load_networks().networks[0].between_nodes,
        within_node=NodeAllReduce(gpus=4, bytes=round(nbytes), us=ring_us + 6 * 3.0),
        within_step_us=3.0,
    )
    single = _V100_FP32_TFLOPS * 1e12 / (3 * float(large.forward_flops(SEQUENCE_LENGTH).sum()))
    return predict("BERT-Large", "WFBP-A2A", nvlink, 1, 4, single, 128) / single


def _intensities() -> list[ReferencePoint]:
    rows = (
        (model("ResNet-50"), 470.0),
        (pretraining_bert("BERT-Base"), 249.0),
        (pretraining_bert("BERT-Large"), 248.0),
    )
    return [
        ReferencePoint(name=f"intensity of {net.name}", published=published, model=intensity(net), unit="", source=_SHI)
        for net, published in rows
    ]
