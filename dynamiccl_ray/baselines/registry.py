"""All baselines by name; those in the control loop with its usual settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Final

from dynamiccl_ray.baselines.bandit import Bandit
from dynamiccl_ray.baselines.choosers import Elimination, Thompson, Uniform
from dynamiccl_ray.baselines.coordinate_descent import CoordinateDescent
from dynamiccl_ray.baselines.fixed import BestStaticPair, CsvTable, NcclDefault, Oracle
from dynamiccl_ray.baselines.method import Factory, Method
from dynamiccl_ray.baselines.probing import ExhaustiveProbing
from dynamiccl_ray.config.control import Control

_IN_LOOP: Final[Mapping[str, Callable[..., Method]]] = {
    "uniform": Uniform,
    "thompson": Thompson,
    "elimination": Elimination,
}
BASELINES: Final[Mapping[str, Factory]] = {
    "nccl": NcclDefault,
    "static pair": BestStaticPair,
    "csv table": CsvTable,
    "coordinate descent": CoordinateDescent,
    "exhaustive probing": ExhaustiveProbing,
    "bandit": Bandit,
    **_IN_LOOP,
    "oracle": Oracle,
}


def beside(control: Control) -> dict[str, Factory]:
    """All baselines, beside a policy whose control loop has these settings; those that share it have them, too."""
    return {**BASELINES, **{name: functools.partial(of, control=control) for name, of in _IN_LOOP.items()}}
