"""What alarms cost that came before a played network had changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from dynamiccl_ray.actors.status import WHY, Alarm, Epoch
from dynamiccl_ray.report.data import came_after

_BEST: Final = WHY.index("best")
_CHECKED: Final = WHY.index("checked")


def false_alarms(
    alarms: Sequence[Alarm], observed: Sequence[Epoch], events: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """``checks`` after which a choice stood, keys that learned ``anew``, and ``cost_percent``: by how much more
    communication took until the first event because of both, over what the same collectives take under what is
    exploited. None where it is not known: the epochs of an alarm are not among the observed ones any more, or a key has
    exploited nothing since.
    """
    before = [alarm for alarm in alarms if not (events and came_after(alarm.dseq, alarm.epoch, events[0]))]
    anew = {(alarm.comm, alarm.key, alarm.epoch) for alarm in before if alarm.anew}
    raised = {(alarm.comm, alarm.key) for alarm in before}
    learns: set[tuple[int, int]] = set()
    # Of each key: collectives that exploited, and the sum of their logs; and those that checked, or learned because of
    # an alarm, and what they took.
    exploited: dict[tuple[int, int], tuple[int, float]] = {}
    others: dict[tuple[int, int], tuple[int, float]] = {}
    took_us = 0.0
    for epoch in observed:
        if events and came_after(int(epoch.samples["dseq"].max(initial=0)), epoch.number, events[0]):
            continue
        tried = epoch.decisions[np.isfinite(epoch.decisions["got_us"])]
        took_us += float((tried["samples"] * tried["got_us"]).sum())
        for decision in tried:
            of, n, us = (epoch.comm, int(decision["key"])), int(decision["samples"]), float(decision["got_us"])
            if of not in raised:
                continue
            if decision["why"] == _BEST:
                learns.discard(of)
                count, total = exploited.get(of, (0, 0.0))
                exploited[of] = count + n, total + n * np.log(us)
            elif decision["why"] == _CHECKED or of in learns:
                count, total = others.get(of, (0, 0.0))
                others[of] = count + n, total + n * us
        learns |= {(comm, key) for comm, key, number in anew if (comm, number) == (epoch.comm, epoch.number)}
    first = min((epoch.number for epoch in observed), default=0)
    known = others.keys() <= exploited.keys() and all(alarm.epoch > first for alarm in before)
    cost_us = sum(us - n * np.exp(exploited[of][1] / exploited[of][0]) for of, (n, us) in others.items() if known)
    return {
        "checks": sum(not alarm.anew for alarm in before),
        "anew": sum(alarm.anew for alarm in before),
        "cost_percent": float(100 * cost_us / max(took_us - cost_us, 1e-9)) if known else None,
    }
