"""Is there anything to learn? What NCCL's own choice loses on the presets, and how often the best one changes.

No policy is involved: the oracle is the best of all pairs, channel counts and chunk sizes that NCCL would grant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.load import IDLE, Load
from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, Collective

Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

PLACES: Final = (
    ("dgx-v100", (1, 4)),
    ("dgx-a100-hdr", (1, 8)),
    ("dgx-h100-ndr", (1, 2, 8, 32)),
    ("dgx-h100-ndr-sharp", (8,)),
    ("p5en-h200-efa", (4, 16)),
    ("gb200-nvl72", (2, 18, 72)),
    ("gh200-slingshot", (1, 8, 128)),
    ("rtx4090-pcie", (1, 4)),
    ("l40s-pcie", (1, 4)),
    ("rtx2080ti-ib100", (1, 8)),
    ("switchml-ethernet", (8,)),
    ("torus-2d", (16,)),
    ("hammingmesh", (16,)),
    ("fat-tree-two-zones", (32,)),
    ("cloud-tcp", (2, 8)),
    ("ethernet-1g", (8,)),
    ("wan-two-datacentres", (16,)),
)
"""Presets and the numbers of nodes at which they are looked at."""
SIZES: Final = 1 << np.arange(10, 31)
"""Bytes: 1 KiB to 1 GiB."""
MIXES: Final = {"decoding": (13, 18), "tensor parallel": (20, 26), "data parallel": (27, 30)}
"""All-reduce sizes of a workload, as powers of two of bytes, first and last."""
# A best configuration has changed where keeping the old one costs more than this.
_MATTERS: Final = 1.01


@dataclass(frozen=True, kw_only=True)
class _Place:
    name: str
    nodes: int
    tier: int
    default_us: dict[str, Float64]
    """By load state: (5 collectives, S sizes), NCCL's own choice."""
    best_us: dict[str, Float64]
    stale: dict[str, Bool]
    """By load state: (5, S), whether what is best on the idle fabric is no longer."""
    idle_us: Float64
    """(5, S, configurations)."""


def worth(places: Iterable[tuple[str, Sequence[int]]] = PLACES) -> dict[str, Any]:
    """Rows of four tables: ``clusters`` and ``collectives`` (idle), ``tiers`` by load state, and ``changes``.

    ``geomean`` and ``worst`` are NCCL's time over the oracle's over all collectives and sizes, ``over_1_percent`` the
    share of them in which NCCL loses more than that; ``changed`` is the share of keys, or of choices, whose best
    configuration elsewhere costs more than 1% here.
    """
    found = [_place(find_cluster(name), nodes) for name, counts in places for nodes in counts]
    return {
        "clusters": [{"cluster": p.name, "nodes": p.nodes, "tier": p.tier, **_gap([p], "idle")} for p in found],
        "collectives": [{"collective": c.name.lower(), **_gap(found, "idle", [c])} for c in Collective],
        "tiers": [
            {"tier": tier, "load": state, **_gap(there, state)}
            for tier in sorted({p.tier for p in found})
            for state in load_states(1)
            if (there := [p for p in found if p.tier == tier and state in p.default_us])
        ],
        "changes": [*_between_tiers(found), *_between_mixes(found), *_between_loads(found)],
    }


def load_states(nodes: int) -> dict[str, Load]:
    """The states of the network, or, with one node, of the links inside it."""
    where = "inter" if nodes > 1 else "intra"
    return {
        "idle": IDLE,
        "bandwidth at 25%": Load(**{f"{where}_bandwidth": 0.25}),
        "latency x4": Load(**{f"{where}_latency": 4.0}),
        "straggler x2": Load(straggler=2.0),
        "loss 0.1%": Load(loss=0.001),
    }


