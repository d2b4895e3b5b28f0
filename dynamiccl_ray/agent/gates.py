"""Which way a communicator's collectives go, and when there is nothing for the product to decide.

The path head has three values, and what a job says of itself leaves one of them: a gate, not something to learn.
"""

from __future__ import annotations

from dynamiccl_ray.agent.observation import Context
from dynamiccl_ray.knobs import Carrier


def path_of(context: Context) -> Carrier:
    """Aggregation in the network must not be steered past. Nothing synthesises schedules yet, so that slot stays
    empty.
    """
    return Carrier.INA_PASSTHROUGH if context.topology.ina_active else Carrier.NCCL


def hands_off(context: Context) -> str | None:
    """Why NCCL's own choice must stand for every key, in words; None where it need not."""
    if path_of(context) is not Carrier.NCCL:
        return "aggregation in the network carries the collectives"
    if context.topology.library != "nccl":
        return f"the collectives are {context.topology.library}'s, not NCCL's"
    if context.workload.architecture != "all-reduce":
        return f"the job's architecture is {context.workload.architecture}, not all-reduce"
    return None
