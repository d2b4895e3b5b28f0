"""A process that stops while ranks wait for it is killed soon, and an actor later; one that nobody waits for is left
alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamiccl_ray.actors.watchdog import _watch

_CODE = """
import sys, time
from dynamiccl_ray.actors.watchdog import Watchdog
watchdog = Watchdog(0.5{stopped})
{armed}
print(watchdog.pid, flush=True)
{then}
"""


def _start(armed: str, then: str = "time.sleep(60)", stopped: str = "") -> tuple[subprocess.Popen[str], int]:
    code = _CODE.format(armed=armed, then=then, stopped=stopped)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def _gone(pid: int, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_stopped_while_armed() -> None:
    process, child = _start("watchdog.beat()")
    os.kill(process.pid, signal.SIGSTOP)
    assert process.wait(20) == -signal.SIGKILL
    assert _gone(child, 20)


def test_silent_while_armed() -> None:
    process, _ = _start("watchdog.beat()")
    assert process.wait(20) == -signal.SIGKILL


def test_stopped_while_nobody_waits_for_its_ranks() -> None:
    process, child = _start("watchdog.beat(); watchdog.disarm()", stopped=", stopped_s=0.5")
    os.kill(process.pid, signal.SIGSTOP)
    assert process.wait(20) == -signal.SIGKILL
    assert _gone(child, 20)


def test_silent_while_armed_though_it_runs() -> None:
    process, _ = _start("watchdog.beat()", stopped=", stopped_s=0.5")
    assert process.wait(20) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("heard", "killed"),
    [
        ([(0.0, b"a"), *[(0.25, None)] * 2], True),
        # A virtual machine that is moved: its clock goes on, and nobody in it has any time.
        ([(0.0, b"a"), (10.0, None), (0.2, b"a")], False),
        ([(0.0, b"ar"), (0.2, b"d"), (10.0, None), (0.2, b"r")], False),
        ([(0.0, b"a"), (10.0, None), *[(0.25, None)] * 2], True),
        ([(0.0, b"r"), *[(0.25, None)] * 4], True),
    ],
)
def test_time_in_which_it_had_none_itself_does_not_count(
    monkeypatch: pytest.MonkeyPatch, heard: list[tuple[float, bytes | None]], killed: bool
) -> None:
    """What the child hears, and how long each takes; armed it waits for 0.5 s, and for 1 s otherwise."""
    now, said, kills = [100.0], [b""], []

    def select(*_: object) -> tuple[list[int], list[int], list[int]]:
        took, what = heard.pop(0) if heard else (0.0, b"")
        now[0] += took
        said[0] = what or b""
        return ([] if what is None else [0]), [], []

    monkeypatch.setattr("select.select", select)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("os.read", lambda *_: said[0])
    monkeypatch.setattr("signal.pidfd_send_signal", lambda _, number: kills.append(number))
    _watch(os.getppid(), 0.5, 1.0)
    assert kills == [signal.SIGKILL] * killed


def test_busy_while_nobody_waits_for_its_ranks() -> None:
    process, child = _start("pass", "time.sleep(1.5); watchdog.close()", stopped=", stopped_s=0.5")
    assert process.wait(20) == 0
    assert _gone(child, 20), "it outlives what it watched"


@pytest.mark.parametrize(
    ("armed", "then"),
    [
        ("pass", "time.sleep(1.5)"),
        ("watchdog.beat(); watchdog.disarm()", "time.sleep(1.5)"),
        ("watchdog.beat()", "for _ in range(30): watchdog.beat(); time.sleep(0.05)"),
    ],
    ids=["never armed", "disarmed", "beating"],
)
def test_left_alone(armed: str, then: str) -> None:
    process, child = _start(armed, f"{then}; watchdog.close()" if "for" not in then else f"{then}\nwatchdog.close()")
    assert process.wait(20) == 0
    assert _gone(child, 20), "it outlives what it watched"


def test_it_goes_when_the_process_is_killed() -> None:
    process, child = _start("watchdog.beat()")
    process.kill()
    process.wait(20)
    assert _gone(child, 20)
