"""What an operator wants of a running job, over what the control loop wants: modes, a way back, a canary.

Orders change what is *wanted* of keys; it comes into force by the same agreement as every other decision.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import Any, Final, Literal, get_args

import numpy as np

from dynamiccl_ray.actions import N_ACTIONS, OWN_ACTION
from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.arrays import Bool, Int64
from dynamiccl_ray.config.canary import Canary
from dynamiccl_ray.config.control import Guardrail
from dynamiccl_ray.control.loop import Loop, Phase
from dynamiccl_ray.control.mixing import mix
from dynamiccl_ray.errors import ConfigError

Mode = Literal["off", "observe", "shadow", "active"]
MODES: Final = get_args(Mode)
ORDERS: Final = ("mode", "rollback", "canary")

# Orders that are remembered; observations without a collective of it after which a key of a canary is not waited for.
_ORDERS: Final = 200
_IDLE: Final = 3
# Versions are counted from 1.
_NEVER: Final = 1 << 62


class Steering:
    """``order`` says what is wanted; ``over`` turns it into what keys are told.

    Modes: ``off`` measures next to nothing and leaves all to NCCL, ``observe`` measures, ``shadow`` decides and records
    but applies nothing, ``active`` tunes.
    """

    def __init__(self, mode: Mode, canary: Canary, guardrail: Guardrail) -> None:
        self.mode: Mode = mode
        self.rolled_back = False
        self.share, self.communicators = canary.share, canary.communicators
        self.applied_since = 0 if mode == "active" else _NEVER
        """Tables of this version and later ones are applied."""
        self.orders: list[dict[str, Any]] = []
        """As they came, the oldest first: when (Unix time), what, and by whom."""
        self.waits = ""
        """Why the canary does not widen; empty where it may, or where there is none."""
        self._widens, self._margin = canary.widen, guardrail.margin

    # -- orders --

    def order(self, order: dict[str, Any], loop: Loop, version: int) -> None:
        """Takes an order that ``check`` lets pass; tables from ``version`` on will follow it."""
        what = order["order"]
        if what == "mode":
            if order["mode"] == "active" and self.mode == "shadow":
                # What shadow decided was never tried: the times that were booked on it are NCCL's own.
                loop.shift(np.arange(len(loop)))
            self.mode, self.rolled_back = order["mode"], False
            self.applied_since = version if self.mode == "active" else _NEVER
        elif what == "rollback":
            self.rolled_back = True
        else:
            self.share = order.get("share", self.share)
            self.communicators = tuple(order.get("communicators", self.communicators))
        self._note(order)

    def _note(self, order: dict[str, Any]) -> None:
        self.orders = [*self.orders, {"unix_s": time.time(), **order}][-_ORDERS:]

    # -- what keys are told --

    @property
    def decides(self) -> bool:
        """Whether any key is tuned."""
        return self.mode in ("shadow", "active") and not self.rolled_back

    @property
    def measures(self) -> bool:
        return self.mode != "off"

    def over(self, loop: Loop, comms: Collection[Communicator]) -> tuple[Bool, Int64]:
        """(K,) keys that the loop does not decide on, and (K,) the flat action that is wanted of each key."""
        if self.mode == "active" and self.rolled_back:
            return np.ones(len(loop), np.bool_), _settled(loop)
        held = ~self.tuned(loop, comms) if self.decides else np.ones(len(loop), np.bool_)
        return held, np.where(held, OWN_ACTION, loop.wanted)

    def tuned(self, loop: Loop, comms: Collection[Communicator]) -> Bool:
        """(K,) keys of the canary: of each communicator that is tuned its share, at least one, the same ones as long
        as no others come."""
        tuned = np.zeros(len(loop), np.bool_)
        for comm in comms:
            if self.communicators and not any(is_named(comm, name) for name in self.communicators):
                continue
            order = np.argsort(mix(loop.keys.identity[comm.rows]), kind="stable")
            tuned[comm.rows[order[: math.ceil(self.share * len(order))]]] = True
        return tuned

    # -- the canary --

    @property
    def canary(self) -> bool:
        """Some keys are not tuned yet."""
        return self.share < 1 or bool(self.communicators)

    def widen(self, loop: Loop, comms: Collection[Communicator]) -> None:
        """At the end of a round: tunes more, where what is tuned does no harm."""
        self.waits = self._waits_for(loop, comms) if self.canary and self.decides else ""
        if not self.canary or not self.decides or self.waits:
            return
        if self.share < 1:
            self.share = min(1.0, 2 * self.share)
        else:
            self.communicators = ()
        self._note({"order": "canary", "share": self.share, "communicators": [*self.communicators], "by": "evidence"})
        for comm in comms:
            comm.reward.forget_steps()

    def _waits_for(self, loop: Loop, comms: Collection[Communicator]) -> str:
        if not self._widens:
            return "it is not to widen by itself"
        rows = np.flatnonzero(self.tuned(loop, comms) & (loop.idle <= _IDLE) & (loop.measured > 0))
        learning = int(np.count_nonzero(loop.phase[rows] != Phase.EXPLOIT))
        if not len(rows) or learning:
            return f"{learning} of its keys have not settled" if learning else "none of its keys runs"
        got = loop.evidence.mean(rows, loop.wanted[rows])
        slower = int(np.count_nonzero(got > loop.evidence.baseline[rows] + self._margin))
        if slower:
            return f"{slower} of its keys are slower than NCCL's own choice"
        for comm in comms:
            slowdown = comm.reward.slowdown()
            if slowdown is not None:
                return f"steps take {slowdown:.1%} longer than with NCCL's own choice"
        return ""

    def said(self) -> dict[str, Any] | None:
        """Where the canary stands, as JSON; None without one."""
        if not self.canary:
            return None
        return {"share": self.share, "communicators": [*self.communicators], "waits": self.waits}

    # -- durability --

    def state(self) -> dict[str, Any]:
        """As JSON: a successor follows the same orders."""
        return {name: getattr(self, name) for name in _STATE} | {"communicators": [*self.communicators]}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``. Raises KeyError or ValueError for something else."""
        if state["mode"] not in MODES:
            raise ValueError(f"mode {state['mode']!r}")
        for name in _STATE:
            setattr(self, name, type(getattr(self, name))(state[name]))
        self.communicators = tuple(str(name) for name in state["communicators"])


