"""Machines on this one: namespaces with a name, a network address and a /dev/shm of their own, on one switch."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Self

_NETWORK = "10.77.0"
# Ends with this process, whatever ends that: its input does.
_UP = "echo up && exec cat"
_APART = ["unshare", "--net", "--mount", "--uts"]


def why_not() -> str | None:
    """What this machine answers where it does not allow them; None where it does."""
    tried = subprocess.run([*_APART, "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else tried.stderr.strip()


class Hosts:
    """A context manager. Processes are only apart by what they see: this machine's files and process ids are shared."""

    def __init__(self, names: Sequence[str]) -> None:
        self.address = {name: f"{_NETWORK}.{i}" for i, name in enumerate(names, start=1)}
        self._holds: dict[str, subprocess.Popen[str]] = {}
        """A process per machine, which keeps its namespaces."""

    def within(self, name: str) -> list[str]:
        """Comes before a command that shall run there; it becomes the command."""
        return ["nsenter", f"--target={self._holds[name].pid}", "--net", "--mount", "--uts", "--"]

    def run(self, name: str, *command: str) -> str:
        """What a command says there; raises CalledProcessError where it fails."""
        return subprocess.run([*self.within(name), *command], check=True, text=True, stdout=subprocess.PIPE).stdout

    def __enter__(self) -> Self:
        self._hold("switch", _UP)
        self.run("switch", *["ip", "link", "add", "br0", "up", "type", "bridge"])
        for name, address in self.address.items():
            set_up = f"hostname {name} && mount -t tmpfs tmpfs /dev/shm && {_UP}"
            pid = self._hold(name, set_up)
            self.run(
                *("switch", "ip", "link", "add", name, "up", "master", "br0"),
                *("type", "veth", "peer", "name", "eth0", "netns", str(pid)),
            )
            for words in ("link set lo up", "link set eth0 up", f"addr add {address}/24 dev eth0"):
                self.run(name, "ip", *words.split())
        return self

    def _hold(self, name: str, set_up: str) -> int:
        """The id of a process in new namespaces that has run ``set_up`` in a shell."""
        command = [*_APART, "sh", "-c", set_up]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._holds[name] = process
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process.pid

    def __exit__(self, *_: object) -> None:
        for process in self._holds.values():
            process.communicate()
