"""What an epoch waits for, without Ray."""

from __future__ import annotations

import pytest
from driven import COMM, KEY, LEARNING, OTHER, Run, one_term

__all__ = ["one_term"]
pytestmark = pytest.mark.usefixtures("one_term")


def test_what_takes_little_is_over_before_what_others_compare() -> None:
    run = Run().join()
    run.us[OTHER] = dict.fromkeys(range(100_000), 50.0)
    run.epoch()
    for _ in range(LEARNING["draws"] - 1):
        run.epoch(n=2, only=(KEY,))
    run.epoch(n=2)
    first, other = (run.core.comms[COMM].keys.tolist().index(key) for key in (KEY, OTHER))
    loop, rows = run.core.loop, run.core.comms[COMM].rows
    assert loop.decisions[rows[[first, other]]].tolist() == [LEARNING["draws"], 1]
    assert sorted(run.its.due.takes.tolist()) == [LEARNING["draw_samples"], LEARNING["compare_samples"]]
    assert run.its.need.tolist() == [LEARNING["draw_samples"]] * 2
    run.epoch(n=LEARNING["draw_samples"])
    assert run.its.need[first] == LEARNING["compare_samples"] - LEARNING["draw_samples"], "what is left of it"
