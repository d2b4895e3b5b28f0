"""What alarms cost that came before a played network had changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from dynamiccl_ray.actors.status import WHY, Alarm, Epoch
from dynamiccl_ray.report.data import came_after

_BEST: Final = WHY.index("best")


def false_alarms(
    alarms: Sequence[Alarm], observed: Sequence[Epoch], events: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """``checks`` after which a choice stood, keys that learned ``anew``, and ``cost_percent``: by how much more
    communication took until the first event because of both, over what the same collectives took under what had been
    exploited.
    """
    before = [alarm for alarm in alarms if not (events and came_after(alarm.dseq, alarm.epoch, events[0]))]
    exploited: dict[tuple[int, int], tuple[float, float]] = {}
    raised = {(alarm.comm, alarm.key) for alarm in before}
    took_us = cost_us = 0.0
    for epoch in observed:
        last_dseq = int(epoch.samples["dseq"].max(initial=0))
        if events and came_after(last_dseq, epoch.number, events[0]):
            break
        decisions = epoch.decisions
        took_us += float((decisions["samples"] * decisions["got_us"]).sum())
        for decision in decisions:
            of, samples, got_us = (
                (epoch.comm, int(decision["key"])),
                int(decision["samples"]),
                float(decision["got_us"]),
            )
            if of not in raised:
                continue
            count, log_us = exploited.get(of, (0.0, 0.0))
            if decision["why"] == _BEST:
                exploited[of] = count + samples, log_us + samples * np.log(got_us)
            elif count:
                cost_us += samples * (got_us - float(np.exp(log_us / count)))
    return {
        "checks": sum(not alarm.anew for alarm in before),
        "anew": sum(alarm.anew for alarm in before),
        "cost_percent": 100 * cost_us / (took_us - cost_us) if took_us > cost_us else 0.0,
    }
