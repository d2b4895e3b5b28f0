"""The coordinator of a finished or interrupted run, as it was when its last checkpoint was written."""

from __future__ import annotations

from pathlib import Path

from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.control.agreement import MemoryStore
from dynamiccl_ray.errors import ConfigError, short
from dynamiccl_ray.trainers.online.run import read_checkpoint


def left_coordinator(run: Path) -> Coordinator:
    """To be looked at. Raises ConfigError if the directory is not a run's."""
    store, name = MemoryStore(), run.name
    store.put(f"{name}/state", read_checkpoint(run)["coordinator"])
    try:
        experiment = Online.model_validate_json((run / "experiment.json").read_bytes())
    except (OSError, ValueError) as e:
        raise ConfigError(f"{run / 'experiment.json'}: not the experiment of a run: {short(str(e))}") from None
    return Coordinator(Plan(run=name, experiment=experiment, topology={}), store)
