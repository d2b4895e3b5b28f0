"""A policy trained from what earlier runs beside jobs have recorded, without a job or a model."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from dynamiccl_ray.agent import policy
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.trainers.offline import Method
from dynamiccl_ray.trainers.offline.data import AT_ONCE, RecordedData, initial
from dynamiccl_ray.trainers.offline.learning import PASSES, offline_config
from dynamiccl_ray.trainers.offline.recorded import Recorded

POLICY: Final = "policy.pt"

Progress = Callable[[dict[str, Any]], None]


def run_offline(
    runs: Sequence[Path],
    out: Path,
    *,
    method: Method,
    start: Path,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Trains the policy ``start`` on all episodes of ``runs``; returns the summary that ``out``/summary.json holds.

    ``out`` gets policy.pt, too. The same runs in the same order, policy and seed give the same weights. ``log_prob`` is
    the mean of what was recorded under the policy, ``better`` that of the half with the greater rewards; both before
    and after. Raises ConfigError for a policy or a run that cannot be read, and where ``out`` is one of the runs.
    """
    policy.load(start)
    if os.path.realpath(out) in map(os.path.realpath, runs):
        raise ConfigError(f"--out {out} is one of the runs that are learned from, and has its summary; name another")
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    algorithm = offline_config(method, runs, start, seed).build_algo()
    try:
        data: RecordedData = algorithm.offline_data
        recorded, net = data.recorded, data.net
        about = {"method": method.value, "decisions": len(recorded), "episodes": len(recorded.valid)}
        before = likelihood(net, recorded)
        for number in range(1, PASSES + 1):
            algorithm.train()
            progress({**about, "pass": number, "passes": PASSES, **likelihood(net, recorded)})
        after = likelihood(net, recorded)
        if not math.isfinite(after["log_prob"]):
            raise ConfigError(f"{start}: its weights are too large to learn from it; name another policy")
        policy.save(net, out / POLICY)
    finally:
        algorithm.stop()
    summary = {
        **about,
        "passes": PASSES,
        "seed": seed,
        "before": before,
        "after": after,
        "seconds": time.monotonic() - began,
        "policy": str(out / POLICY),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False))
    return summary


def likelihood(net: policy.PolicyNetwork, recorded: Recorded) -> dict[str, float]:
    """``log_prob``, the mean log-probability of what was recorded, and ``better``, of the half with the better
    rewards."""
    log_prob = []
    pieces = (torch.split(torch.from_numpy(of), AT_ONCE) for of in (recorded.observations[:, :-1], recorded.actions))
    with torch.no_grad():
        for obs, actions in zip(*pieces, strict=True):
            features, _ = net.features(obs, initial(net, len(obs)))
            log_prob.append(policy.log_prob(net.logits(obs, features), actions).numpy())
    of, rewards = np.concatenate(log_prob)[recorded.valid], recorded.rewards[recorded.valid]
    return {"log_prob": float(of.mean()), "better": float(of[rewards >= np.median(rewards)].mean())}
