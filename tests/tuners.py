"""Tuner plugins, ours by default, as NCCL calls them, in this process."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.plugin_bridge import plugin_path

_P, _I, _N, _U = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64
_COUNT = ctypes.POINTER(_I)
_OLD_INIT = (_I, _N, _N, _P, ctypes.POINTER(_P))
_NEW_INIT = (_I, ctypes.POINTER(_P), _U, _N, _N, _P, _P, _P)
_V2_DECIDE = (_I, _P, _I, _N, _I, _I, _I, _COUNT, _COUNT, _COUNT)
_V3_DECIDE = (_I, _P, _I, _N, _I, _P, _I, _I, _COUNT)
_DECIDE = (_I, _P, _I, _N, _I, _P, _I, _I, _I, _COUNT)
_CHUNK = (_I, _P, _I, _N, _I, _I, _I, ctypes.POINTER(_N))
_PROFILER_INIT = (_I, ctypes.POINTER(_P), _U, _COUNT, ctypes.c_char_p, _I, _I, _I, _P)


def _pointers(library: Path, symbol: str, *types: tuple[Any, ...]) -> list[Any]:
    """The functions of one of a plugin's structs, which begin behind its name."""
    n = 1 + len(types)
    words = (_P * n).in_dll(ctypes.CDLL(str(library)), symbol)
    return [ctypes.CFUNCTYPE(*of)(words[1 + i]) for i, of in enumerate(types)]


@dataclass(frozen=True)
class Answer:
    """What NCCL sees after a call: all costs, or the pair where it is told that; channels; the chunk of each pair."""

    cost: bytes
    channels: int
    chunks: tuple[int, ...]


class Tuner:
    """A communicator of ``ranks`` on ``nodes``, with a name where ``name`` is given: then there is a profiler, too."""

    def __init__(
        self, version: int, ranks: int, nodes: int, *, name: str | None = None, library: Path | None = None
    ) -> None:
        self.version = version
        self.mask = _I(0)
        self._context, self._profiler = _P(), _P()
        self._library = library or plugin_path()
        if name is not None:
            (init,) = _pointers(self._library, "ncclProfiler_v6", _PROFILER_INIT)
            assert init(self._profiler, 7, self.mask, name.encode(), nodes, ranks, 0, None) == 0
        init_type = _OLD_INIT if version < 5 else _NEW_INIT
        decide_type = _V2_DECIDE if version == 2 else _V3_DECIDE if version == 3 else _DECIDE
        more = (_CHUNK,) if version == 6 else ()
        init, self._decide, self._end, *chunk = _pointers(
            self._library, f"ncclTunerPlugin_v{version}", init_type, decide_type, (_I, _P), *more
        )
        self._chunk = chunk[0] if chunk else None
        if version < 5:
            assert init(ranks, nodes, None, self._context) == 0
        else:
            assert init(self._context, 7, ranks, nodes, None, None, None) == 0

    def ask(self, func: int, nbytes: int, pipe_ops: int, cost: np.ndarray[Any, Any]) -> Answer:
        """One call with these costs (7, 3) of the pairs that NCCL offers."""
        channels, shown = _I(0), np.array(cost, np.float32)
        if self.version == 2:
            pair = _I(99), _I(99)
            assert self._decide(self._context, func, nbytes, 0, 0, pipe_ops, *pair, channels) == 0
            return Answer(bytes([pair[0].value, pair[1].value]), channels.value, ())
        table = (self._context, func, nbytes, pipe_ops, shown.ctypes.data, *shown.shape)
        registered = () if self.version == 3 else (0,)
        assert self._decide(*table, *registered, channels) == 0
        return Answer(shown.tobytes(), channels.value, self._chunks(func, nbytes))

    def _chunks(self, func: int, nbytes: int) -> tuple[int, ...]:
        found = []
        for algo in range(7 if self._chunk else 0):
            for proto in range(3):
                chunk = _N(12345)
                assert self._chunk(self._context, func, nbytes, algo, proto, 4, chunk) == 0
                found.append(chunk.value)
        return tuple(found)

    def close(self) -> None:
        assert self._end(self._context) == 0
        if self._profiler:
            *_, end = _pointers(self._library, "ncclProfiler_v6", _PROFILER_INIT, *[(_I, _P)] * 4)
            assert end(self._profiler) == 0
