"""The coordinator of a finished or interrupted run, as it was when its last checkpoint was written."""

from __future__ import annotations

from pathlib import Path

from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.config.experiment import recorded
from dynamiccl_ray.control.agreement import MemoryStore
from dynamiccl_ray.trainers.online.run import plan_of, read_checkpoint


def left_coordinator(run: Path) -> Coordinator:
    """To be looked at. Raises ConfigError if the directory is not a run's."""
    store, name = MemoryStore(), run.name
    store.put(f"{name}/state", read_checkpoint(run)["coordinator"])
    return Coordinator(plan_of(recorded(run / "experiment.json"), name), store)
