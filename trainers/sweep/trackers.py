"""Trackers of experiments that hear of every trial, through Tune's own callbacks."""

from __future__ import annotations

import importlib.util
import os

from ray.tune import Callback

from dynamiccl_ray.config.sweep import Sweep
from dynamiccl_ray.errors import ConfigError


def trackers(sweep: Sweep) -> list[Callback]:
    """What the sweep asks for. Raises ConfigError for one that is not installed, or that nobody is logged into."""
    for name, asked in (("mlflow", sweep.mlflow), ("wandb", sweep.wandb)):
        if asked is not None and importlib.util.find_spec(name) is None:
            raise ConfigError(f"{name}: it is not installed; pip install 'dynamiccl-ray[track]'")
    callbacks: list[Callback] = []
    if sweep.mlflow is not None:
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        experiment = sweep.mlflow.experiment or sweep.name
        callbacks.append(MLflowLoggerCallback(tracking_uri=sweep.mlflow.uri, experiment_name=experiment))
    if sweep.wandb is not None:
        import wandb
        from ray.air.integrations.wandb import WandbLoggerCallback

        # Tune would find out in the middle of the first trial.
        if os.environ.get("WANDB_MODE") not in ("offline", "disabled") and not wandb.api.api_key:
            raise ConfigError(
                "wandb: nobody is logged in; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
            )
        callbacks.append(WandbLoggerCallback(project=sweep.wandb.project, group=sweep.wandb.group or sweep.name))
    return callbacks
