"""What times the agreement speaks to the coordinator as runners do."""

from __future__ import annotations

import pytest
import ray

from dynamiccl_ray.trainers.bench import activation
from dynamiccl_ray.trainers.common.cluster import start_ray


def test_an_agreement_of_simulated_ranks_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_SIMULATED", 32)
    start_ray()
    try:
        assert 0 < activation._simulated(0) < 60_000
    finally:
        ray.shutdown()
