"""What is drawn: the same whenever it is asked, and at the cost of the keys that are being drawn for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from made import due

from dynamiccl_ray.agent.observation import SIZE
from dynamiccl_ray.agent.policy import PolicyNetwork
from dynamiccl_ray.control import drawing
from dynamiccl_ray.control.drawing import Drawer
from dynamiccl_ray.control.loop import Due


def _drawer() -> Drawer:
    torch.manual_seed(1)
    return Drawer(PolicyNetwork(), seed=3, sequence=8)


def _due(ordinal: int, keys: list[int]) -> Due:
    rng = np.random.default_rng(ordinal)
    of = due([ordinal] * len(keys), observation=rng.uniform(0, 1, (len(keys), SIZE)).astype(np.float32))
    identity = np.array(keys, np.uint64)
    return Due(**{**vars(of), "identity": identity, "salt": identity})


def test_a_decision_that_is_asked_again_is_the_same_and_the_next_one_goes_on_from_it() -> None:
    once, again = _drawer(), _drawer()
    for ordinal in range(10):
        expected = once.draw(_due(ordinal, [5, 9]))
        for order in ([1, 0], [0, 1]):
            drawn = again.draw(_due(ordinal, [5, 9]).part(np.array(order)))
            assert drawn.heads[order].tolist() == expected.heads.tolist()
            assert np.allclose(drawn.states["h"][order], expected.states["h"], atol=1e-6)


def test_keys_that_come_and_go_leave_no_state_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_KEPT", 16)
    drawer = _drawer()
    alone = _drawer()
    for ordinal in range(30):
        expected = alone.draw(_due(ordinal, [7]))
        drawn = drawer.draw(_due(ordinal, [7]))
        assert drawn.heads.tolist() == expected.heads.tolist(), "what others do matters"
        drawer.draw(_due(0, [100 + 4 * ordinal + i for i in range(4)]))
    assert len(drawer._identity) <= 16 + 4
    assert all(len(kept) == len(drawer._identity) for kept in (*drawer._before.values(), *drawer._after.values()))
