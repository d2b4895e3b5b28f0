"""What a coordinator keeps of communicators that came and went."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy as np
import pytest
from driven import Run, one_term

__all__ = ["one_term"]
pytestmark = pytest.mark.usefixtures("one_term")


def _reached(of: object) -> int:
    """Objects that are kept by one, arrays by what they hold."""
    seen: dict[int, object] = {}
    todo = [of]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | BuiltinFunctionType):
            continue
        seen[id(one)] = one
        todo += gc.get_referents(one)
    return sum(max(one.size, 1) if isinstance(one, np.ndarray) else 1 for one in seen.values())


def test_communicators_that_came_and_went_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamiccl_ray.actors.phases.HISTORY_ROUNDS", 4)
    run = Run()
    reached = []
    for number in range(24):
        run.comm, run.dseq = 0x1000 + number, 0
        run.join()
        for _ in range(6):
            run.epoch()
        for rank, runner in enumerate("ab"):
            run.core.join(runner, [], frozenset({(run.comm, rank)}))
        run.core.close_epoch()
        run.epochs.clear()
        reached.append(_reached(run.core))
    assert run.core.comms == {}
    assert max(reached[-8:]) <= max(reached[4:12]) + 20, reached
