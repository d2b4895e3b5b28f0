"""What a false alarm cost, from decisions that are known to the last."""

from __future__ import annotations

import numpy as np
import pytest

from dynamiccl_ray.actors.status import DECISION_DTYPE, SAMPLE_DTYPE, WHY, Alarm, Epoch
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.trainers.online.false_alarms import false_alarms

COMM, KEY, OTHER = 7, 3, 4


def _epoch(number: int, *decisions: tuple[int, str, int, float]) -> Epoch:
    """Of key, why, collectives and time each; 100 calls an epoch."""
    of, samples = np.zeros(len(decisions), DECISION_DTYPE), np.zeros(1, SAMPLE_DTYPE)
    for row, (key, why, count, got_us) in zip(of, decisions, strict=True):
        row["key"], row["why"], row["samples"], row["got_us"] = key, WHY.index(why), count, got_us
    samples["dseq"] = 100 * number + 99
    return Epoch(
        number=number,
        comm=COMM,
        ranks=8,
        nodes=2,
        name="",
        version=1,
        phase=Phase.EXPLOIT,
        samples=samples,
        took_s=1.0,
        judged=np.zeros(0, np.int64),
        terms={},
        decisions=of,
    )


def _alarm(epoch: int, key: int = KEY, *, anew: bool = False) -> Alarm:
    return Alarm(comm=COMM, key=key, dseq=100 * epoch + 50, epoch=epoch, anew=anew)


EVENT = {"name": "congestion", "by_call": True, "at": 400, "epoch": 4}
EPOCHS = [
    _epoch(0, (KEY, "drawn", 8, 90.0), (OTHER, "best", 10, 10.0)),
    _epoch(1, (KEY, "best", 8, 50.0), (OTHER, "drawn", 10, 30.0)),
    _epoch(2, (KEY, "checked", 2, 50.0), (KEY, "checked", 2, 70.0)),
    _epoch(3, (KEY, "best", 8, 50.0)),
    _epoch(4, (KEY, "checked", 8, 500.0)),
]


def test_a_check_costs_what_it_took_above_what_had_been_exploited() -> None:
    said = false_alarms([_alarm(2), _alarm(4, anew=True)], EPOCHS, [EVENT])
    assert (said["checks"], said["anew"]) == (1, 0)
    # What was drawn before the key exploited is no alarm's; nor is what other keys drew.
    took = 8 * 90 + 100 + 8 * 50 + 300 + 2 * 50 + 2 * 70 + 8 * 50
    assert said["cost_percent"] == pytest.approx(100 * 40 / (took - 40))


def test_a_check_before_a_key_has_exploited_is_compared_with_what_it_exploits_later() -> None:
    early = [_epoch(0, (KEY, "drawn", 8, 90.0), (KEY, "checked", 2, 60.0)), *EPOCHS[1:]]
    said = false_alarms([_alarm(0)], early, [EVENT])
    took = 8 * 90 + 2 * 60 + 8 * 50 + 300 + 2 * 50 + 2 * 70 + 8 * 50
    assert said["cost_percent"] == pytest.approx(100 * 60 / (took - 60))
    assert false_alarms([_alarm(0)], early[:1], [])["cost_percent"] == 0, "nothing to compare with"


def test_without_an_event_every_alarm_is_false_and_without_an_alarm_there_is_no_cost() -> None:
    said = false_alarms([_alarm(2), _alarm(4, anew=True)], EPOCHS, [])
    assert (said["checks"], said["anew"]) == (1, 1)
    assert said["cost_percent"] > 50
    assert false_alarms([], EPOCHS, []) == {"checks": 0, "anew": 0, "cost_percent": 0.0}
    assert false_alarms([], [], [EVENT]) == {"checks": 0, "anew": 0, "cost_percent": 0.0}
