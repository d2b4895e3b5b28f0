"""Which configurations are checked on which collectives, and in which order. Pure: no PyTorch, no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.gpu.cases import COPIES, ITEM_BYTES, REDUCTIONS, ROOTED, Case
from dynamiccl_ray.actions import Action
from dynamiccl_ray.keys import bytes_name
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_PAIRS, OWN_PAIR, Collective, pair_name

KIB: Final = 1 << 10
MIB: Final = 1 << 20
COLLECTIVES: Final = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.BROADCAST,
    Collective.REDUCE,
)
TIMED: Final = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
"""What is timed: NCCL 2.29.2 and later report no events of a broadcast, and reduce is rare in training."""
# Several processes take turns on one GPU, in slices of milliseconds: large messages take long and say little.
CHECK_SIZES: Final = {"one": (256, 4 * KIB, 64 * KIB, MIB, 4 * MIB), "several": (256, 4 * KIB, 64 * KIB, MIB, 32 * MIB)}
TIME_SIZES: Final = {"one": (4 * KIB, 64 * KIB, MIB), "several": (4 * KIB, 64 * KIB, MIB, 16 * MIB, 128 * MIB)}
TYPES: Final = ("float32", "bfloat16", "float16", "int32", "float64", "int8", "int64", "uint8")
TYPICAL: Final = {
    Collective.ALL_REDUCE: ("tree/ll", "tree/ll128", "tree/simple", "ring/ll", "ring/ll128", "ring/simple"),
    Collective.ALL_GATHER: ("ring/ll", "ring/ll128", "ring/simple", "pat/simple"),
    Collective.REDUCE_SCATTER: ("ring/ll", "ring/ll128", "ring/simple", "pat/simple"),
    Collective.BROADCAST: ("ring/ll", "ring/ll128", "ring/simple"),
    Collective.REDUCE: ("ring/ll", "ring/ll128", "ring/simple"),
}
"""What --dry-run assumes that NCCL offers; a run asks NCCL."""

Offered = Mapping[int, frozenset[int]]
"""Key -> pairs that NCCL offers for it (indices of the pair head)."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One table, and the collectives that run under it. ``refused``: NCCL does not offer the pair for any of them."""

    action: Action
    cases: tuple[Case, ...]
    refused: bool = False

    @property
    def table(self) -> dict[int, Action]:
        return {case.key: self.action for case in self.cases}


