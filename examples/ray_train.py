"""Ray Train: the workers of a TorchTrainer, with tables that change between two steps.

    eval "$(dynamiccl plugin env --job examples)"
    python examples/ray_train.py --workers 8

On GPUs with NCCL; without a GPU it trains on CPUs with gloo, and examples/README.md says how to see tuning there.
The control plane is a Ray job of its own, on the same cluster or on another.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model

PLUGIN = ("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "DYNAMICCL_JOB_ID")


def train_loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    import dynamiccl_ray.torch  # noqa: F401  In the worker, where the optimizer is. It is all that DynamICCL needs.

    torch.manual_seed(0)
    device = get_device()
    layers = torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)
    model = prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank = ray.train.get_context().get_world_rank()
    chance = torch.Generator().manual_seed(rank)
    for step in range(config["steps"]):
        x = torch.randn(32, 256, generator=chance).to(device)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    told = parser.parse_args()
    # Workers start without the variables of this shell.
    ray.init(runtime_env={"env_vars": {name: os.environ[name] for name in PLUGIN if name in os.environ}})
    scaling = ScalingConfig(num_workers=told.workers, use_gpu=torch.cuda.is_available())
    TorchTrainer(train_loop, train_loop_config={"steps": told.steps}, scaling_config=scaling).fit()


if __name__ == "__main__":
    main()
