"""Groups as Megatron has them: tensor parallelism in groups of neighbours, data parallelism across these.

    eval "$(dynamiccl plugin env --job examples)"
    torchrun --nproc-per-node 8 examples/tensor_data_groups.py --tensor 2

Each group is a communicator of its own, with tables of its own. All of a process's change at the same boundary.
On GPUs with NCCL; without a GPU it trains on CPUs with gloo, and examples/README.md says how to see tuning there.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dynamiccl_ray.torch  # noqa: F401  This line is all that DynamICCL needs.


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tensor", type=int, default=2, help="Ranks of a tensor group.")
    told = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    if world % told.tensor:
        raise SystemExit(f"--tensor is {told.tensor}; it must divide the number of processes, {world}")
    mesh = init_device_mesh(device, (world // told.tensor, told.tensor), mesh_dim_names=("data", "tensor"))

    torch.manual_seed(0)
    layers = torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256), torch.nn.Linear(256, 256)
    model = torch.nn.Sequential(*layers).to(device)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Ranks of a tensor group see the same data.
    chance = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    for step in range(told.steps):
        x = torch.randn(32, 256, generator=chance).to(device)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
