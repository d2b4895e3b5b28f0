"""What runners ask Ray."""

from __future__ import annotations

import ray

from dynamiccl_ray.actors.remote import on_this_node


def test_the_slots_of_a_node_are_its_runners() -> None:
    ray.init(address="local", num_cpus=1, resources={"dynamiccl": 3}, include_dashboard=False, log_to_driver=False)
    try:
        assert on_this_node("dynamiccl") == 3
        assert on_this_node("another") == 0
    finally:
        ray.shutdown()
