"""A rank process: takes commands from a pipe and answers each. The file descriptor of the pipe is its argument."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main() -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    first = pipe.recv()
    try:
        from benchmarks.gpu.rank import Rank

        rank = Rank(**first)
    except Exception:
        pipe.send(("error", traceback.format_exc()))
        return 1
    pipe.send(("ok", None))
    while True:
        try:
            op, arguments = pipe.recv()
        except EOFError:
            # The script is gone. Destroying groups could wait for ranks that are gone too.
            os._exit(1)
        try:
            answer = ("ok", getattr(rank, op)(**arguments))
        except Exception:
            answer = ("error", traceback.format_exc())
        pipe.send(answer)
        if op == "stop":
            return 0


if __name__ == "__main__":
    sys.exit(main())
