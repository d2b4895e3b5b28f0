"""A Ray cluster to run on: the one that is there, or a local one."""

from __future__ import annotations

import logging
import os

from dynamiccl_ray.errors import RunError


def start_ray(actors: int = 0) -> None:
    """A cluster that is there already (``RAY_ADDRESS``, as under ``ray job submit``), or a local one that has room
    for ``actors`` which ask for a core each, however few cores this machine has. Raises RunError."""
    import ray

    try:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(logging_level=logging.ERROR)
        else:
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
            ray.init(
                num_cpus=max(actors, os.cpu_count() or 1),
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
                configure_logging=False,
            )
    except Exception as e:
        raise RunError(
            f"Ray does not start: {e}. Look at `dynamiccl doctor`, or use --serial to run without Ray"
        ) from e


def require_room(actors: int) -> None:
    """Raises RunError where the cluster can never give ``actors`` a core each: Ray would wait for ever."""
    import ray

    cores = int(ray.cluster_resources().get("CPU", 0))
    if cores < actors:
        raise RunError(f"{actors} Ray actors need a core each and the cluster has {cores}; ask for fewer, or add nodes")
