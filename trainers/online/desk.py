"""Where a run is asked and told things while it goes on: a socket of the process that drives it.

One line of JSON each way. Only processes of the same user, or root, are heard; the kernel says who asks (SO_PEERCRED).
The socket is an abstract one, which ends with its process, whatever ends that. Elsewhere on the cluster Ray takes the
question to the run's coordinator.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from dynamiccl_ray.errors import ConfigError, DynamicclError, RunError, reason

log = logging.getLogger("dynamiccl.online")

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""What is asked, to what is answered; raises DynamicclError with words for who asked."""

_MOST_BYTES: Final = 16 << 20
_LINE_S: Final = 10.0


class Desk:
    """Answers in a thread of its own until it is closed; a context manager."""

    def __init__(self, job: str, answer: Answer) -> None:
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._closing = False
        try:
            self._socket.bind(_address(job))
        except OSError as e:
            log.warning("nobody can ask about this run, or tell it anything, from this machine: %s", e)
            self._socket.close()
            return
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._serve, name="dynamiccl-desk", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_LINE_S)
                self._hear(connection)

    def _hear(self, connection: socket.socket) -> None:
        if not _is_trusted(connection):
            return
        try:
            asked = json.loads(_line(connection))
            if not isinstance(asked, dict):
                raise ConfigError("a JSON object is asked for")
            said = self._answer(asked)
        except DynamicclError as e:
            said = {"error": str(e)}
        except Exception as e:  # of whatever in the control plane is gone
            said = {"error": f"the run cannot answer now: {reason(e)}"}
        connection.sendall(json.dumps(said).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def ask(job: str, question: dict[str, Any]) -> dict[str, Any]:
    """Asks the run beside ``job``: on this machine, or else through the Ray cluster that ``RAY_ADDRESS`` names. Raises
    RunError where there is none, and with the run's own words where it refuses."""
    question = question | {"by": f"uid {os.getuid()} on {socket.gethostname()}"}
    try:
        said = _ask_here(job, question)
    except (ConnectionRefusedError, FileNotFoundError):
        if not os.environ.get("RAY_ADDRESS"):
            raise RunError(
                f"no run of job {job!r} on this machine; name its DYNAMICCL_JOB_ID with --job, or run this on the "
                "machine of `dynamiccl online`, or with RAY_ADDRESS on any node of its Ray cluster"
            ) from None
        said = _ask_by_ray(job, question)
    if "error" in said:
        raise RunError(str(said["error"]))
    return said


def _ask_here(job: str, question: dict[str, Any]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(2 * _LINE_S)
        connection.connect(_address(job))
        if not _is_trusted(connection):
            raise RunError(f"job {job!r}: another user of this machine answers in its place")
        try:
            connection.sendall(json.dumps(question).encode() + b"\n")
            said = json.loads(_line(connection))
        except (OSError, ValueError) as e:
            raise RunError(f"job {job!r}: its run does not answer: {reason(e)}") from None
    if not isinstance(said, dict):
        raise RunError(f"job {job!r}: its run answers something else than expected")
    return said


def _ask_by_ray(job: str, question: dict[str, Any]) -> dict[str, Any]:
    from dynamiccl_ray.actors.registry import ask_coordinator
    from dynamiccl_ray.trainers.common.cluster import start_ray

    start_ray(log_to_driver=False)
    return ask_coordinator(job, question)


def _address(job: str) -> str:
    """An abstract address has room for 107 bytes, and a job id may have more."""
    return f"\0dynamiccl-{os.getuid()}-{hashlib.sha256(job.encode(errors='surrogateescape')).hexdigest()[:32]}"


def _is_trusted(connection: socket.socket) -> bool:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in (0, os.getuid())


def _line(connection: socket.socket) -> bytes:
    """Up to the end of the line. Raises OSError where it does not come, or is too long."""
    said = bytearray()
    while not said.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more or len(said) > _MOST_BYTES:
            raise OSError("the line does not end")
        said += more
    return bytes(said)
