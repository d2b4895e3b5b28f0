"""What every test may use."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import hypothesis
import pytest

from dynamiccl_ray.plugin_bridge.segments import remove_stale, segments

# Read when Ray is imported.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Read when PyTorch is imported: more threads than cores make networks this small slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test is about speed, and on a busy machine any example may take long.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that mostly wait, for Ray and for ranks, come first: none of them is what one worker is left with."""
    items.sort(key=lambda item: not {"actors", "trainers"} & set(item.path.parts))


@pytest.fixture
def job() -> Iterator[str]:
    """A job id of its own; its segments must be gone or stale afterwards."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield name
    remove_stale(name)
    assert not list(segments(name)), "a rank process outlived its test"
