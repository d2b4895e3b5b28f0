"""Kills and stops parts of the control plane, at random and at the worst moments, and brings new control planes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from accounting import Span
from plane import Planes
from watching import Watcher

PARTS = {
    "runner": 14,
    "coordinator": 10,
    "actors": 3,
    "watchdog": 3,
    "driver": 1,
    "raylet": 1,
    "gcs": 1,
    "everything": 1,
}
"""How often each is chosen. The actors are the coordinator and all runners."""
_ACTORS = ("coordinator", "runner")
MOMENTS = {"at random": 2, "PREPARE": 3, "COMMIT": 3}
QUIET_S = 20.0
"""No switch for so long, and nobody of ours stopped: whoever looks after the job starts the control plane anew."""
START_S = 120.0
"""... which takes a while to be up."""
DYING_S = 15.0
"""In which a control plane ends whose raylet or GCS was killed."""
MOMENT_S = 3.0
"""To wait for a moment that does not come."""


@dataclass
class Attack:
    at: float
    part: str
    deed: str
    phase: str
    """In which the agreement was when the deed was done, looked at after it."""
    stopped_s: float = 0.0


@dataclass
class Attacker:
    planes: Planes
    watcher: Watcher
    chance: random.Random
    meanwhile: Callable[[], None]
    """Called again and again."""
    attacks: list[Attack] = field(default_factory=list)
    anew: list[Span] = field(default_factory=list)
    """From the last switch under a control plane that was lost to the first under the next."""
    _stopped: list[tuple[float, list[int]]] = field(default_factory=list)
    _lost: float | None = None
    _started: float = field(default_factory=time.monotonic)
    _due: float = 0.0

    def begin(self, limit_s: float) -> None:
        """Nothing is attacked before tables are switched at all."""
        if not self._switching(time.monotonic() + limit_s):
            raise SystemExit(f"nothing was switched within {limit_s:.0f} s")

    def run(self, until: float, switches: int) -> None:
        """Until then, or until so many switches were seen."""
        self._due = time.monotonic()
        while time.monotonic() < until and self.watcher.switches() < switches:
            self.look_after()
            if time.monotonic() > self._due:
                self.attack()
                # Mostly once it switches again; now and then while it recovers.
                if self.chance.random() < 0.9:
                    self._switching(until)
                self._due = time.monotonic() + self.chance.uniform(0.5, 4.0)
            time.sleep(0.02)

    def calm(self, limit_s: float) -> None:
        """No attack any more: what is stopped goes on, until tables are switched again.

        What the last attack has mortally wounded may still switch tables: it gets time to die first.
        """
        self._continue(float("inf"))
        until = time.monotonic() + DYING_S
        while time.monotonic() < until:
            self.look_after()
            time.sleep(0.02)
        if not self._switching(time.monotonic() + limit_s):
            self.planes.kill()
            self._switching(time.monotonic() + limit_s)

    def _switching(self, limit: float) -> bool:
        """Waits for the next switch; false where none came."""
        began = time.monotonic()
        while self.watcher.newest < began and time.monotonic() < limit:
            self.look_after()
            time.sleep(0.02)
        return self.watcher.newest >= began

    def look_after(self) -> None:
        """What a scheduler does: where a driver is gone, or nothing has happened for long, there is a new one."""
        self.meanwhile()
        self._continue(time.monotonic())
        now = time.monotonic()
        if self._lost is not None and self.watcher.newest > self._lost:
            self.anew.append(Span(self._lost, self.watcher.newest))
            self._lost = None
        if not self.planes.up:
            self._lost = self._lost or self.watcher.newest
            self.planes.start(resume=self.chance.random() < 0.5)
            self._started = now
        elif not self._stopped and now > max(self.watcher.newest + QUIET_S, self._started + START_S):
            self._lost = self._lost or self.watcher.newest
            self.planes.kill()

    def _continue(self, now: float) -> None:
        for at, pids in self._stopped:
            if at <= now:
                for pid in pids:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGCONT)
        self._stopped = [(at, pids) for at, pids in self._stopped if at > now]

    def attack(self) -> None:
        parts = self.planes.parts()
        if all(part in parts for part in _ACTORS):
            parts["actors"] = [pid for part in _ACTORS for pid in parts[part]]
        there = [part for part in PARTS if part in parts or (part == "everything" and parts)]
        if not there:
            return
        part = self.chance.choices(there, [PARTS[p] for p in there])[0]
        pids = [pid for of in parts.values() for pid in of] if part == "everything" else parts[part]
        if part in ("runner", "watchdog") and self.chance.random() < 0.8:
            pids = [self.chance.choice(pids)]
        kills = self.chance.random() < 0.5
        number = signal.SIGKILL if kills else signal.SIGSTOP
        stopped_s = 0.0 if kills else self.chance.uniform(0.05, 10.0)
        self._await(self.chance.choices(list(MOMENTS), list(MOMENTS.values()))[0])
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        at = time.monotonic()
        phase = self.watcher.phase()
        self.attacks.append(Attack(at, part, "kill" if kills else "stop", phase, stopped_s))
        if not kills:
            self._stopped.append((at + stopped_s, pids))

    def _await(self, moment: str) -> None:
        if moment == "at random":
            return
        deadline = time.monotonic() + MOMENT_S
        while self.watcher.phase() != moment and time.monotonic() < deadline:
            pass
