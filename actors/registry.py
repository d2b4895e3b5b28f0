"""What a Ray cluster knows of the runs on it: which one serves a job, and what its coordinator says.

Whoever asks needs nothing else of the control plane: a question from the command line loads no more than this.
"""

from __future__ import annotations

from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.experimental import internal_kv

from dynamiccl_ray.errors import RunError, reason

NAMESPACE: Final = "dynamiccl"
ASK_LIMIT_S: Final = 10.0


class KvStore:
    """``agreement.Store`` in Ray's GCS: outlives every actor."""

    def put(self, key: str, value: bytes) -> None:
        internal_kv._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)

    def get(self, key: str) -> bytes | None:
        value: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
        return value


def remember_run(job: str, run: str) -> None:
    """``run`` is the newest one of ``job``."""
    KvStore().put(_run_of(job), run.encode())


def newest_run(job: str) -> str | None:
    """None where the cluster has seen no run of ``job``."""
    run = KvStore().get(_run_of(job))
    return None if run is None else run.decode()


def coordinator_name(run: str) -> str:
    """Of the actor, in ``NAMESPACE``."""
    return f"coordinator-{run}"


def find_coordinator(run: str) -> Any:
    """The coordinator's actor. Raises ValueError where the run is over, or has not begun."""
    return ray.get_actor(coordinator_name(run), namespace=NAMESPACE)


def ask_coordinator(job: str, question: dict[str, Any]) -> dict[str, Any]:
    """From any node of the cluster, what the coordinator of a job's run answers. Raises RunError where there is none,
    and with what it says of a question that is wrong."""
    run = newest_run(job)
    try:
        if run is None:
            raise ValueError("no run has begun")
        return asked(find_coordinator(run), question)
    except (ValueError, RayActorError) as e:
        raise RunError(f"no run of job {job!r} on this Ray cluster: {reason(e)}") from None
    except GetTimeoutError:
        raise RunError(f"job {job!r}: its run has not answered for {ASK_LIMIT_S:g} s; ask again") from None


def asked(coordinator: Any, question: dict[str, Any]) -> dict[str, Any]:
    """What a coordinator's actor answers; raises what it raises."""
    try:
        said: dict[str, Any] = ray.get(coordinator.ask.remote(question), timeout=ASK_LIMIT_S)
        return said
    except RayTaskError as e:
        raise e.cause from None


def _run_of(job: str) -> str:
    return f"run-of-job/{job}"
