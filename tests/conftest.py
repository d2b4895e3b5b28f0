"""What every test may use."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from dynamiccl_ray.experiment import Online
from plugin_bridge.channel import remove_stale, segments

# Read when Ray is imported.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


@pytest.fixture
def job() -> Iterator[str]:
    """A job id of its own; its segments must be gone or stale afterwards."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield name
    remove_stale(name)
    assert not list(segments(name)), "a rank process outlived its test"


def small_experiment(job: str, **changes: Any) -> Online:
    """Two nodes of two ranks on the measured p5en times; quick enough for a test."""
    raw: dict[str, Any] = {
        "name": "test",
        "job": job,
        "fabric": {"kind": "measured", "processes": {"nodes": 2, "ranks_per_node": 2}, "rate_hz": 0},
        "stop": {"rounds": 4},
        "ray": {"ranks_per_actor": 2},
    }
    for name, value in changes.items():
        raw[name] = {**raw[name], **value} if isinstance(raw.get(name), dict) and isinstance(value, dict) else value
    return Online.model_validate(raw)
