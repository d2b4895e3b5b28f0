"""Processes of a job that are not this one: each has ranks as ``trained.py`` makes them, and does what it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__)


class Elsewhere:
    """A training process. ``open`` makes it a rank of a communicator, ``call`` makes calls of one."""

    def __init__(self, job: str) -> None:
        env = os.environ | {
            "DYNAMICCL_JOB_ID": job,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1]), *sys.path]),
        }
        self._popen = subprocess.Popen(
            [sys.executable, str(HERE), job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def open(self, comm: int, ranks: int, rank: int) -> None:
        self._say("open", comm, ranks, rank)

    def call(self, comm: int, n: int = 1, nbytes: int = 1 << 20) -> None:
        self._say("call", comm, n, nbytes)

    def close(self, comm: int) -> None:
        """Destroys the communicator, as a job does that goes on without it."""
        self._say("close", comm)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()

    def _say(self, *words: Any) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(" ".join(map(str, words)) + "\n")
        self._popen.stdin.flush()
        assert self._popen.stdout.readline() == "done\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _obey(job: str) -> None:
    from trained import Trained

    from dynamiccl_ray.knobs import Collective

    mine: dict[int, Trained] = {}
    for line in sys.stdin:
        what, comm, *numbers = line.split()
        comm_id, of = int(comm), [int(number) for number in numbers]
        if what == "open":
            mine[comm_id] = Trained(job, comm_id, *of)
        elif what == "call":
            for _ in range(of[0]):
                mine[comm_id].call(int(Collective.ALL_REDUCE), of[1])
        else:
            mine.pop(comm_id).close()
        print("done", flush=True)


if __name__ == "__main__":
    _obey(sys.argv[1])
