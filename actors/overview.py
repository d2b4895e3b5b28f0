"""One page about a running job: what ``dynamiccl status`` shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamiccl_ray.actions import OWN_ACTION, action_of
from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.keys import key_name


def answer(coordinator: Coordinator, question: dict[str, Any]) -> dict[str, Any]:
    """Takes an order (``steering.check``), if the question is one, and says where the run stands. Raises ConfigError
    for what is no order."""
    if "order" in question:
        coordinator.order(question)
    return overview(coordinator)


def overview(coordinator: Coordinator) -> dict[str, Any]:
    """The status of a run as JSON, without its history, and with a row for each communicator and key."""
    status = coordinator.status().as_dict()
    alarms = status.pop("alarms")
    del status["history"]
    comms = [_communicator(coordinator, comm) for comm in coordinator.comms.values()]
    return status | {
        "run": coordinator.plan.run,
        "job": coordinator.experiment.job,
        "alarms": len(alarms),
        "last_alarm": alarms[-1] if alarms else None,
        "speedup": status["own_s"] / status["took_s"] if status["took_s"] > 0 else None,
        "communicators": comms,
    }


def _communicator(coordinator: Coordinator, comm: Communicator) -> dict[str, Any]:
    return {
        "communicator": f"{comm.example.comm:016x}",
        "name": comm.example.name,
        "ranks": comm.example.ranks,
        "nodes": comm.example.nodes,
        "served": len(comm.members),
        "in_band": comm.in_band,
        "version": comm.version,
        "off": comm.off,
        "own": action_of(OWN_ACTION).name,
        "speedup": comm.own_us / comm.took_us if comm.took_us > 0 else None,
        "keys": [_key(coordinator, comm, at) for at in np.argsort(comm.keys).tolist()],
    }


def _key(coordinator: Coordinator, comm: Communicator, at: int) -> dict[str, Any]:
    loop, key, row = coordinator.loop, int(comm.keys[at]), int(comm.rows[at])
    action = comm.in_force.get(key, 0)
    own, took = float(loop.evidence.baseline[row]), loop.evidence.mean(np.array([row]), np.array([action]))[0]
    known = loop.evidence.samples[row, action] > 0
    return {
        "key": key_name(key),
        "phase": Phase(int(loop.phase[row])).name.lower(),
        "collectives": int(loop.measured[row]),
        "idle": int(loop.idle[row]),
        "in_force": action_of(action).name,
        "own_us": float(np.exp(own)) if np.isfinite(own) else None,
        "time_vs_nccl": float(np.exp(took - own)) if known and np.isfinite(own) else None,
        "cusum": float(loop.cusum.score[row]),
    }
