"""Other clusters of the same kind: domain randomisation around a preset."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiccl_ray.fabric.cluster_config import Cluster


def randomised(cluster: Cluster, rng: np.random.Generator, spread: float) -> Cluster:
    """The cluster with each of its rates and latencies times a log-normal factor of its own.

    ``spread`` is the standard deviation of the factors' logs. Counts, topology and what NCCL believes stay: NCCL's
    model does not know that two clusters of a kind differ. Source: Tobin et al. 2017, "Domain randomization".
    """
    fields = cluster.model_dump()
    belief = fields.pop("belief")
    return Cluster.model_validate({**_scaled(fields, rng, spread, physical=False), "belief": belief})


def _scaled(value: Any, rng: np.random.Generator, spread: float, *, physical: bool) -> Any:
    if isinstance(value, dict):
        return {
            name: _scaled(field, rng, spread, physical=physical or name.endswith(("_us", "gb_per_s")))
            for name, field in value.items()
        }
    if isinstance(value, tuple | list):
        return [_scaled(item, rng, spread, physical=physical) for item in value]
    return value * float(np.exp(spread * rng.standard_normal())) if physical and value is not None else value
