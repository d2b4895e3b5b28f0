"""Clusters that nobody has described: machines, links and what NCCL believes of them, drawn from wide ranges.

What is learned or chosen with presets in view may fit presets alone. These are for judging only; nothing learns from
them.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np

from dynamiccl_ray.fabric.cluster_config import Cluster

# By the link inside a node: what a GPU can send over it, in GB/s, and steps of LL over it, in us.
_INTRA: Final = {"nvlink": ((40, 800), (0.5, 2.0)), "c2c": ((40, 400), (0.7, 2.5)), "pcie": ((3, 50), (1.5, 5.0))}
# By the network: what one device can send, steps of LL, work for one more connection, and what a lost packet costs.
_INTER: Final = {
    "ib": ((5, 100), (3, 12), (0.2, 1.0), (8, 32)),
    "roce": ((2, 50), (5, 15), (0.3, 1.5), (8, 64)),
    "efa": ((5, 50), (10, 25), (0.5, 2.0), (30, 100)),
    "slingshot": ((10, 50), (5, 15), (0.3, 1.5), (8, 32)),
    "tcp": ((0.1, 25), (15, 60), (1.0, 5.0), (100, 400)),
}
_COMPUTE: Final = (70, 75, 80, 86, 89, 90, 100, 120)
_NVLS_FROM: Final = 90
# What NCCL believes of a link, over what it is: its search knows steps of speed, not what is left after protocols,
# and nothing of sockets.
_BELIEVED: Final = (0.6, 1.4)


def anywhere(rng: np.random.Generator, name: str) -> Cluster:
    """A cluster of at least one GPU a node, with a network."""
    intra: Literal["nvlink", "c2c", "pcie"] = rng.choice(["nvlink", "c2c", "pcie"], p=[0.5, 0.15, 0.35])
    inter: str = rng.choice(list(_INTER))
    gpus = int(rng.choice([1, 2, 4, 8, 16]))
    nics = int(2 ** rng.integers(0, np.log2(gpus) + 1))
    gpu_rate, gpu_step = _INTRA[intra]
    nic_rate, nic_step, post, recovery = _INTER[inter]
    gpu, nic = _log(rng, gpu_rate), _log(rng, nic_rate)
    compute = int(rng.choice(_COMPUTE))
    nvls = bool(intra == "nvlink" and compute >= _NVLS_FROM and gpus >= 4 and rng.random() < 0.7)
    collnet = bool(inter in ("ib", "roce") and rng.random() < 0.25)
    # Of all devices, shared by all channels.
    search, channels = rng.uniform(*_BELIEVED), int(2 ** rng.integers(0, 5))
    inside, between = gpu * search / channels, nic * nics * search / channels
    ring = {"channels": channels, "intra_gb_per_s": inside, "inter_gb_per_s": between}
    said: dict[str, Any] = {
        "name": name,
        "gpus_per_node": gpus,
        "sms": int(rng.integers(60, 160)),
        "intra": {
            "kind": intra,
            "gpu_gb_per_s": gpu,
            "channel_gb_per_s": _rates(rng, min(gpu, _log(rng, (4, 35)))),
            "step_us": _steps(rng, _log(rng, gpu_step)),
        },
        "inter": {
            "kind": inter,
            "tier": int(rng.integers(2, 4)),
            "nics": nics,
            "nic_gb_per_s": nic,
            "connection_gb_per_s": _rates(rng, min(nic, _log(rng, (1, 35)))),
            "proxy_gb_per_s": _rates(rng, nic * rng.uniform(0.7, 1)),
            "step_us": _steps(rng, _log(rng, nic_step)),
            "post_us": _log(rng, post),
            "recovery_us": _log(rng, recovery),
        },
        "launch_us": _log(rng, (4, 12)),
        "channel_us": _log(rng, (0.05, 0.4)),
        "chunk_us": _steps(rng, _log(rng, (0.1, 0.4))),
        "overlap": rng.uniform(0.2, 0.8),
        "tree_share": rng.uniform(0.4, 0.9),
        "belief": {
            "compute_capability": compute,
            "cpu_vendor": rng.choice(["intel", "amd", "arm"]),
            "nvswitches": int(nvls) * 4,
            "channels": max(2, min(32, channels * 2 ** int(rng.integers(0, 3)))),
            "path_intra": {"nvlink": 1, "c2c": 1, "pcie": int(rng.choice([4, 5, 8, 9]))}[intra],
            "path_inter": int(rng.choice([4, 5, 7, 8])),
            "nic_latency_us": 0.0 if inter == "tcp" else rng.uniform(0, 5),
            "ring": ring,
            "tree": {**ring, "inter_gb_per_s_beyond_2_nodes": between / rng.choice([1, 2])},
        },
    }
    if nvls:
        said["nvls"] = {
            "gpu_gb_per_s": gpu * rng.uniform(0.6, 0.95),
            "channel_gb_per_s": _log(rng, (12, 35)),
            "step_us": _log(rng, (5, 14)),
        }
        said["belief"] |= {"nvls": {**ring, "intra_gb_per_s": inside * 1.2}, "nvls_channels": 16}
    if collnet:
        said["in_network"] = {"nic_gb_per_s": nic * rng.uniform(0.5, 0.9), "step_us": _log(rng, (8, 40))}
        said["belief"]["collnet"] = ring
    return Cluster.model_validate(said)


def _log(rng: np.random.Generator, between: tuple[float, float]) -> float:
    """Log-uniform."""
    return float(np.exp(rng.uniform(*np.log(between))))


def _rates(rng: np.random.Generator, simple: float) -> dict[str, float]:
    """LL sends as many flags as data, and waits for both; LL128 one in sixteen."""
    ll = rng.uniform(0.12, 0.5)
    return {"ll": simple * ll, "ll128": simple * rng.uniform(max(ll, 0.45), 15 / 16), "simple": simple}


def _steps(rng: np.random.Generator, ll: float) -> dict[str, float]:
    ll128 = ll * rng.uniform(1.05, 2)
    return {"ll": ll, "ll128": ll128, "simple": ll128 * rng.uniform(1.2, 3)}
