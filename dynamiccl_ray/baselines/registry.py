"""All baselines by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dynamiccl_ray.baselines.bandit import Bandit
from dynamiccl_ray.baselines.choosers import Thompson, Uniform
from dynamiccl_ray.baselines.coordinate_descent import CoordinateDescent
from dynamiccl_ray.baselines.fixed import BestStaticPair, CsvTable, NcclDefault, Oracle
from dynamiccl_ray.baselines.method import Factory
from dynamiccl_ray.baselines.probing import ExhaustiveProbing

BASELINES: Final[Mapping[str, Factory]] = {
    "nccl": NcclDefault,
    "static pair": BestStaticPair,
    "csv table": CsvTable,
    "coordinate descent": CoordinateDescent,
    "exhaustive probing": ExhaustiveProbing,
    "bandit": Bandit,
    "uniform": Uniform,
    "thompson": Thompson,
    "oracle": Oracle,
}
