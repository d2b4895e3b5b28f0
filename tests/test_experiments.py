"""Every YAML that is shipped loads, and every job that it would play can be laid out."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamiccl_ray.experiment import load
from plugin_bridge.played import play

ROOT = Path(__file__).parents[1]
SHIPPED = [*(ROOT / "experiments" / "online").glob("*.yaml"), ROOT / "dynamiccl_ray" / "data" / "demo.yaml"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_experiments_load_and_can_be_played(path: Path) -> None:
    experiment = load(path)
    if experiment.fabric.kind == "nccl":
        return
    fabric = play(experiment.fabric, seed=experiment.seed, channels=experiment.actions.channels)
    assert len(fabric.nbytes) >= 2
    assert len(fabric.time_us) == 1 + len(experiment.fabric.events)
    assert all(mask[1:].any() for mask in fabric.valid.values()), "a key without anything to learn"
