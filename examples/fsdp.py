"""Sharded data parallelism (FSDP2) by torchrun: all-gathers and reduce-scatters are tuned, too.

    eval "$(dynamiccl plugin env --job examples)"
    torchrun --nproc-per-node 8 examples/fsdp.py

On GPUs with NCCL; without a GPU it trains on CPUs with gloo, and examples/README.md says how to see tuning there.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dynamiccl_ray.torch  # noqa: F401  This line is all that DynamICCL needs.


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    torch.manual_seed(0)
    block = [torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))]
    model = torch.nn.Sequential(*block, torch.nn.Linear(256, 256)).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chance = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
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
