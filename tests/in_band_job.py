"""A DDP or FSDP job on gloo whose communicators ask the plugin: one process, as `test_in_band.py` starts it.

    python in_band_job.py RANK RANKS STEPS OUT [explicit] [skew] [fsdp]

Writes its losses and what each call of each communicator was told. ``without`` leaves DynamICCL out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

JOB = os.environ["DYNAMICCL_JOB_ID"]
KIB = 1 << 10


def main() -> None:
    rank, ranks, steps = (int(word) for word in sys.argv[1:4])
    out, options = Path(sys.argv[4]), set(sys.argv[5:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Not on a port: one that was free may be another test's by then.
    store = dist.FileStore(str(out.with_name("store")), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    comms, told = {}, {}
    if "without" not in options:
        from trained import Trained

        import dynamiccl_ray.torch

        # A few steps of this job, so that a short one has many switches.
        dynamiccl_ray.torch.PERIOD_NS = 10_000_000
        # All ranks, and pairs of them, as data and tensor parallelism have; the pairs come later.
        comms["world"] = Trained(JOB, 0x77, ranks)
    layers = torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    model: torch.nn.Module = torch.nn.Sequential(*layers)
    if "fsdp" in options:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    else:
        model = DistributedDataParallel(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        data = torch.randn(16, 32, generator=torch.Generator().manual_seed(step * ranks + rank))
        loss = model(data).square().mean()
        loss.backward()
        if comms:
            if step == steps // 4:
                comms["pair"] = Trained(JOB, 0x100 + rank // 2, 2)
            if step == 3 * steps // 4:
                told["pair"] = comms["pair"].told
                comms.pop("pair").close()
            for name, comm in comms.items():
                for call in range(4 if name == "world" else 2):
                    comm.call(4, (64 << call) * KIB)
                if "skew" in options and rank == 1 and step == steps // 2:
                    comm.call(4, 64 * KIB)
            if "explicit" in options:
                dynamiccl_ray.torch.step(loss.item())
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    said = {"losses": losses, "told": told}
    if comms:
        told["world"] = comms["world"].told
        comms["world"].close()
    out.write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
