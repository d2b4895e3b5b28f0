"""What times the agreement speaks to the coordinator as runners do."""

from __future__ import annotations

import ray

from dynamiccl_ray.trainers.bench.activation import agreement_ms
from dynamiccl_ray.trainers.common.cluster import start_ray


def test_an_agreement_of_simulated_ranks_is_timed() -> None:
    start_ray()
    try:
        assert 0 < agreement_ms(32) < 60_000
    finally:
        ray.shutdown()
