"""What a step boundary costs the training thread, and the step: a DDP job on gloo, with our line and without, in turns.

A third of the blocks of steps are with it. The others are two halves alike, so that their ratio says what chance does.

PYTHONPATH=.:tests python benchmarks/in_band.py OUT.json
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from trained import Trained

JOB = f"bench-{os.getpid()}"
RANKS, COMMS = 2, (1, 4, 16)
BLOCKS, STEPS = 20, 100
ARMS = WITH, WITHOUT, ALIKE = range(3)


def main() -> None:
    done = []
    for comms in COMMS:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        out = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (comms, JOB, port, out), RANKS)  # type: ignore[no-untyped-call]
        done.append(out.get())
        print(done[-1], file=sys.stderr)
    document = {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "ranks": RANKS,
        "steps": len(ARMS) * BLOCKS * STEPS,
        "of": done,
    }
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1))


def _rank(rank: int, comms: int, job: str, port: int, out: Any) -> None:
    os.environ["DYNAMICCL_JOB_ID"] = job
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    import dynamiccl_ray.torch

    dynamiccl_ray.torch.step()  # from now on its hook is silent
    held = [Trained(job, 0x100 + i, RANKS) for i in range(comms)]
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    )
    optimiser = torch.optim.AdamW(model.parameters())
    cpu, wall = [], []
    steps: dict[int, list[float]] = {arm: [] for arm in ARMS}
    order = np.random.default_rng(0)  # the same on all ranks
    for arm in (int(arm) for _ in range(BLOCKS) for arm in order.permutation(ARMS)):
        for _ in range(STEPS):
            began = time.perf_counter()
            model(torch.randn(64, 256)).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
            for comm in held:
                comm.call(4, 1 << 20)
            if arm == WITH:
                from_cpu, from_wall = time.thread_time(), time.perf_counter()
                dynamiccl_ray.torch.step()
                cpu.append(time.thread_time() - from_cpu)
                wall.append(time.perf_counter() - from_wall)
            steps[arm].append(time.perf_counter() - began)
    for comm in held:
        comm.close()
    if rank == 0:
        said = {
            "communicators": comms,
            "cpu_us": _percentiles(cpu),
            "us": _percentiles(wall),
            "step_us": _percentiles(steps[WITHOUT]),
            "step_ratio": _ratio(steps[WITH], steps[WITHOUT] + steps[ALIKE]),
            "by_chance": _ratio(steps[ALIKE], steps[WITHOUT]),
        }
        out.put(said)
    dist.barrier()
    dist.destroy_process_group()


def _ratio(some: list[float], others: list[float]) -> float:
    return round(float(np.median(some) / np.median(others)), 4)


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """Microseconds; the first steps, in which everything is set up, left out."""
    us = 1e6 * np.array(seconds[STEPS // 2 :])
    return {f"p{q}": round(float(np.percentile(us, q)), 1) for q in (10, 50, 99)}


if __name__ == "__main__":
    main()
