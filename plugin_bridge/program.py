"""What every rank of a job does, as ``dynamiccl-nccl-job`` runs it on NCCL itself or on the emulated one.

A :class:`Program` has communicators and, per rank, three lists of operations: ``setup`` runs once, ``step`` again and
again, ``end`` when the job stops. :func:`Program.write` lays it out as ``job_host/program.h`` describes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np

from dynamiccl_ray.knobs import Collective

_MAGIC: Final = b"DCCLPROG"
_VERSION: Final = 3
MAX_RANKS: Final = 64
_NAME_BYTES: Final = 64
DEVICE: Final = 255
"""As the stream of ``sync``: all of the device."""

_OP: Final = np.dtype(
    [
        ("code", "u1"),
        ("func", "u1"),
        ("type", "u1"),
        ("stream", "u1"),
        ("comm", "<u2"),
        ("from", "<u2"),
        ("peer", "<i4"),
        ("reserved", "<u4"),
        ("value", "<u8"),
    ]
)
_RANK: Final = np.dtype(
    [(name, "<u4") for name in ("setup", "n_setup", "step", "n_step", "end", "n_end", "node", "device")]
)
_COMM: Final = np.dtype(
    [("name", f"S{_NAME_BYTES}"), ("present", "<u4"), ("blocking", "<u4"), ("nodes", "u1", (MAX_RANKS,))]
)
_HEADER: Final = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("n_comms", "<u4"),
        ("n_ranks", "<u4"),
        ("n_ops", "<u4"),
        ("file_bytes", "<u8"),
        ("buffer_bytes", "<u8"),
        ("call_ns", "<u8"),
        ("steps", "<u8"),
        ("rate_hz", "<f8"),
        ("window", "<u4"),
        ("reserved", "<u4"),
    ]
)
assert (_OP.itemsize, _RANK.itemsize, _COMM.itemsize, _HEADER.itemsize) == (24, 32, 136, 72)


class _Code(IntEnum):
    """``enum op_code``."""

    INIT = 0
    SPLIT = 1
    SHRINK = 2
    FINALIZE = 3
    DESTROY = 4
    ABORT = 5
    GROUP_START = 6
    GROUP_END = 7
    SIMULATE_END = 8
    COLLECTIVE = 9
    SEND = 10
    RECV = 11
    COMPUTE = 12
    RECORD = 13
    WAIT = 14
    SYNC = 15
    HOST = 16
    CAPTURE = 17
    END_CAPTURE = 18
    REPLAY = 19
    DROP = 20
    REGISTER = 21
    DEREGISTER = 22
    CLOCK = 23


class DataType(IntEnum):
    """``ncclDataType_t``, some."""

    INT8 = 0
    FLOAT16 = 6
    FLOAT32 = 7
    BFLOAT16 = 9

    @property
    def nbytes(self) -> int:
        return {0: 1, 6: 2, 7: 4, 9: 2}[int(self)]


@dataclass(frozen=True, kw_only=True)
class Comm:
    """One communicator; make them with :meth:`Program.comm`."""

    number: int
    name: str
    """What NCCL is told; empty for none."""
    ranks: tuple[int, ...]
    """The job's ranks that are in it and run here, in the communicator's order."""
    places: tuple[int, ...]
    """Their ranks in it."""
    size: int
    nodes: tuple[int, ...]
    """Of each of its ranks."""
    blocking: bool = True

    def place(self, rank: int) -> int:
        """The rank in it of one of the job's ranks."""
        return self.places[self.ranks.index(rank)]


