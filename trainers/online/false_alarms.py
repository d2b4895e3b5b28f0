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
    exploited.
    """
    before = [alarm for alarm in alarms if not (events and came_after(alarm.dseq, alarm.epoch, events[0]))]
    raised = {(alarm.comm, alarm.key) for alarm in before}
    # Of each key: collectives that exploited, and the sum of their logs; and others, from the first that exploited or
    # was checked, and what they took.
    exploited: dict[tuple[int, int], tuple[int, float]] = {}
    others: dict[tuple[int, int], tuple[int, float]] = {}
    took_us = 0.0
    for epoch in observed:
        if events and came_after(int(epoch.samples["dseq"].max(initial=0)), epoch.number, events[0]):
            break
        took_us += float((epoch.decisions["samples"] * epoch.decisions["got_us"]).sum())
        for decision in epoch.decisions:
            of, n, us = (epoch.comm, int(decision["key"])), int(decision["samples"]), float(decision["got_us"])
            if of not in raised:
                continue
            if decision["why"] == _BEST:
                count, total = exploited.get(of, (0, 0.0))
                exploited[of] = count + n, total + n * np.log(us)
            elif decision["why"] == _CHECKED or of in exploited or of in others:
                count, total = others.get(of, (0, 0.0))
                others[of] = count + n, total + n * us
    # A key that has not exploited since then has nothing to be compared with.
    known = others.keys() & exploited.keys()
    cost_us = sum(others[of][1] - others[of][0] * np.exp(exploited[of][1] / exploited[of][0]) for of in known)
    return {
        "checks": sum(not alarm.anew for alarm in before),
        "anew": sum(alarm.anew for alarm in before),
        "cost_percent": float(100 * cost_us / (took_us - cost_us)) if took_us > cost_us else 0.0,
    }
