"""CUDA's runtime through its C interface, as far as ranks need it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_NON_BLOCKING, _DEFAULT_COPY, _RELAXED = 1, 4, 2


def _places() -> Iterator[Path]:
    """Folders that may hold a CUDA: of CUDA_HOME, /usr/local/cuda, or of NVIDIA's wheels."""
    for home in filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda")):
        yield Path(home) / "lib64"
    for entry in map(Path, sys.path):
        yield from sorted((entry / "nvidia").glob("*/lib"))


def _library() -> ctypes.CDLL:
    for name in ("libcudart.so.13", "libcudart.so.12"):
        for path in (Path(), *_places()):
            try:
                return ctypes.CDLL(str(path / name) if path.name else name)
            except OSError:
                continue
    raise OSError("no libcudart.so.13 or .12: set CUDA_HOME, or pip install nvidia-cuda-runtime")


class Cuda:
    """Raises RuntimeError where a call fails. Streams, events, graphs and memory are CUDA's own handles."""

    def __init__(self) -> None:
        self._lib = _library()
        self._lib.cudaGetErrorString.restype = ctypes.c_char_p

    def _do(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with {code}: {self._lib.cudaGetErrorString(code).decode()}")

    def _made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._do(name, ctypes.byref(made), *arguments)
        return made

    @property
    def devices(self) -> int:
        count = ctypes.c_int()
        self._do("cudaGetDeviceCount", ctypes.byref(count))
        return count.value

    def use(self, device: int) -> None:
        """Of the calling thread."""
        self._do("cudaSetDevice", device)

    def memory(self, nbytes: int) -> ctypes.c_void_p:
        return self._made("cudaMalloc", ctypes.c_size_t(nbytes))

    def write(self, to: ctypes.c_void_p, data: np.ndarray[Any, Any]) -> None:
        self._do("cudaMemcpy", to, ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes), _DEFAULT_COPY)

    def read(self, data: np.ndarray[Any, Any], source: ctypes.c_void_p) -> None:
        self._do("cudaMemcpy", ctypes.c_void_p(data.ctypes.data), source, ctypes.c_size_t(data.nbytes), _DEFAULT_COPY)

    def copy(self, to: ctypes.c_void_p, source: ctypes.c_void_p, nbytes: int, stream: ctypes.c_void_p) -> None:
        """On the GPU, in stream order."""
        self._do("cudaMemcpyAsync", to, source, ctypes.c_size_t(nbytes), _DEFAULT_COPY, stream)

    def stream(self) -> ctypes.c_void_p:
        return self._made("cudaStreamCreateWithFlags", _NON_BLOCKING)

    def sync(self, stream: ctypes.c_void_p) -> None:
        self._do("cudaStreamSynchronize", stream)

    def event(self) -> ctypes.c_void_p:
        return self._made("cudaEventCreateWithFlags", 0)

    def record(self, event: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        self._do("cudaEventRecord", event, stream)

    def elapsed_us(self, begin: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        milliseconds = ctypes.c_float()
        self._do("cudaEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value * 1e3

    def begin_capture(self, stream: ctypes.c_void_p) -> None:
        self._do("cudaStreamBeginCapture", stream, _RELAXED)

    def end_capture(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        """A graph, ready to be launched."""
        graph = ctypes.c_void_p()
        self._do("cudaStreamEndCapture", stream, ctypes.byref(graph))
        ready = self._made("cudaGraphInstantiate", graph, ctypes.c_ulonglong(0))
        self._do("cudaGraphDestroy", graph)
        return ready

    def launch(self, graph: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        self._do("cudaGraphLaunch", graph, stream)

    def drop(self, graph: ctypes.c_void_p) -> None:
        """NCCL waits for that before it lets the communicators in it go."""
        self._do("cudaGraphExecDestroy", graph)