def _place(cluster: Cluster, nodes: int) -> _Place:
    physics = Physics(cluster, nodes)
    collectives = np.array(Collective)[:, None]
    offered = physics.belief.cost_table_us(collectives, SIZES) >= 0
    allowed = offered[..., None, None] & physics.grantable()[:, None, :, None] & np.ones(len(CHUNK_VALUES), bool)
    # Which collective, size, algorithm, protocol, channels and chunk each thing is that can be asked for.
    c, s, a, p, channels, chunk = np.nonzero(allowed)
    own, _ = physics.belief.channels_and_warps(SIZES[s], a, p)
    asked = np.array(CHANNEL_VALUES)[channels]
    what = (c, SIZES[s], a, p, np.where(asked > 0, asked, np.maximum(1, own)))
    choice = physics.belief.choose(collectives, SIZES)
    times = np.full(allowed.shape, np.nan)
    cells = np.ix_(range(len(collectives)), range(len(SIZES)))
    own_us, best_us, stale = {}, {}, {}
    for state, load in load_states(nodes).items():
        times[allowed] = physics.price_us(*what, chunk_bytes=np.array(CHUNK_VALUES)[chunk], load=load)
        own_us[state] = times[*cells, choice.algorithm, choice.protocol, 0, 0]
        flat = times.reshape(*own_us[state].shape, -1)
        if state == "idle":
            idle = flat.copy()
            kept = np.nanargmin(flat, -1, keepdims=True)
        best_us[state] = np.nanmin(flat, -1)
        stale[state] = np.take_along_axis(flat, kept, -1)[..., 0] > _MATTERS * best_us[state]
    return _Place(
        name=cluster.name,
        nodes=nodes,
        tier=cluster.tier(nodes),
        default_us=own_us,
        best_us=best_us,
        stale=stale,
        idle_us=idle,
    )


def _gap(places: Sequence[_Place], state: str, collectives: Sequence[int] = tuple(Collective)) -> dict[str, float]:
    ratio = np.concatenate([(p.default_us[state] / p.best_us[state])[list(collectives)].ravel() for p in places])
    return {
        "geomean": float(np.exp(np.log(ratio).mean())),
        "worst": float(ratio.max()),
        "over_1_percent": float((ratio > _MATTERS).mean()),
    }


def _between_tiers(places: Sequence[_Place]) -> list[dict[str, Any]]:
    changed: dict[tuple[int, int], list[float]] = {}
    for there, here in permutations(places, 2):
        if there.tier < here.tier:
            both = [_differs(there.idle_us, here.idle_us), _differs(here.idle_us, there.idle_us)]
            changed.setdefault((there.tier, here.tier), []).append(float(np.mean(both)))
    return [
        {"from": f"tier {a}", "to": f"tier {b}", "changed": float(np.mean(v))} for (a, b), v in sorted(changed.items())
    ]


def _differs(there: Float64, here: Float64) -> Bool:
    """(5, S) whether what is best there cannot be asked for here, or costs more than the best here."""
    moved = np.take_along_axis(here, np.nanargmin(there, -1, keepdims=True), -1)[..., 0]
    return np.asarray(~(moved <= _MATTERS * np.nanmin(here, -1)))


def _between_mixes(places: Sequence[_Place]) -> list[dict[str, Any]]:
    """One configuration for all sizes of a workload, against that of another, as a tuner file holds it."""
    rows = []
    for a, b in permutations(MIXES, 2):
        changed = [_mix_us(p, b)[np.nanargmin(_mix_us(p, a))] > _MATTERS * np.nanmin(_mix_us(p, b)) for p in places]
        rows.append({"from": a, "to": b, "changed": float(np.mean(changed))})
    return rows


def _mix_us(place: _Place, mix: str) -> Float64:
    """(configurations,) time of one all-reduce of each size."""
    first, last = (power - int(SIZES[0]).bit_length() + 1 for power in MIXES[mix])
    return np.asarray(place.idle_us[Collective.ALL_REDUCE, first : last + 1].sum(0))


def _between_loads(places: Sequence[_Place]) -> list[dict[str, Any]]:
    states = [state for state in places[0].stale if state != "idle"]
    return [{"from": "idle", "to": s, "changed": float(np.mean([p.stale[s] for p in places]))} for s in states]
