"""Scenarios from anybody's measurements: what a choice would have been worth on machines that were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS
from dynamiccl_ray.agent.observation import Context
from dynamiccl_ray.calibration.model import variants_of
from dynamiccl_ray.calibration.samples import COLLNET, FREE, Machine
from dynamiccl_ray.calibration.template import Hardware
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.curve import Curve
from dynamiccl_ray.fabric.describe import topology_of
from dynamiccl_ray.fabric.measured import Selection, Surface
from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PAIRS, N_PROTOCOLS, OWN_PAIR, Collective
from dynamiccl_ray.simulation.scenario import Scenario

LEAST_OPTIONS: Final = 4
"""Of a size, NCCL's own choice among them, for a choice to mean anything."""
_SIGMA: Final = 0.02
_Option = tuple[int, int]
"""A pair and the index of a number of channels."""
_Sizes = dict[int, dict[_Option, list[float]]]
"""Bytes -> option -> times."""
_OWN: Final[_Option] = (OWN_PAIR, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """One collective on one shape of a machine."""

    name: str
    machine: str
    cluster: Cluster
    """A guess by kind: round numbers for such hardware, and what NCCL would believe there."""
    scenario: Scenario
    default_known: bool
    """Whether NCCL's own choice was measured. Else its time is that of the median option, and says nothing."""
    sessions: int
    """Runs of the benchmark that follow each other as phases."""

    @property
    def surface(self) -> Surface:
        """The first session, to be played. Only what NCCL would offer is in it, and what the plugin would ask for."""
        scenario, topology = self.scenario, self.scenario.context.topology
        collective = Collective(int(scenario.collective[0]))
        belief = self.cluster.nccl_belief(topology.nodes)
        offered = belief.cost_table_us(collective, scenario.nbytes).reshape(len(scenario.nbytes), -1) >= 0
        times = scenario.times_us[0, ..., 0].astype(np.float64)
        times[:, 1:][~offered] = np.nan
        times[..., np.array(CHANNEL_VALUES) > belief.choose(collective, scenario.nbytes).channels.max()] = np.nan
        curves = {}
        for pair, channels in np.argwhere(np.isfinite(times).any(0)).tolist():
            at = np.isfinite(times[:, pair, channels])
            curves[pair, channels] = Curve.of(scenario.nbytes[at], times[at, pair, channels])
        selection = Selection(
            collective=collective,
            nodes=topology.nodes,
            ranks=topology.ranks,
            gpus_per_node=topology.ranks // topology.nodes,
        )
        return Surface(selection=selection, curves=curves, vendor=None, belief=belief)


def tables(machines: Iterable[Machine], *, horizon: int) -> tuple[list[Table], dict[str, int]]:
    """Every collective and shape with sizes of which ``LEAST_OPTIONS`` were measured; and why rows were left out.

    Where two sources measured the same options, they become two phases: the second begins in the middle of ``horizon``
    steps. Other sources that do not agree (``variants_of``) are tables of their own.
    """
    found, left_out = [], Counter[str]()
    for machine in machines:
        for at in _shapes(machine):
            found += _tables(machine.where(at), horizon, left_out)
    return found, {why: count for why, count in left_out.items() if count}


def _shapes(machine: Machine) -> Iterator[NDArray[np.bool_]]:
    shapes = np.stack([machine.collective, machine.nodes, machine.gpus_per_node])
    for shape in np.unique(shapes, axis=1).T:
        yield (shapes == shape[:, None]).all(0)


def _tables(machine: Machine, horizon: int, left_out: Counter[str]) -> list[Table]:
    options = [_option(machine, i) for i in range(len(machine))]
    usable = np.array([option is not None for option in options])
    left_out["settings that are not one pair, or channels that are never asked for"] += int((~usable).sum())
    machine = machine.where(usable)
    by_source: dict[str, _Sizes] = {}
    for i, option in enumerate(option for option in options if option is not None):
        of_size = by_source.setdefault(str(machine.source[i]), {}).setdefault(int(machine.nbytes[i]), {})
        of_size.setdefault(option, []).append(float(machine.time_us[i]))
    sessions, every = _sessions(by_source), _pooled(by_source.values())
    # What is known of NCCL's own choice goes before that something was measured again.
    own_is_known = any(len(of) >= LEAST_OPTIONS and _OWN in of for of in every.values())
    if sessions and (not own_is_known or all(_OWN in of for of in sessions[0].values())):
        left_out["options that a second session lacks"] += sum(
            len(every[size].keys() - of.keys()) for size, of in sessions[0].items()
        )
        return _table(machine, "", every, sessions, horizon, left_out)
    variants = variants_of(machine)
    found = []
    apart = {size for size, of in every.items() if len(of) >= LEAST_OPTIONS}
    for variant in dict.fromkeys(variants.values()):
        theirs = _pooled(of for source, of in by_source.items() if variants[source] == variant)
        apart -= {size for size, of in theirs.items() if len(of) >= LEAST_OPTIONS}
        said = f", {variant}" if len(set(variants.values())) > 1 else ""
        found += _table(machine, said, theirs, [], horizon, left_out)
    left_out[f"sizes with {LEAST_OPTIONS} options only if sources that do not agree are taken together"] += len(apart)
    return found


def _pooled(sources: Iterable[_Sizes]) -> _Sizes:
    every: _Sizes = {}
    for of in sources:
        for size, options in of.items():
            for option, times in options.items():
                every.setdefault(size, {}).setdefault(option, []).extend(times)
    return every


def _table(
    machine: Machine, variant: str, every: _Sizes, sessions: list[_Sizes], horizon: int, left_out: Counter[str]
) -> list[Table]:
    """Of ``every`` size of one variant, and of two ``sessions``, if there are such; empty where too little is known."""
    enough = {size: of for size, of in every.items() if len(of) >= LEAST_OPTIONS}
    # Nothing can be compared with NCCL's own choice where it is not known: what it is known of goes first.
    with_own = {size: of for size, of in enough.items() if _OWN in of}
    kept = sessions[0] if sessions else with_own or enough
    left_out[f"sizes with fewer than {LEAST_OPTIONS} options"] += len(every.keys() - enough.keys())
    left_out["sizes without NCCL's own choice, or that a second session lacks"] += len(enough.keys() - kept.keys())
    if not kept:
        return []
    known = all(_OWN in of for of in kept.values())
    phases = sessions or [kept]
    collective, nodes = int(machine.collective[0]), int(machine.nodes[0])
    sizes = np.array(sorted(kept), np.int64)
    hardware = Hardware.of(machine)
    cluster = hardware.cluster(hardware.start(), name=machine.name, gpus_per_node=int(machine.gpus_per_node[0]))
    scenario = Scenario(
        cluster=machine.name,
        context=Context(topology=topology_of(cluster, nodes)),
        collective=np.full(sizes.shape, collective, np.int64),
        nbytes=sizes,
        weight=np.ones(len(sizes)),
        starts=np.array([0, horizon // 2][: len(phases)]),
        times_us=np.stack([_times(of, sizes) for of in phases]),
        cost=np.zeros((len(sizes), N_PAIRS), np.float32),
        own_pair=np.full(sizes.shape, OWN_PAIR, np.int64),
        sigma=np.asarray(_SIGMA),
    )
    shape = f"{nodes}x{int(machine.gpus_per_node[0])}"
    name = f"{machine.name}, {_NAMES[collective]}, {shape} GPUs{variant}"
    return [
        Table(
            name=name,
            machine=machine.name,
            cluster=cluster,
            scenario=scenario,
            default_known=known,
            sessions=len(phases),
        )
    ]


_NAMES: Final = ("broadcast", "reduce", "all-gather", "reduce-scatter", "all-reduce")


def _option(machine: Machine, i: int) -> _Option | None:
    algorithm, protocol, channels = (int(of[i]) for of in (machine.algorithm, machine.protocol, machine.channels))
    if machine.tuner[i] or channels not in CHANNEL_VALUES:
        return None
    if algorithm == FREE and protocol == FREE:
        return None if channels else _OWN
    if algorithm in (FREE, COLLNET) or protocol == FREE:
        return None
    return 1 + N_PROTOCOLS * algorithm + protocol, CHANNEL_VALUES.index(channels)


def _sessions(by_source: dict[str, _Sizes]) -> list[_Sizes]:
    """The two sources that measured the most options of the same sizes alike, cut down to these; empty without any.

    A size of which one of them has a faster option that the other lacks is left out; and where that, or what was not
    measured twice, is more than half of the sizes, there are no sessions: what was measured is worth more than that it
    was measured again.
    """
    found: list[_Sizes] = []
    # Of logs each is a source with one option: hundreds of them are no sessions.
    may = [source for source, of in sorted(by_source.items()) if any(len(o) >= LEAST_OPTIONS for o in of.values())]
    for first, second in combinations(may, 2):
        both = by_source[first], by_source[second]
        shared: dict[int, set[_Option]] = {}
        for size in both[0].keys() & both[1].keys():
            options = both[0][size].keys() & both[1][size].keys()
            fastest = {_fastest(of[size]) for of in both}
            if len(options) >= LEAST_OPTIONS and fastest <= options:
                shared[size] = options
        if any(_OWN in options for options in shared.values()):
            shared = {size: options for size, options in shared.items() if _OWN in options}
        enough = sum(len(of) >= LEAST_OPTIONS for of in _pooled(both).values())
        more = sum(map(len, shared.values())) > (sum(map(len, found[0].values())) if found else 0)
        if more and 2 * len(shared) >= enough:
            found = [{size: {o: of[size][o] for o in options} for size, options in shared.items()} for of in both]
    return found


def _fastest(of_size: dict[_Option, list[float]]) -> _Option:
    return min(of_size, key=lambda option: float(np.median(of_size[option])))


def _times(of: _Sizes, sizes: NDArray[np.int64]) -> NDArray[np.float32]:
    """(K, N_PAIRS, N_CHANNELS, N_CHUNKS) medians."""
    times = np.full((len(sizes), N_PAIRS, N_CHANNELS, N_CHUNKS), np.nan, np.float32)
    for row, size in enumerate(sizes.tolist()):
        for (pair, channels), measured in of[size].items():
            times[row, pair, channels, 0] = np.median(measured)
        if _OWN not in of[size]:
            times[row, OWN_PAIR, 0, 0] = np.median([np.median(measured) for measured in of[size].values()])
    return times
