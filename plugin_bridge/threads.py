"""Threads of a communicator's kernels: set when NCCL creates it, for good.

No version of NCCL lets a tuner choose them for a call. NCCL reads NCCL_NTHREADS and NCCL_LL128_NTHREADS when it makes a
communicator's cost model (src/graph/tuning.cc), and how many channels a collective uses depends on them: all ranks of
a communicator need the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import THREAD_VALUES

_LEAST_LL128: Final = 160
_NAMES: Final = ("NCCL_NTHREADS", "NCCL_LL128_NTHREADS")
_NO_CACHE: Final = "NCCL_NO_CACHE"


def thread_variables(count: int) -> dict[str, str]:
    """What processes export for communicators of so many threads: of all that they make, but for those made within
    ``threads``. None for 0, NCCL's own.

    Raises ConfigError for a count that is not one of ``THREAD_VALUES``.
    """
    if count not in THREAD_VALUES:
        raise ConfigError(f"threads is {count}; there are {', '.join(map(str, THREAD_VALUES))} (0: NCCL's own)")
    told = [name for name in os.environ.get(_NO_CACHE, "").split(",") if name and name not in _NAMES]
    no_cache = {_NO_CACHE: ",".join([*told, *_NAMES])}
    return {**dict(zip(_NAMES, (str(count), str(max(count, _LEAST_LL128))), strict=True)), **no_cache} if count else {}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Communicators that NCCL makes within have so many threads at most. Every rank of them has to say the same.

        with dynamiccl_ray.threads(256):
            group = dist.new_group(ranks)
            dist.barrier(group)     # PyTorch makes the communicator with its first collective

    NCCL 2.30 and later read the variables anew for every communicator; before that, those of the first one hold for
    all. Raises ConfigError as ``thread_variables`` does, and RuntimeError where NCCL has not been told to read them
    anew: NCCL_NO_CACHE has to be exported before the process starts, as ``dynamiccl plugin env --threads`` does.
    """
    wanted = thread_variables(count)
    told = os.environ.get(_NO_CACHE, "").split(",")
    if "ALL" not in told and not set(_NAMES) <= set(told):
        raise RuntimeError(
            f"{_NO_CACHE} is {os.environ.get(_NO_CACHE)!r}: NCCL would keep the threads of its first communicator; "
            f"export {_NO_CACHE}={','.join(_NAMES)} before the process starts"
        )
    before = {name: os.environ.get(name) for name in _NAMES}
    try:
        _put({name: wanted.get(name) for name in _NAMES})
        yield
    finally:
        _put(before)


def _put(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
