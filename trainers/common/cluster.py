"""A Ray cluster to run on: the one that is there, or a local one."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
from typing import Any

from dynamiccl_ray.errors import RunError

log = logging.getLogger("dynamiccl.cluster")


def ask_for_a_token() -> None:
    """Makes a local cluster ask for a token that only processes of this user can read, unless the environment says
    something else. Ray looks at it once, when it is imported: this comes before."""
    if os.environ.get("RAY_ADDRESS") or "RAY_AUTH_MODE" in os.environ:
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def leave_signals_alone() -> None:
    """Ray's own handler of SIGTERM ends a process with an abort. This comes before it is imported; whoever imports it
    before is safe once ``start_ray`` is over."""
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")


def _leave_stdout_alone() -> None:
    """Ray prints on stdout that a node was lost, whatever ``log_to_driver`` says: in the middle of a command's JSON."""
    from ray._private import worker

    printed = worker.print_to_stdstream

    def to_stderr(data: dict[str, Any], ignore_prefix: bool) -> None:
        printed(data | {"is_err": True}, ignore_prefix)

    worker.print_to_stdstream = to_stderr


def start_ray(actors: int = 0, *, log_to_driver: bool = True) -> None:
    """A cluster that is there already (``RAY_ADDRESS``, as under ``ray job submit``), or a local one that has room
    for ``actors`` which ask for a core each, however few cores this machine has. Raises RunError. What the cluster's
    nodes print comes to stderr with ``log_to_driver``; what Ray itself notices of them does always.

    Ray listens on every interface (2.60 has no setting for it), and whoever gets in runs code as this user; see
    ``ask_for_a_token``.
    """
    import ray

    _leave_stdout_alone()
    listens = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(logging_level=logging.ERROR, log_to_driver=log_to_driver)
        else:
            if "RAY_AUTH_MODE" not in os.environ:
                log.warning(
                    "other users of this machine can reach this Ray cluster; set RAY_AUTH_MODE=token and "
                    "RAY_AUTH_TOKEN before Ray is imported, or use the command line, which does"
                )
            ray.init(
                # Ray would join whatever cluster was started on this machine, by whomever.
                address="local",
                num_cpus=max(actors, os.cpu_count() or 1),
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
                configure_logging=False,
                _system_config={
                    # Ray remembers 100,000 calls of actors, for a dashboard that we do not start: 150 MB in an hour.
                    "task_events_report_interval_ms": 0,
                    # Ray gives its workers the least priority. Ranks may wait for ours, beside whatever else runs.
                    "worker_niceness": 0,
                },
            )
    except Exception as e:
        raise RunError(
            f"Ray does not start: {e}. Look at `dynamiccl doctor`, or use --serial to run without Ray"
        ) from e
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in listens.items():
                signal.signal(number, handler)


def require_room(actors: int) -> None:
    """Raises RunError where the cluster can never give ``actors`` a core each: Ray would wait for ever."""
    import ray

    cores = int(ray.cluster_resources().get("CPU", 0))
    if cores < actors:
        raise RunError(f"{actors} Ray actors need a core each and the cluster has {cores}; ask for fewer, or add nodes")
