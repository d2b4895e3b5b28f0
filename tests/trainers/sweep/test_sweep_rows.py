"""What became of a trial, by what Tune says of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamiccl_ray.config.sweep import Sweep
from dynamiccl_ray.trainers.sweep.results import rows_of
from dynamiccl_ray.trainers.sweep.trials import SEEDS, WHOLE

SWEEP = Sweep.model_validate({"name": "x", "of": "default", "space": {"ppo.lr": [0.1]}, "metric": "held_out_regret"})


@pytest.mark.parametrize(
    ("metrics", "status"),
    [
        ({WHOLE: True, "done": True}, "done"),
        # Tune says that it is done, whoever has ended it.
        ({WHOLE: False, "done": True}, "stopped"),
        (None, "unfinished"),
    ],
)
def test_a_trial_that_a_scheduler_stopped_did_not_come_to_its_end(metrics: dict[str, Any] | None, status: str) -> None:
    scores = {SEEDS: [{"held_out_regret": 0.1}], "held_out_regret": 0.1}
    result = SimpleNamespace(
        path="/out/trial_00000",
        config={"values": {"ppo.lr": 0.1}, "number": 0},
        metrics=None if metrics is None else metrics | scores,
        metrics_dataframe=None,
        error=None,
    )
    (row,) = rows_of(SWEEP, [result])
    assert row.status == status