@dataclass
class Ops:
    """Operations of one rank, in order. Sizes are in bytes as NCCL counts them for a tuner: the full buffer for
    all-gather and reduce-scatter.
    """

    rank: int
    _rows: list[tuple[Any, ...]] = field(default_factory=list)
    calls: list[tuple[Comm, int, int]] = field(default_factory=list)
    """(communicator, NCCL's function number, bytes) of every collective and every transfer."""

    def _add(
        self, code: _Code, *, func: int = 0, type_: int = 0, stream: int = 0, comm: int = 0, from_: int = 0,
        peer: int = 0, value: int = 0,
    ) -> None:  # fmt: skip
        self._rows.append((code, func, type_, stream, comm, from_, peer, 0, value))

    def __len__(self) -> int:
        return len(self._rows)

    def array(self) -> np.ndarray[Any, Any]:
        return np.array(self._rows, _OP)

    # -- communicators --

    def init(self, comm: Comm) -> None:
        # The first of those that run here makes the unique id.
        first = int(self.rank == comm.ranks[0])
        self._add(_Code.INIT, func=first, comm=comm.number, peer=comm.place(self.rank), value=comm.size)

    def split(self, parent: Comm, comm: Comm | None, *, color: int = 0) -> None:
        """With no communicator this rank takes part and gets none."""
        number = parent.number if comm is None else comm.number
        key = 0 if comm is None else comm.place(self.rank)
        self._add(_Code.SPLIT, comm=number, from_=parent.number, peer=-1 if comm is None else color, value=key)

    def shrink(self, parent: Comm, comm: Comm) -> None:
        """To the ranks of ``comm``; those that are left out do not call it."""
        left_out = set(parent.ranks) - set(comm.ranks)
        mask = sum(1 << parent.place(rank) for rank in left_out)
        self._add(_Code.SHRINK, comm=comm.number, from_=parent.number, value=mask)

    def finalize(self, comm: Comm) -> None:
        self._add(_Code.FINALIZE, comm=comm.number)

    def destroy(self, comm: Comm) -> None:
        self._add(_Code.DESTROY, comm=comm.number)

    def abort(self, comm: Comm) -> None:
        self._add(_Code.ABORT, comm=comm.number)

    def register(self, comm: Comm) -> None:
        """The buffer that all of this job's operations use."""
        self._add(_Code.REGISTER, comm=comm.number)

    def deregister(self, comm: Comm) -> None:
        self._add(_Code.DEREGISTER, comm=comm.number)

    # -- operations --

    @contextlib.contextmanager
    def group(self, comm: Comm | None = None, *, simulate: bool = False) -> Iterator[None]:
        """One of ncclGroupStart and ncclGroupEnd; ``comm`` is waited for where it is non-blocking."""
        self._add(_Code.GROUP_START)
        yield
        code = _Code.SIMULATE_END if simulate else _Code.GROUP_END
        self._add(code, comm=comm.number if comm else 0)

    def collective(
        self, comm: Comm, collective: Collective, nbytes: int, *, stream: int = 0, root: int = 0,
        type_: DataType = DataType.FLOAT32,
    ) -> None:  # fmt: skip
        per_rank = collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        count, rest = divmod(nbytes, type_.nbytes * (comm.size if per_rank else 1))
        if rest or count < 1:
            raise ValueError(f"{nbytes} bytes are no whole number of elements of {type_.name} for {comm.size} ranks")
        self.calls.append((comm, int(collective), nbytes))
        self._add(
            _Code.COLLECTIVE, func=int(collective), type_=type_, stream=stream, comm=comm.number, peer=root, value=count
        )  # fmt: skip

    def send(self, comm: Comm, peer: int, nbytes: int, *, stream: int = 0) -> None:
        """To rank ``peer`` of the communicator."""
        self._transfer(_Code.SEND, comm, peer, nbytes, stream)

    def recv(self, comm: Comm, peer: int, nbytes: int, *, stream: int = 0) -> None:
        self._transfer(_Code.RECV, comm, peer, nbytes, stream)

    def _transfer(self, code: _Code, comm: Comm, peer: int, nbytes: int, stream: int) -> None:
        self.calls.append((comm, SEND_RECV, nbytes))
        self._add(code, type_=DataType.INT8, stream=stream, comm=comm.number, peer=peer, value=nbytes)

    def compute(self, us: float, *, stream: int = 0) -> None:
        """The GPU computes for so long."""
        self._add(_Code.COMPUTE, stream=stream, value=round(us * 1e3))

    def host(self, us: float) -> None:
        """The host is busy for so long before it goes on."""
        self._add(_Code.HOST, value=round(us * 1e3))

    def record(self, event: int, *, stream: int = 0) -> None:
        self._add(_Code.RECORD, stream=stream, peer=event)

    def wait(self, event: int, *, stream: int = 0) -> None:
        self._add(_Code.WAIT, stream=stream, peer=event)

    def sync(self, stream: int = DEVICE) -> None:
        self._add(_Code.SYNC, stream=stream)

    def capture(self, *, stream: int = 0) -> None:
        self._add(_Code.CAPTURE, stream=stream)

    def end_capture(self, graph: int, *, stream: int = 0) -> None:
        self._add(_Code.END_CAPTURE, stream=stream, peer=graph)

    def replay(self, graph: int, *, stream: int = 0) -> None:
        self._add(_Code.REPLAY, stream=stream, peer=graph)

    def drop(self, graph: int) -> None:
        """Lets go of a graph: NCCL keeps the communicators in it until then, and their ``destroy`` waits."""
        self._add(_Code.DROP, peer=graph)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """What the host takes for the operations is printed; see ``bench_nccl.read_clock``."""
        self._add(_Code.CLOCK, value=0)
        yield
        self._add(_Code.CLOCK, value=1)


SEND_RECV: Final = 5
"""NCCL's function number of a pair of send and receive."""


@dataclass
class RankProgram:
    """One rank."""

    rank: int
    node: int
    device: int
    setup: Ops
    step: Ops
    end: Ops

    @property
    def parts(self) -> tuple[Ops, Ops, Ops]:
        return self.setup, self.step, self.end


