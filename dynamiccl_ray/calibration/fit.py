"""Fits a machine's physical numbers to its measured times: robust least squares on log time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from dynamiccl_ray.calibration.model import Rows
from dynamiccl_ray.calibration.samples import Machine
from dynamiccl_ray.calibration.template import Hardware
from dynamiccl_ray.fabric.cluster_config import Cluster

Float64 = NDArray[np.float64]

# Deviation of a log time that the model is not asked to explain: where the loss turns from square to linear.
_SIGMA: Final = 0.1
# A number of which the rows say nothing stays near where it started: its log has this deviation a priori, a factor of
# seven at two deviations.
_PRIOR: Final = 1.0
_MOST_EVALUATIONS: Final = 60
# Of a normal distribution, to 95 %.
_Z95: Final = 1.96
# Shares start here; their odds are fitted, so that they stay between 0 and 1.
_SHARES: Final = {"overlap": 0.5, "tree_share": 0.6}


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """A cluster whose numbers are the most plausible ones, and how sure they are."""

    cluster: Cluster
    interval: Mapping[str, tuple[float, float]]
    """Name -> 95 % interval, of the fitted numbers."""


def fit(machine: Machine) -> Fit:
    """The numbers of a machine's cluster that explain its rows best.

    Minimises sum rho((log modelled - log measured)^2 / sigma^2) over the logs of rates and latencies and the odds of
    shares, with the soft absolute loss rho (Huber's idea, smooth), and a weak normal prior around round numbers for a
    cluster of the kind, by scipy's trust region method. Intervals are Laplace's approximation at the optimum. Raises
    ValueError for a machine without a row that the model can price.
    """
    hardware = Hardware.of(machine)
    start = {**hardware.start(), **_SHARES}
    names = list(start)
    share = np.array([name in _SHARES for name in names])
    x0 = _free(np.array(list(start.values())), share)
    local = int(machine.gpus_per_node.max())

    def cluster_at(x: Float64) -> Cluster:
        values = dict(zip(names, _bound(x, share).tolist(), strict=True))
        return hardware.cluster(values, name=machine.name, gpus_per_node=local)

    rows = Rows.of(machine, cluster_at(x0))
    priced = np.isfinite(rows.price_us(cluster_at(x0)))
    if not priced.any():
        raise ValueError(f"{machine.name}: the model has no price for any of {len(machine)} rows")
    measured = np.log(machine.time_us)

    def residuals(x: Float64) -> Float64:
        modelled = rows.price_us(cluster_at(x))
        return np.concatenate([(np.log(modelled) - measured)[priced] / _SIGMA, (x - x0) / _PRIOR])

    found = least_squares(residuals, x0, loss="soft_l1", max_nfev=_MOST_EVALUATIONS)
    deviation = np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac)))
    low, high = (_bound(found.x + sign * _Z95 * deviation, share) for sign in (-1, 1))
    return Fit(
        cluster=cluster_at(found.x),
        interval={name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)},
    )


def _free(values: Float64, share: NDArray[np.bool_]) -> Float64:
    return np.asarray(np.where(share, np.log(values / np.where(share, 1 - values, 1)), np.log(values)))


def _bound(x: Float64, share: NDArray[np.bool_]) -> Float64:
    return np.asarray(np.where(share, 1 / (1 + np.exp(-x)), np.exp(np.where(share, 0, x))))
