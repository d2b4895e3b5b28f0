"""A calibrated machine: its cluster, how sure its numbers are, and what the equations leave. As YAML, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import yaml
from numpy.typing import NDArray

from dynamiccl_ray.calibration.fit import fit
from dynamiccl_ray.calibration.model import Rows, corrections, curves_of, variants_of
from dynamiccl_ray.calibration.samples import Machine
from dynamiccl_ray.calibration.spikes import spikes
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.corrections import RatioCurve
from dynamiccl_ray.settings import Count, Section, read_yaml

Float64 = NDArray[np.float64]


class Calibrated(Section):
    """One machine."""

    name: str
    file: str
    """Of its measurements, without the suffix."""
    gpu: str
    intra: str
    inter: str
    rows: Count
    """That it was calibrated on."""
    cluster: Cluster
    """The equations alone. NCCL's belief is a guess by kind; the rest is fitted, but for SMs and the network's tier."""
    interval: dict[str, tuple[float, float]]
    """95 % intervals of the fitted numbers, dotted as in the cluster."""
    variants: dict[str, str]
    """Source -> the source that stands for all that agree with it."""
    curves: tuple[RatioCurve, ...]
    """What the equations leave: log of measured over modelled time."""

    @classmethod
    def of(cls, machine: Machine) -> Self:
        """Raises ValueError for a machine without a row that the model can price."""
        kept = machine.where(~spikes(machine))
        result = fit(kept)
        modelled = Rows.of(kept, result.cluster).price_us(result.cluster)
        priced = np.isfinite(modelled)
        variants = variants_of(kept)
        curves = curves_of(kept.where(priced), modelled[priced], variants)
        return cls(
            name=machine.name,
            file=machine.file,
            gpu=machine.gpu,
            intra=machine.intra,
            inter=machine.inter,
            rows=len(machine),
            cluster=result.cluster,
            interval=dict(result.interval),
            variants=variants,
            curves=tuple(curves),
        )

    def physics_us(self, machine: Machine) -> Float64:
        """(rows,) times by the equations alone; NaN where the cluster has nothing of the kind."""
        return Rows.of(machine, self.cluster).price_us(self.cluster)

    def corrected_us(self, machine: Machine, physics_us: Float64) -> Float64:
        """(rows,) times of ``physics_us`` with what the equations leave put back."""
        return np.asarray(physics_us * np.exp(corrections(machine, self.curves, self.variants)))

    def is_of(self, machine: Machine) -> bool:
        """Whether a machine's hardware is described by the same words."""
        return (self.gpu, self.intra, self.inter) == (machine.gpu, machine.intra, machine.inter)


class Parameters(Section):
    """What ``fabric calibrate`` writes."""

    machines: tuple[Calibrated, ...]

    def of(self, machine: Machine) -> Calibrated:
        """The calibration of a machine: of the same hardware, and of the same file where several are.

        Raises ConfigError where there is none, or several of other files.
        """
        same = [c for c in self.machines if c.is_of(machine)]
        named = [c for c in same if c.file == machine.file] or same
        if len(named) != 1:
            known = ", ".join(c.name for c in (named or self.machines))
            raise ConfigError(
                f"{machine.name} ({machine.gpu}; {machine.intra}; {machine.inter}): "
                + (f"calibrated more than once, as {known}" if named else f"not calibrated; there are {known}")
                + "; calibrate on a part of this machine's rows"
            )
        return named[0]


def write_parameters(machines: Sequence[Calibrated], path: Path) -> None:
    """As YAML; the curves in one line each, so that the rest can be read."""
    document = Parameters(machines=tuple(machines)).model_dump(mode="json", exclude_none=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(document, sort_keys=False, width=10**9, default_flow_style=None), encoding="utf-8")


def read_parameters(path: Path) -> Parameters:
    """Raises ConfigError naming the file, the field, the value and what is valid."""
    return read_yaml(path, Parameters, "parameters")
