"""Rows of a machine by what was asked: a collective of one size at one scale, and what each setting took there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.calibration.model import variants_of
from dynamiccl_ray.calibration.samples import Machine

Shape = tuple[str, int, int, int]
"""Variant of the machine, collective, nodes, GPUs per node."""
JOINT: Final = " + "
"""Between the names of tables that are one machine."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One size of one shape. Times are medians over repeats, in us."""

    shape: Shape
    nbytes: int
    own_us: float | None
    """Of NCCL's own choice, where that was measured."""
    forced_us: Mapping[str, float] = field(default_factory=dict)
    """Setting, in the words of ``Machine.settings`` -> time."""

    @property
    def best(self) -> tuple[str, float]:
        """The fastest that was measured, NCCL's own choice (``nccl``) included, and its time."""
        times = {"nccl": self.own_us, **self.forced_us}
        return min(((s, t) for s, t in times.items() if t is not None), key=lambda found: found[1])

    @property
    def gain(self) -> float | None:
        """NCCL's own time over the best, at least 1; None unless both it and a setting were measured."""
        return self.own_us / self.best[1] if self.own_us is not None and self.forced_us else None


def cells(machine: Machine) -> list[Cell]:
    """All of a machine, sizes within shapes. What a tuner chose is left out."""
    machine = machine.where(machine.tuner == "")
    variants = variants_of(machine)
    found: dict[tuple[Shape, int], dict[str, list[float]]] = {}
    for source, collective, nodes, local, size, setting, time in zip(
        machine.source.tolist(),
        machine.collective.tolist(),
        machine.nodes.tolist(),
        machine.gpus_per_node.tolist(),
        machine.nbytes.tolist(),
        machine.settings.tolist(),
        machine.time_us.tolist(),
        strict=True,
    ):
        shape = (variants[source], collective, nodes, local)
        found.setdefault((shape, size), {}).setdefault(setting, []).append(time)
    result = []
    for (shape, size), settings in sorted(found.items()):
        times = {setting: float(np.median(us)) for setting, us in settings.items()}
        own = times.pop("nccl", None)
        result.append(Cell(shape=shape, nbytes=size, own_us=own, forced_us=times))
    return result


def joined(machines: Iterable[Machine]) -> list[Machine]:
    """The same machines, but for those of one hardware (``gpu``, ``intra``, ``inter``) and one environment whose tables
    belong together: no table has both NCCL's own choice and forced settings, and together they have; or each has one
    forced setting, which no other has. Such are one machine."""
    alike: dict[tuple[str, str, str, str], list[Machine]] = {}
    for machine in machines:
        alike.setdefault((machine.gpu, machine.intra, machine.inter, machine.environment), []).append(machine)
    result = []
    for of in alike.values():
        own, forced = [bool(_own(m).any()) for m in of], [bool(m.forced.any()) for m in of]
        apart = not any(a and b for a, b in zip(own, forced, strict=True))
        settings = [setting for machine in of for setting in set(machine.settings.tolist())]
        one_each = len(of) > 1 and len(settings) == len(of) == len(set(settings))
        result += [_join(of)] if (apart and any(own) and any(forced)) or one_each else of
    return result


def _own(machine: Machine) -> NDArray[np.bool_]:
    return np.asarray(~machine.forced & (machine.tuner == ""), np.bool_)


def _join(machines: Sequence[Machine]) -> Machine:
    first = machines[0]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(machine, name) for machine in machines])
        for name, column in vars(first).items()
        if isinstance(column, np.ndarray)
    }
    return replace(first, name=JOINT.join(machine.name for machine in machines), **columns)


def own_rows(machine: Machine) -> Machine:
    """Those of NCCL's own choice alone."""
    return machine.where(_own(machine))