def fitted(size: int, ranks: int, *, ragged: bool) -> int:
    """Bytes near ``size`` that every type and rank divides; with ``ragged`` no multiple of a chunk either."""
    unit = 8 * ranks
    units = max(1, size // unit)
    return (units + (1 if ragged and units > 64 else 0)) * unit


def variants(collective: Collective, nbytes: int, ranks: int) -> tuple[Case, ...]:
    """Every type with its reductions; roots and offsets take turns. Float32 is first: all pairs are offered for it."""
    cases = []
    for index, dtype in enumerate(TYPES):
        for turn, reduction in enumerate(REDUCTIONS if collective not in COPIES else ("sum",)):
            cases.append(
                Case(
                    collective=collective,
                    count=nbytes // ITEM_BYTES[dtype],
                    dtype=dtype,
                    reduction=reduction,
                    root=(index + turn) % ranks if collective in ROOTED else 0,
                    offset=(index + turn) % 2,
                )
            )
    return tuple(cases)


def slots(sizes: Sequence[int], ranks: int, collectives: Sequence[Collective] = COLLECTIVES) -> list[tuple[Case, ...]]:
    """The variants of every collective and size. Every second size is ragged."""
    fits = [fitted(size, ranks, ragged=index % 2 == 0) for index, size in enumerate(sizes)]
    return [variants(collective, nbytes, ranks) for collective in collectives for nbytes in dict.fromkeys(fits)]


def actions(pairs: Iterable[int], channels: Sequence[int], chunks: Sequence[int], *, cross: bool) -> list[Action]:
    """Every pair with every channel count and chunk size; without ``cross`` one of the two varies at a time.

    A chunk size needs a pair: the plugin applies none to a choice of NCCL's own. ``channels`` and ``chunks`` are
    values of the heads. Raises ValueError for one that is none.
    """
    for what, given, valid in (("channels", channels, CHANNEL_VALUES), ("chunks", chunks, CHUNK_VALUES)):
        if bad := [value for value in given if value not in valid]:
            raise ValueError(f"{what}: {bad} not among {list(valid)}")
    found = []
    for pair in sorted({OWN_PAIR, *pairs}):
        for count in channels:
            for chunk in chunks if pair != OWN_PAIR else (0,):
                if cross or not (count and chunk):
                    found.append(
                        Action(pair=pair, channels=CHANNEL_VALUES.index(count), chunk=CHUNK_VALUES.index(chunk))
                    )
    return found


def steps(all_slots: Sequence[tuple[Case, ...]], offered: Offered, grid: Sequence[Action]) -> Iterator[Step]:
    """Every configuration on every slot that NCCL offers its pair for.

    Under NCCL's own channels and chunk all variants run; elsewhere one variant of each slot, another every time.
    """
    for index, action in enumerate(grid):
        cases: list[Case] = []
        for place, slot in enumerate(all_slots):
            if action.pair != OWN_PAIR and action.pair not in offered.get(slot[0].key, frozenset()):
                continue
            plain = not action.channels and not action.chunk
            cases += slot if plain else (slot[(index + place) % len(slot)],)
        if cases:
            yield Step(action=action, cases=tuple(cases))


def refusals(all_slots: Sequence[tuple[Case, ...]], offered: Offered) -> Iterator[Step]:
    """What NCCL does not offer, asked for all the same: one slot of each collective. The plugin must leave it alone."""
    first = {slot[0].collective: slot[0] for slot in reversed(all_slots)}
    for pair in range(1, N_PAIRS):
        cases = tuple(c for c in first.values() if c.key in offered and pair not in offered[c.key])
        if cases:
            yield Step(action=Action(pair=pair), cases=cases, refused=True)


def assumed(all_slots: Sequence[tuple[Case, ...]]) -> Offered:
    """For --dry-run."""
    by_name = {pair_name(index): index for index in range(N_PAIRS)}
    return {slot[0].key: frozenset(by_name[name] for name in TYPICAL[slot[0].collective]) for slot in all_slots}


def action_to_json(action: Action) -> dict[str, Any]:
    return {
        "pair": pair_name(action.pair),
        "channels": CHANNEL_VALUES[action.channels],
        "chunk_bytes": CHUNK_VALUES[action.chunk],
    }


def action_from_json(raw: Mapping[str, Any]) -> Action:
    """The inverse of ``action_to_json``. Raises ValueError naming what is unknown and what is valid."""
    names = [pair_name(index) for index in range(N_PAIRS)]
    pair, channels, chunk = raw.get("pair", "nccl"), raw.get("channels", 0), raw.get("chunk_bytes", 0)
    for what, value, valid in (
        ("pair", pair, names),
        ("channels", channels, list(CHANNEL_VALUES)),
        ("chunk_bytes", chunk, list(CHUNK_VALUES)),
    ):
        if value not in valid:
            raise ValueError(f"{what} is {value!r}; valid are {valid}")
    return Action(pair=names.index(pair), channels=CHANNEL_VALUES.index(channels), chunk=CHUNK_VALUES.index(chunk))


def described(found: Sequence[Step]) -> str:
    """One line for the terminal."""
    sizes = sorted({case.nbytes for step in found for case in step.cases})
    checks = sum(len(step.cases) for step in found)
    span = f"{bytes_name(sizes[0])} to {bytes_name(sizes[-1])}" if sizes else "none"
    return f"{len(found)} tables, {checks} collectives on every rank, {len(sizes)} sizes from {span}"


def outline(ranks: int, *, quick: bool, sections: Sequence[str], runs: int) -> list[str]:
    """What a run does, in lines: for one GPU and for several, with a usual set of pairs in the place of NCCL's own."""
    lines = []
    for machine in ("one", "several"):
        sizes = CHECK_SIZES[machine][1:4] if quick else CHECK_SIZES[machine]
        all_slots = slots(sizes, ranks)
        offered = assumed(all_slots)
        pairs = {pair for of in offered.values() for pair in of}
        grid = actions(pairs, CHANNEL_VALUES, CHUNK_VALUES, cross=not quick)
        found = [*steps(all_slots, offered, grid), *refusals(all_slots, offered)]
        timed = len(TIMED) * len(TIME_SIZES[machine][1:3] if quick else TIME_SIZES[machine])
        lines.append(f"{machine} GPU{'s' if machine == 'several' else ''}, {ranks} ranks:")
        if "check" in sections:
            lines.append(f"  check: {described(found)}, if NCCL offers {', '.join(map(pair_name, sorted(pairs)))}")
        if "measure" in sections:
            lines.append(
                f"  measure: {timed} collectives and sizes, {runs} runs, default, tuned and best static in turns"
            )
    lines += [f"both: {name}" for name in sections if name in ("overhead", "graphs", "communicators")]
    return lines