class Program:
    """A job of ``nodes`` times ``ranks_per_node`` ranks, all of which run here."""

    def __init__(
        self, *, nodes: int = 1, ranks_per_node: int, rate_hz: float = 0.0, steps: int = 0, window: int = 1,
        call_us: float = 3.0,
    ) -> None:  # fmt: skip
        """``rate_hz`` steps per second of real time, 0 for as fast as possible; ``steps`` to run, 0 until stopped. A
        rank may begin ``window`` steps before another. ``call_us`` is what the host takes for one call of NCCL.
        """
        n = nodes * ranks_per_node
        if not 1 <= n <= MAX_RANKS:
            raise ValueError(f"{n} ranks; a job here has 1 to {MAX_RANKS}")
        self.rate_hz, self.steps, self.window, self.call_us = rate_hz, steps, window, call_us
        self.comms: list[Comm] = []
        self.ranks = [
            RankProgram(rank, rank // ranks_per_node, rank % ranks_per_node, Ops(rank), Ops(rank), Ops(rank))
            for rank in range(n)
        ]

    def comm(
        self, name: str, ranks: Sequence[int] | None = None, *, places: Sequence[int] | None = None,
        size: int | None = None, nodes: Sequence[int] | None = None, blocking: bool = True,
    ) -> Comm:  # fmt: skip
        """A communicator of some of the job's ranks, all by default; nobody has it before its ``init`` or ``split``.

        Where the job only stands for a larger one, ``size`` and ``places`` say what its ranks are in that, and
        ``nodes`` where each of ``size`` ranks is.
        """
        members = tuple(ranks) if ranks is not None else tuple(range(len(self.ranks)))
        count = len(members) if size is None else size
        where = tuple(nodes) if nodes is not None else tuple(self.ranks[r].node for r in members)
        if len(where) != count and count <= MAX_RANKS:
            raise ValueError(f"communicator {name!r}: {count} ranks on {len(where)} places")
        if len(name.encode()) >= _NAME_BYTES or "\0" in name:
            raise ValueError(f"communicator name {name!r} does not fit {_NAME_BYTES - 1} bytes")
        comm = Comm(
            number=len(self.comms),
            name=name,
            ranks=members,
            places=tuple(places) if places is not None else tuple(range(len(members))),
            size=count,
            nodes=where,
            blocking=blocking,
        )
        self.comms.append(comm)
        return comm

    def split(self, parent: Comm, groups: dict[str, Sequence[int]], *, part: str = "setup") -> list[Comm]:
        """Splits a communicator into named groups of the job's ranks; those of its ranks that are in none get none."""
        comms = [self.comm(name, ranks) for name, ranks in groups.items()]
        for rank in parent.ranks:
            mine = next((c for c in comms if rank in c.ranks), None)
            ops: Ops = getattr(self.ranks[rank], part)
            ops.split(parent, mine, color=0 if mine is None else comms.index(mine))
        return comms

    def calls(self) -> set[tuple[Comm, int, int]]:
        """Every (communicator, function, bytes) that any rank calls."""
        return {call for rank in self.ranks for ops in rank.parts for call in ops.calls}

    def write(self, path: Path) -> None:
        """Writes the file that the job's processes map."""
        ops = [part.array() for rank in self.ranks for part in rank.parts]
        counts = np.array([len(part) for part in ops])
        first = np.cumsum([0, *counts[:-1]])
        ranks = np.zeros(len(self.ranks), _RANK)
        for row, rank, at, n in zip(ranks, self.ranks, first.reshape(-1, 3), counts.reshape(-1, 3), strict=True):
            row["setup"], row["step"], row["end"] = at
            row["n_setup"], row["n_step"], row["n_end"] = n
            row["node"], row["device"] = rank.node, rank.device
        comms = np.zeros(len(self.comms), _COMM)
        for row, comm in zip(comms, self.comms, strict=True):
            row["name"], row["present"], row["blocking"] = comm.name.encode(), len(comm.ranks), comm.blocking
            row["nodes"][: min(comm.size, MAX_RANKS)] = comm.nodes[:MAX_RANKS]
        body = comms.tobytes() + ranks.tobytes() + np.concatenate(ops).tobytes()
        header = np.zeros((), _HEADER)
        values: dict[str, Any] = {
            "magic": _MAGIC,
            "version": _VERSION,
            "n_comms": len(self.comms),
            "n_ranks": len(self.ranks),
            "n_ops": int(counts.sum()),
            "file_bytes": _HEADER.itemsize + len(body),
            "buffer_bytes": max((nbytes for _, _, nbytes in self.calls()), default=0),
            "call_ns": round(self.call_us * 1e3),
            "steps": self.steps,
            "rate_hz": self.rate_hz,
            "window": self.window,
        }
        for name, value in values.items():
            header[name] = value
        path.write_bytes(header.tobytes() + body)
