"""Where a fit starts: a cluster of the right kind, with round numbers, and which of its numbers are free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dynamiccl_ray.calibration.samples import COLLNET, Machine
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.knobs import Algorithm

_NVLINK: Final = re.compile(r"nvlink|nvswitch|nvl|xgmi", re.IGNORECASE)
_TCP: Final = re.compile(r"tcp(?!x)|socket|ethernet|gbe", re.IGNORECASE)
_BLACKWELL: Final = re.compile(r"[GB]B?[23]00|RTX ?50", re.IGNORECASE)
_HOPPER: Final = re.compile(r"H[12]00|GH200|H800|H20", re.IGNORECASE)
_VOLTA: Final = re.compile(r"V100|T4|2080|P100", re.IGNORECASE)

# By compute capability: GB/s that a GPU gets out of its NVLinks, and that one channel copies by protocol.
_NVLINK_RATES: Final = {
    70: (120.0, (3.0, 11.0, 14.0)),
    80: (230.0, (4.5, 17.0, 22.0)),
    90: (370.0, (5.5, 20.0, 27.0)),
    100: (700.0, (8.0, 28.0, 40.0)),
}
# By compute capability: streaming multiprocessors of V100, A100, H100 and B200.
_SMS: Final = {70: 80, 80: 108, 90: 132, 100: 148}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What decides which numbers a machine has."""

    nvlink: bool
    network: bool
    tcp: bool
    one_domain: bool
    """The nodes are joined by NVLink, too."""
    nvls: bool
    in_network: bool
    compute_capability: int

    @classmethod
    def of(cls, machine: Machine) -> Hardware:
        """From the words of a table of measurements, and from what was asked for on the machine."""
        gpu, intra, inter = machine.gpu, machine.intra, machine.inter
        capability = 100 if _BLACKWELL.search(gpu) else 90 if _HOPPER.search(gpu) else 70 if _VOLTA.search(gpu) else 80
        nvlink = bool(_NVLINK.search(intra)) or not intra
        asked = set(machine.algorithm.tolist())
        switches = nvlink and capability >= 90 and int(machine.gpus_per_node.max()) > 2
        return cls(
            nvlink=nvlink,
            network=int(machine.nodes.max()) > 1,
            tcp=bool(_TCP.search(inter)),
            one_domain=nvlink and not inter,
            nvls=switches or bool(asked & {int(Algorithm.NVLS), int(Algorithm.NVLS_TREE)}),
            in_network="sharp" in inter.lower() or bool(asked & {2, 3, COLLNET}),
            compute_capability=capability,
        )

    def start(self) -> dict[str, float]:
        """Name -> value: the free numbers of the cluster, dotted as in its YAML."""
        intra_rate, copies = _NVLINK_RATES[self.compute_capability] if self.nvlink else (20.0, (2.0, 5.0, 6.0))
        values = {
            "launch_us": 7.0,
            "channel_us": 0.15,
            "intra.gpu_gb_per_s": intra_rate,
            **_each("intra.channel_gb_per_s", copies),
            **_each("intra.step_us", (1.2, 1.8, 4.0) if self.nvlink else (2.5, 4.0, 8.0)),
            **_each("chunk_us", (0.2, 0.6, 1.5)),
        }
        if self.network:
            rate = 3.0 if self.tcp else intra_rate if self.one_domain else 45.0
            values |= {
                "inter.nic_gb_per_s": rate,
                **_each("inter.connection_gb_per_s", (1.5, 2.0, 2.5) if self.tcp else copies),
                **_each("inter.proxy_gb_per_s", (rate / 3, 0.9 * rate, rate)),
                **_each("inter.step_us", (30.0, 32.0, 50.0) if self.tcp else (6.0, 8.0, 15.0)),
                "inter.post_us": 0.5,
            }
        if self.nvls:
            values |= {"nvls.gpu_gb_per_s": 0.8 * intra_rate, "nvls.channel_gb_per_s": 24.0, "nvls.step_us": 9.0}
        if self.in_network:
            values |= {"in_network.nic_gb_per_s": 45.0, "in_network.step_us": 15.0}
        return values

    def cluster(self, values: Mapping[str, float], *, name: str, gpus_per_node: int) -> Cluster:
        """The cluster with these numbers; shares (``overlap``, ``tree_share``) among them."""
        ring = {"channels": 8 if self.nvlink else 2, "intra_gb_per_s": 20.0}
        tree: dict[str, Any] = {"intra": {"kind": "nvlink" if self.nvlink else "pcie"}}
        tree |= {"name": name, "gpus_per_node": gpus_per_node, "sms": _SMS[self.compute_capability]}
        belief: dict[str, Any] = {
            "compute_capability": self.compute_capability,
            "nvswitches": 4 if self.nvls else 0,
            "channels": 16 if self.nvlink else 8,
            "path_intra": 1 if self.nvlink else 8,
            # Where GPUs have NVLink, network devices hang off the same switches.
            "path_inter": 5 if self.nvlink else 8,
            "nic_latency_us": 0.0,
            "ring": ring,
            "tree": ring,
        }
        if self.network:
            tree["inter"] = {"kind": "tcp" if self.tcp else "ib", "tier": 2, "nics": gpus_per_node}
        if self.nvls:
            belief |= {"nvls": ring, "nvls_channels": 16}
        if self.in_network:
            belief |= {"collnet": ring}
        tree["belief"] = belief
        for dotted, value in values.items():
            *sections, last = dotted.split(".")
            here = tree
            for section in sections:
                here = here.setdefault(section, {})
            here[last] = value
        return Cluster.model_validate(tree)


def _each(name: str, values: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip((f"{name}.ll", f"{name}.ll128", f"{name}.simple"), values, strict=True))