_STATE: Final = ("mode", "rolled_back", "share", "applied_since", "orders")


def check(order: Any) -> dict[str, Any]:
    """An order in good order. Raises ConfigError, which says what is valid."""
    if not isinstance(order, dict) or order.get("order") not in ORDERS:
        raise ConfigError(f"not an order: {str(order)[:100]}; there are {', '.join(ORDERS)}")
    checked = {"order": order["order"], "id": str(order.get("id", ""))[:64], "by": str(order.get("by", ""))[:64]}
    if order["order"] == "mode":
        if order.get("mode") not in MODES:
            raise ConfigError(f"mode {str(order.get('mode'))[:40]!r}: there are {', '.join(MODES)}")
        checked["mode"] = order["mode"]
    if order["order"] == "canary":
        share, names = order.get("share"), order.get("communicators")
        if share is not None:
            if not isinstance(share, float | int) or not 0 < share <= 1:
                raise ConfigError(f"share {str(share)[:40]}: above 0, and up to 1 for all keys")
            checked["share"] = float(share)
        if names is not None:
            if not isinstance(names, list) or not all(isinstance(n, str) and 0 < len(n) <= 64 for n in names):
                raise ConfigError("communicators: a list of names, or of first digits of ids")
            checked["communicators"] = names
    return checked


def is_named(comm: Communicator, name: str) -> bool:
    """By NCCL's name for it, or the first digits of its id."""
    return name == comm.example.name or f"{comm.example.comm:016x}".startswith(name.lower())


def _settled(loop: Loop) -> Int64:
    """(K,) what each key exploited before it last began anew, as far as that may be chosen still."""
    allowed = loop.allowed(np.arange(len(loop))).reshape(-1, N_ACTIONS)
    rows = np.arange(len(loop))
    return np.where(allowed[rows, loop.settled], loop.settled, OWN_ACTION)
