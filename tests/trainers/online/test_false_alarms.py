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
TOOK = 8 * 90 + 100 + 8 * 50 + 300 + 2 * 50 + 2 * 70 + 8 * 50


def test_a_check_costs_what_it_took_above_what_is_exploited() -> None:
    said = false_alarms([_alarm(2), _alarm(4, anew=True)], EPOCHS, [EVENT])
    assert (said["checks"], said["anew"]) == (1, 0)
    # What was drawn before the key exploited is no alarm's; nor is what other keys drew.
    assert said["cost_percent"] == pytest.approx(100 * 40 / (TOOK - 40))


def test_a_key_that_learns_anew_costs_until_it_exploits_again() -> None:
    anew = [*EPOCHS[:3], _epoch(3, (KEY, "own choice", 4, 60.0)), _epoch(4, (KEY, "drawn", 4, 80.0))]
    anew += [_epoch(5, (KEY, "best", 8, 50.0)), _epoch(6, (KEY, "compared", 8, 70.0))]
    said = false_alarms([_alarm(2, anew=True)], anew, [])
    took = TOOK - 400 + 4 * 60 + 4 * 80 + 8 * 50 + 8 * 70
    assert said["cost_percent"] == pytest.approx(100 * 200 / (took - 200))


def test_a_check_of_a_key_that_still_compares_costs_nothing_but_itself() -> None:
    early = [
        _epoch(0),
        _epoch(1, (KEY, "drawn", 8, 90.0), (KEY, "checked", 2, 60.0)),
        _epoch(2, (KEY, "compared", 8, 70.0)),
    ]
    said = false_alarms([_alarm(1)], [*early, _epoch(3, (KEY, "best", 8, 50.0))], [EVENT])
    took = 8 * 90 + 2 * 60 + 8 * 70 + 8 * 50
    assert said["cost_percent"] == pytest.approx(100 * 20 / (took - 20))
    assert false_alarms([_alarm(1)], early, [])["cost_percent"] is None, "nothing to compare with"


def test_what_it_cost_is_not_known_where_the_epochs_of_an_alarm_are_gone() -> None:
    said = false_alarms([_alarm(2)], EPOCHS[3:], [])
    assert said == {"checks": 1, "anew": 0, "cost_percent": None}


def test_without_an_event_every_alarm_is_false_and_without_an_alarm_there_is_no_cost() -> None:
    said = false_alarms([_alarm(2), _alarm(4, anew=True)], EPOCHS, [])
    assert (said["checks"], said["anew"]) == (1, 1)
    assert said["cost_percent"] > 50
    assert false_alarms([], EPOCHS, []) == {"checks": 0, "anew": 0, "cost_percent": 0.0}
    assert false_alarms([], [], [EVENT]) == {"checks": 0, "anew": 0, "cost_percent": 0.0}
