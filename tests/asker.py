"""Asks the runs of a Ray cluster, as ``dynamiccl status --json`` does, from one process that joins the cluster once.

A job id in, a line of JSON out: what the coordinator of its run says, or null where there is none.
"""

from __future__ import annotations

import json
import sys

from dynamiccl_ray.actors.registry import ask_coordinator
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.trainers.common.cluster import start_ray

if __name__ == "__main__":
    start_ray(log_to_driver=False)
    for line in sys.stdin:
        try:
            said = ask_coordinator(line.strip(), {})
        except RunError:
            said = None
        print(json.dumps(said), flush=True)
