"""Where a running job stands: for programs, and on the one page that ``dynamiccl status`` shows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dynamiccl_ray.actions import OWN_ACTION, action_of
from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.actors.status import Status
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.keys import key_name

# Over what its computation takes alone, a step that is taken to be limited by communication.
_SATURATED: Final = 1.1


def answer(coordinator: Coordinator, question: dict[str, Any]) -> dict[str, Any]:
    """Takes an order (``steering.check``), if the question is one, and says where the run stands. Raises ConfigError
    for what is no order."""
    if "order" in question:
        coordinator.order(question)
    return overview(coordinator)


def status_of(coordinator: Coordinator) -> Status:
    """Where the run stands; safe to ask at any time."""
    loop, comms, phases = coordinator.loop, coordinator.comms, coordinator.phases
    members, steering = coordinator.membership, coordinator.steering
    unmeasured = {
        f"{c:x}": [key_name(int(key)) for key in comm.keys[loop.measured[comm.rows] == 0]] for c, comm in comms.items()
    }
    # All communicators of a job see the same steps.
    steps = [comm.reward.steps_s() for comm in comms.values()]
    own_step_s, tuned_step_s = next((both for both in steps if None not in both), (None, None))
    return Status(
        epoch=phases.epoch,
        round=phases.round,
        phase=phases.phase.name.lower(),
        rounds_in_phase=phases.rounds_in_phase,
        collectives=phases.collectives,
        switches=members.switches,
        digest_mismatches=sum(c.agreement.digest_mismatches for c in comms.values()),
        unused=members.unused + loop.late,
        dropped=members.dropped,
        hold_wait_s=members.hold_wait_s,
        alarms=tuple(coordinator.alarms),
        history=tuple(phases.history),
        off={f"{c:x}": comm.off for c, comm in comms.items() if comm.off},
        unmeasured={comm: keys for comm, keys in unmeasured.items() if keys},
        keys=phases.keys(),
        in_force={f"{c:x}": len(comm.in_force) for c, comm in comms.items() if comm.members},
        took_s=sum(comm.took_us for comm in comms.values()) / 1e6,
        own_s=sum(comm.own_us for comm in comms.values()) / 1e6,
        explored_s=loop.budget.cost_us / 1e6,
        own_step_s=own_step_s,
        tuned_step_s=tuned_step_s,
        lossless_saturated=_saturated(coordinator, tuned_step_s),
        mode=steering.mode,
        rolled_back=steering.rolled_back,
        canary=steering.said(),
        orders=tuple(steering.orders),
        coverage=members.coverage,
        overhead=coordinator.governor.status({f"{c:x}": coordinator.duty(comm) for c, comm in comms.items()}),
        ranks=sum(len(c.members) for c in comms.values()),
        runners=members.runners,
    )


def _saturated(coordinator: Coordinator, tuned_step_s: float | None) -> bool | None:
    """``Status.lossless_saturated``."""
    alone_s, steering = coordinator.experiment.computation_s, coordinator.steering
    if alone_s is None or tuned_step_s is None or coordinator.phases.phase is not Phase.EXPLOIT:
        return None
    # What is learned has to be in force, everywhere.
    if steering.mode != "active" or steering.rolled_back or steering.canary:
        return None
    if any(comm.off for comm in coordinator.comms.values()):
        return None
    return tuned_step_s > _SATURATED * alone_s


def overview(coordinator: Coordinator) -> dict[str, Any]:
    """The status of a run as JSON, without its history, and with a row for each communicator and key."""
    status = status_of(coordinator).as_dict()
    alarms = status.pop("alarms")
    del status["history"]
    limits = coordinator.loop.budget.limits()
    comms = [_communicator(coordinator, comm, limits.get(comm.number, 0.0)) for comm in coordinator.comms.values()]
    return status | {
        "run": coordinator.plan.run,
        "job": coordinator.experiment.job,
        "alarms": len(alarms),
        "last_alarm": alarms[-1] if alarms else None,
        "speedup": status["own_s"] / status["took_s"] if status["took_s"] > 0 else None,
        "communicators": comms,
    }


def _communicator(coordinator: Coordinator, comm: Communicator, may_explore: float) -> dict[str, Any]:
    return {
        "communicator": f"{comm.example.comm:016x}",
        "name": comm.example.name,
        "ranks": comm.example.ranks,
        "nodes": comm.example.nodes,
        "served": len(comm.members),
        "in_band": comm.in_band,
        "version": comm.version,
        "off": comm.off,
        "like": comm.like.cluster.name if comm.like is not None else None,
        "own": action_of(OWN_ACTION).name,
        "explored": coordinator.loop.budget.share(comm.number, len(comm.keys)),
        "may_explore": may_explore,
        "watched": coordinator.loop.watch.scores(comm.number),
        "resting": int(coordinator.loop.resting[comm.rows].sum()),
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
