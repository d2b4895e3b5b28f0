"""A recorded trace as the program of a played job: its communicators laid over the job's ranks, its calls in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from dynamiccl_ray.keys import bytes_name
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.plugin_bridge.program import Comm, DataType, Ops, Program
from dynamiccl_ray.workloads.recorded import RecordedCall, RecordedCommunicator, Trace, each

_STREAMS: Final = 7
_PARTED: Final = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One communicator."""

    name: str
    ranks: tuple[int, ...]
    """Of the machine, counted node by node."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A trace on ``nodes`` x ``local`` ranks."""

    nodes: int
    local: int
    parts: tuple[tuple[RecordedCommunicator, tuple[Tile, ...]], ...]
    notes: tuple[str, ...]
    """What is played in another way than it was recorded."""

    @classmethod
    def on(cls, trace: Trace, nodes: int, local: int) -> Self:
        """Blocks of as many nodes, and ranks in a node, as each communicator had, or as fit."""
        parts, notes = [], []
        for comm in trace.communicators:
            n, per_node = _fitting(comm.nodes, nodes), _fitting(-(-comm.ranks // comm.nodes), local)
            if n * per_node < 2:
                notes.append(f"{comm.name} is left out: its {comm.ranks} ranks on {comm.nodes} nodes are one rank here")
                continue
            blocks = [(i, j) for i in range(0, nodes, n) for j in range(0, local, per_node)][: comm.count]
            tiles = [
                Tile(name=name, ranks=tuple((i + a) * local + j + b for a in range(n) for b in range(per_node)))
                for name, (i, j) in zip(comm.names, blocks, strict=False)
            ]
            if (n * per_node, n) != (comm.ranks, comm.nodes):
                notes.append(
                    f"{comm.name}: {comm.ranks} ranks on {comm.nodes} nodes are played by {n * per_node} on {n}"
                )
            if len(tiles) < comm.count:
                notes.append(f"{comm.name}: {len(tiles)} of {comm.count} communicators fit")
            for call in dict.fromkeys((*comm.once, *comm.step)):
                if (nbytes := _whole(call, n * per_node)) != call.bytes:
                    notes.append(f"{comm.name}: {call.collective} of {call.bytes} bytes is played with {nbytes}")
                if call.grouped:
                    notes.append(f"{comm.name}: a group of {bytes_name(call.bytes)} is played by two {call.collective}")
            parts.append((comm, tuple(tiles)))
        return cls(nodes=nodes, local=local, parts=tuple(parts), notes=tuple(notes))

    @property
    def said(self) -> str:
        """Its communicators and what is different, in words."""
        words = [f"{len(tiles)} x {comm.name} of {len(tiles[0].ranks)} ranks" for comm, tiles in self.parts]
        return ", ".join(words) + "".join(f"; {note}" for note in self.notes)

    @property
    def most_calls(self) -> int:
        """Of a rank in a step, all communicators together."""
        return sum(comm.repeat * sum(call.times for call in comm.step) for comm, _ in self.parts)

    def lay_out(self, program: Program, *, compute_us: float, whole: bool) -> None:
        """Into a program whose ranks are the first of every node. ``whole``: all of them, and communicators are split
        off a first one of all, as a training job does it."""
        comms = self._split(program) if whole else self._begun(program)
        for stream, (comm, of) in enumerate(zip((part[0] for part in self.parts), comms, strict=True), 1):
            for mine in of:
                for rank in mine.ranks:
                    ops = program.ranks[rank]
                    for call in each(comm.once):
                        _call(ops.setup, mine, call, 0)
                    for _ in range(comm.repeat):
                        for call in each(comm.step):
                            _compute(ops.step, compute_us, 1 + stream % _STREAMS)
                            _call(ops.step, mine, call, 1 + stream % _STREAMS)
        for ops in program.ranks:
            ops.setup.sync()
            ops.step.sync()
            for mine in dict.fromkeys(reversed([c for c in program.comms if ops.rank in c.ranks])):
                ops.end.destroy(mine)

    def _split(self, program: Program) -> list[list[Comm]]:
        every = tuple(range(self.nodes * self.local))
        first = next((tiles[0] for _, tiles in self.parts if tiles[0].ranks == every), None)
        names = {tile.name for _, tiles in self.parts for tile in tiles}
        world = program.comm(first.name if first else "job" if "world" in names else "world")
        for rank in program.ranks:
            rank.setup.init(world)
        return [
            [world] if tiles[0] is first else program.split(world, {tile.name: tile.ranks for tile in tiles})
            for _, tiles in self.parts
        ]

    def _begun(self, program: Program) -> list[list[Comm]]:
        """Of those communicators that ranks of the program are in."""
        here = {rank.node * self.local + rank.device: rank.rank for rank in program.ranks}
        comms = []
        for _, tiles in self.parts:
            mine = []
            for tile in tiles:
                places = [place for place, rank in enumerate(tile.ranks) if rank in here]
                if not places:
                    continue
                comm = program.comm(
                    tile.name,
                    [here[tile.ranks[place]] for place in places],
                    places=places,
                    size=len(tile.ranks),
                    nodes=[rank // self.local for rank in tile.ranks],
                )
                for rank in comm.ranks:
                    program.ranks[rank].setup.init(comm)
                mine.append(comm)
            comms.append(mine)
        return comms


def _fitting(wanted: int, there: int) -> int:
    """The most that is not above ``wanted`` and divides what is there."""
    return next(n for n in range(min(wanted, there), 0, -1) if there % n == 0)


def _whole(call: RecordedCall, ranks: int) -> int:
    """Bytes that can be divided among the ranks, where they must be."""
    return max(1, call.bytes // ranks) * ranks if call.type in _PARTED else call.bytes


def _compute(ops: Ops, us: float, stream: int) -> None:
    if us:
        ops.compute(us)
        ops.record(0)
        ops.wait(0, stream=stream)


def _call(ops: Ops, comm: Comm, call: RecordedCall, stream: int) -> None:
    nbytes = _whole(call, comm.size)
    grain = comm.size if call.type in _PARTED else 1
    type_ = DataType.FLOAT32 if nbytes % (4 * grain) == 0 else DataType.INT8
    elements = nbytes // (type_.nbytes * grain)
    if not call.grouped or elements < 2:
        ops.collective(comm, call.type, nbytes, stream=stream, type_=type_)
        return
    half = elements // 2 * type_.nbytes * grain
    with ops.group(comm):
        for part in (half, nbytes - half):
            ops.collective(comm, call.type, part, stream=stream, type_=type_)
