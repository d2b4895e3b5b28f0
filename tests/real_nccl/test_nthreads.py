"""Threads on NCCL's own host code: a communicator has those that were asked for when it was made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.plugin_bridge.nccl_job import make_meeting
from dynamiccl_ray.plugin_bridge.real_nccl import RealNccl
from dynamiccl_ray.plugin_bridge.threads import thread_variables

# Three communicators of two ranks, one after the other; the second is made within `threads`.
HOST = """
import contextlib, ctypes, sys
from dynamiccl_ray.plugin_bridge.threads import threads
nccl = ctypes.CDLL(sys.argv[1])
for within in (contextlib.nullcontext(), threads(128), contextlib.nullcontext()):
    with within:
        comms = (ctypes.c_void_p * 2)()
        assert nccl.ncclCommInitAll(comms, 2, (ctypes.c_int * 2)(0, 1)) == 0
        for comm in comms:
            assert nccl.ncclCommDestroy(ctypes.c_void_p(comm)) == 0
"""


def test_a_communicator_has_the_threads_that_were_asked_for(nccl: RealNccl, tmp_path: Path) -> None:
    log, meeting = tmp_path / "log", tmp_path / "meeting"
    make_meeting(meeting, max_comms=4, max_ranks=2)
    env = {
        **os.environ,
        **nccl.env(find_cluster("dgx-h100-ndr"), tmp_path / "topology.xml"),
        **thread_variables(256),
        "LD_LIBRARY_PATH": str(nccl.library.parent),
        "GPU_MEETING": str(meeting),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "TUNING",
        "NCCL_DEBUG_FILE": str(log),
    }
    subprocess.run([sys.executable, "-c", HOST, str(nccl.library)], env=env, check=True, timeout=300)
    # In threes of algorithms: tree, ring, CollNet; LL, LL128 and simple of each.
    tables = re.findall(r"Max NThreads \|([ \d|]+)", log.read_text())[::3]
    ring = [[int(x) for x in table.split("|")[3:6]] for table in tables]
    anew = tuple(map(int, nccl.version.split("."))) >= (2, 30)
    assert ring == [[256, 256, 256], [128, 160, 128] if anew else [256, 256, 256], [256, 256, 256]]
