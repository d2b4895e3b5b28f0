"""For machines without a GPU: gives every process of an example ranks of the emulated NCCL beside its gloo.

    torchrun --nproc-per-node 2 examples/emulated.py examples/ddp.py
    python examples/emulated.py examples/ray_train.py

runs the example unchanged. At its first optimizer step each process opens, for every process group that it is in, a
communicator of the emulated NCCL, which loads the plugin as NCCL does. Before every step it calls all-reduces there,
the same ones each time. They move no data; what they take is what the model of a cluster says. So a run has something
to tune here, and in-band agreement happens in the example's own processes, at its own steps.

EMULATED_DIRECTORY names the folder of the communicators' files and logs, which must not
exist yet and stays; a temporary one by default.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.plugin_bridge import native_dir
from dynamiccl_ray.plugin_bridge.constants import Constants, write_constants
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob
from dynamiccl_ray.plugin_bridge.program import DataType, Program
from dynamiccl_ray.plugin_bridge.times import Times

SIZES = (64 << 10, 1 << 20, 16 << 20)
ALL_REDUCE, SUM = int(Collective.ALL_REDUCE), 0
LIBRARY = native_dir() / "libnccl-emulated.so"
# As if every process had a machine of its own in a cloud.
CLUSTER = find_cluster("cloud-tcp").model_copy(update={"gpus_per_node": 1})


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``, which goes by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class CommInfo(ctypes.Structure):
    """``gpu_comm_info``: by what the virtual GPU knows the times of a communicator."""

    _fields_ = (
        ("id", ctypes.c_uint64), ("number", ctypes.c_uint32), ("rank", ctypes.c_int), ("ranks", ctypes.c_int),
        ("present", ctypes.c_int), ("nodes", ctypes.c_char_p),
    )  # fmt: skip


def lay_out(directory: Path, groups: list[tuple[int, ...]], world: int) -> None:
    """What the ranks of all communicators have to know: NCCL's beliefs, and what collectives take."""
    program = Program(nodes=world, ranks_per_node=1)
    times, constants = Times(rank_jitter=0.01), {}
    for group in groups:
        comm, physics = program.comm("-".join(map(str, group)), group), Physics(CLUSTER, len(group))
        constants[comm.number] = Constants.of(comm, physics.belief)
        for nbytes, us in zip(SIZES, physics.time_us(Collective.ALL_REDUCE, list(SIZES)), strict=True):
            times.asked(comm.number, ALL_REDUCE, nbytes, us[None], 0.02 + 0.0 * us[None])
    write_constants(directory / "constants", constants)
    NcclJob(program, library=LIBRARY, directory=directory, times=times)  # writes its files; no process is started


class Beside:
    """The emulated ranks of this process; a hook that runs before each optimizer step."""

    def __init__(self) -> None:
        self._nccl: Any = None
        self._comms: list[ctypes.c_void_p] = []
        self._stream = ctypes.c_void_p()
        self._step = 0

    def _open(self) -> None:
        mine = [tuple(sorted(ranks)) for ranks in dist.distributed_c10d._world.pg_group_ranks.values()]
        rank, world = dist.get_rank(), dist.get_world_size()
        told: list[Any] = [None] * world
        dist.all_gather_object(told, sorted({group for group in mine if len(group) > 1 and rank in group}))
        groups = sorted({group for of in told for group in of}, key=lambda group: (-len(group), group))
        place = [None]
        if rank == 0:
            named = os.environ.get("EMULATED_DIRECTORY")
            if named is None:
                temporary = tempfile.TemporaryDirectory(prefix="emulated-")
                atexit.register(temporary.cleanup)
            directory = Path(named or temporary.name)
            directory.mkdir(exist_ok=named is None)
            lay_out(directory, groups, world)
            place = [str(directory)]
        dist.broadcast_object_list(place)
        os.environ |= {name: f"{place[0]}/{file}" for name, file in FILES.items()}
        os.environ |= {"GPU_LOG": f"{place[0]}/log.{rank}", "GPU_DEVICES": "1"}
        self._nccl = nccl = ctypes.CDLL(str(LIBRARY))
        nccl.gpu_stream_create.restype = ctypes.c_void_p
        self._stream = ctypes.c_void_p(nccl.gpu_stream_create(0))
        for number, group in enumerate(groups):
            if rank in group:
                self._comms.append(self._join(number, group.index(rank), len(group)))
        atexit.register(self._close)

    def _join(self, number: int, rank: int, ranks: int) -> ctypes.c_void_p:
        nccl, unique, comm, key = self._nccl, UniqueId(), ctypes.c_void_p(), ctypes.c_void_p()
        nccl.gpu_comm_announce(number)
        # The same on every rank, so nobody has to be told.
        self._check(nccl.ncclGetUniqueId(ctypes.byref(unique)))
        self._check(nccl.ncclCommInitRankConfig(ctypes.byref(comm), ranks, unique, rank, None))
        info = CommInfo(number=number, rank=rank, ranks=ranks, present=ranks, nodes=bytes(range(ranks)))
        nccl.gpu_comm_identity(comm, ctypes.byref(key), ctypes.byref(info))
        nccl.gpu_comm_register(key, ctypes.byref(info))
        return comm

    def __call__(self, *_: Any) -> None:
        if not dist.is_initialized() or dist.get_world_size() < 2:
            return
        if self._nccl is None:
            self._open()
        self._nccl.gpu_set_phase(0, 0, ctypes.c_uint64(self._step))
        self._step += 1
        for comm in self._comms:
            # Twice: the log then shows that a table changes between two steps and never inside one.
            for nbytes in SIZES * 2:
                count = ctypes.c_size_t(nbytes // DataType.FLOAT32.nbytes)
                called = self._nccl.ncclAllReduce(None, None, count, int(DataType.FLOAT32), SUM, comm, self._stream)
                self._check(called)
            self._nccl.gpu_device_sync(0)

    def _close(self) -> None:
        for comm in self._comms:
            self._nccl.ncclCommDestroy(comm)

    def _check(self, result: int) -> None:
        if result != 0:
            self._nccl.ncclGetLastError.restype = ctypes.c_char_p
            raise RuntimeError(f"the emulated NCCL: {self._nccl.ncclGetLastError(None).decode()}")


FILES = {"EMULATED_NCCL": "constants", "GPU_TIMES": "times.bin", "GPU_MEETING": "meeting"}


def beside() -> None:
    """From now on this process has emulated ranks; Ray calls it in every worker."""
    register_optimizer_step_pre_hook(Beside())


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: emulated.py SCRIPT [ARGUMENTS]; it runs one of the examples, see examples/README.md")
    if "DYNAMICCL_JOB_ID" not in os.environ:
        sys.exit('DYNAMICCL_JOB_ID is not set; run: eval "$(dynamiccl plugin env --job examples)"')
    # Ray's workers are other processes; those of torchrun are this one.
    if "RANK" not in os.environ:
        hook = {"runtime_env": {"worker_process_setup_hook": "emulated.beside"}}
        os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps(hook)
        os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
    else:
        beside()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
