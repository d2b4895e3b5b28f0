"""Lightning: a callback that says where a step ends, and tells the run its loss.

    pip install lightning
    eval "$(dynamiccl plugin env --job examples)"
    torchrun --nproc-per-node 8 examples/lightning_callback.py

On GPUs with NCCL; without a GPU it trains on CPUs with gloo, and examples/README.md says how to see tuning there.
Without the callback, `import dynamiccl_ray.torch` alone works as well; the loss is not reported then.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

try:
    import lightning
except ImportError:
    raise SystemExit("this example needs Lightning: pip install lightning") from None

import dynamiccl_ray.torch


class StepBoundary(lightning.Callback):
    """Tables change where a batch has ended, on all ranks alike."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        dynamiccl_ray.torch.step(loss=outputs["loss"].item())


class Rolled(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)
        self.layers = torch.nn.Sequential(*layers)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return (self.layers(batch[0]) - batch[0].roll(1, dims=1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    steps, processes = parser.parse_args().steps, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // processes
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4096, 256)), batch_size=32)
    trainer = lightning.Trainer(
        strategy="ddp", devices=processes, num_nodes=nodes, max_steps=steps, callbacks=[StepBoundary()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Rolled(), data)
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}: done", flush=True)


if __name__ == "__main__":
    main()
