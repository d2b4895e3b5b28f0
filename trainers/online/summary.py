"""What a run achieved, in the keys that scripts rely on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.actions import OWN_ACTION, Action, action_of
from dynamiccl_ray.actors.status import Alarm, Epoch, Status
from dynamiccl_ray.agent.reward import means
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.keys import key_name
from dynamiccl_ray.plugin_bridge.played import PlayedFabric
from dynamiccl_ray.plugin_bridge.real_job import RealPrices
from dynamiccl_ray.report.data import came_after
from dynamiccl_ray.trainers.online.false_alarms import false_alarms

Priced = PlayedFabric | RealPrices
Doubles = npt.NDArray[np.float64]


MOST_BYTES: Final = 64 << 20


class Recent:
    """What the summary looks back on: the last epochs that brought anything, as far as there is room for them. The
    Parquet files have everything."""

    def __init__(self) -> None:
        self.epochs: Final[deque[Epoch]] = deque()
        self._bytes = 0

    def add(self, epoch: Epoch) -> None:
        if len(epoch.samples) or len(epoch.judged):
            self.epochs.append(_copy(epoch))
            self._bytes += _size(epoch)
        while self._bytes > MOST_BYTES:
            self._bytes -= _size(self.epochs.popleft())


def _copy(epoch: Epoch) -> Epoch:
    """Ray delivers arrays as views of its object store. Those that are kept would keep the whole message there, and
    each process of the run that maps the store would grow by it."""
    return replace(
        epoch,
        samples=epoch.samples.copy(),
        judged=epoch.judged.copy(),
        terms={name: of.copy() for name, of in epoch.terms.items()},
        decisions=epoch.decisions.copy(),
    )


def _size(epoch: Epoch) -> int:
    """About as many bytes as an epoch takes."""
    return 2048 + epoch.samples.nbytes + epoch.judged.nbytes * (1 + len(epoch.terms))


def summarise(
    run: str,
    experiment: Online,
    prices: Priced | None,
    observed: list[Epoch],
    status: Status,
    events: list[dict[str, Any]],
    violations: int | None,
) -> dict[str, Any]:
    """The summary of a run. Times in us; ``learned_us`` is the geometric mean of what was measured while the key was
    exploited, everything else of an emulated fabric is noise-free.

    ``keys`` and the ratios are about the fabric before the first event; ``after`` has the same for each event.
    """
    summary: dict[str, Any] = {
        "run": run,
        "name": experiment.name,
        "seed": experiment.seed,
        "mode": status.mode,
        "canary": status.canary,
        "orders": list(status.orders),
        "whole_run": _whole(status, observed),
        "epochs": status.epoch,
        "rounds": status.round,
        "collectives": status.collectives,
        "switches": status.switches,
        "digest_mismatches": status.digest_mismatches,
        "agreement_violations": violations,
        "dropped_records": status.dropped,
        "unused_records": status.unused,
        "hold_wait_s": status.hold_wait_s,
        "coverage": status.coverage.as_dict(),
        "overhead": status.overhead,
        "alarms": [asdict(alarm) for alarm in status.alarms if alarm.anew],
        "checks": [asdict(alarm) for alarm in status.alarms if not alarm.anew],
        # What changes beside a job of others nobody knows.
        "false_alarms": false_alarms(status.alarms, observed, events) if experiment.fabric.kind != "nccl" else None,
        "off": status.off,
        "unmeasured": status.unmeasured,
        "events": events,
        "history": [asdict(round_) for round_ in status.history],
        "reward": _reward(experiment, observed),
        "detection_delay": None,
        "detection_delay_key_samples": None,
        "after": [],
    }
    edges: list[dict[str, Any] | None] = [None, *events, None]
    regimes = []
    for phase, (first, last) in enumerate(pairwise(edges)):
        within = [_within(epoch, first, last) for epoch in observed]
        regimes.append(_regime(prices, within, phase))
    summary |= regimes[0]
    summary["after"] = [{"event": e["name"], **r} for e, r in zip(events, regimes[1:], strict=True)]
    if events:
        summary |= _detection(events[0], status.alarms, observed)
    return summary


def _whole(status: Status, observed: list[Epoch]) -> dict[str, Any]:
    """What the run was to the job, with all that was tried; None for what is not known."""
    worst: dict[str, Any] | None = None
    for epoch in observed:
        of = epoch.decisions[np.isfinite(epoch.decisions["got_us"]) & (epoch.decisions["own_us"] > 0)]
        for decision in of[np.argsort(of["got_us"] / of["own_us"])[-1:]]:
            ratio = float(decision["got_us"] / decision["own_us"])
            if worst is None or ratio > worst["vs_nccl"]:
                action = action_of(int(decision["action"])).name
                samples = int(decision["samples"])
                worst = {"key": key_name(int(decision["key"])), "action": action, "vs_nccl": ratio, "samples": samples}
    return {
        "took_s": status.took_s,
        "own_s": status.own_s,
        "explored_s": status.explored_s,
        "speedup": status.own_s / status.took_s if status.took_s > 0 else None,
        "own_step_s": status.own_step_s,
        "tuned_step_s": status.tuned_step_s,
        "lossless_saturated": status.lossless_saturated,
        "worst": worst,
    }


def _within(epoch: Epoch, first: dict[str, Any] | None, last: dict[str, Any] | None) -> Epoch:
    """What an epoch has from one event on and up to another. Where events have no call that all communicators agree
    on, the epoch in which one comes is left out.
    """
    keep = np.ones(len(epoch.samples), np.bool_)
    for event, after in ((first, True), (last, False)):
        if event is None:
            continue
        if event["by_call"]:
            keep &= (epoch.samples["dseq"] >= event["at"]) == after
        else:
            keep &= epoch.number > event["epoch"] if after else epoch.number < event["epoch"]
    return replace(epoch, samples=epoch.samples[keep])


def _reward(experiment: Online, observed: list[Epoch]) -> dict[str, Any]:
    """Weights, terms that were off, and by phase the mean of every term over the epochs that had it."""
    weights = experiment.reward
    phases: dict[str, dict[str, list[float]]] = {}
    for epoch in observed:
        for name, value in means(epoch.terms).items():
            phases.setdefault(epoch.phase.name.lower(), {}).setdefault(name, []).append(value)
    return {
        "weights": weights.model_dump(),
        "off": weights.off,
        "terms": {phase: {n: float(np.mean(v)) for n, v in terms.items()} for phase, terms in phases.items()},
    }


def _regime(prices: Priced | None, observed: list[Epoch], phase: int) -> dict[str, Any]:
    """One stretch of the run between two events."""
    rows = []
    for (comm, key), (times, action, baseline) in sorted(_exploited(observed).items()):
        row: dict[str, Any] = {"comm": f"{comm:x}", "communicator": None, "key": key_name(key), "default_us": baseline}
        row |= {"oracle_us": None, "vendor_us": None, "action": action.name}
        row["learned_us"] = float(np.exp(np.mean(np.log(times)))) if len(times) else None
        if prices is not None:
            row["communicator"] = prices.name(comm)
            known = prices.of(comm, key, phase)
            if known is not None:
                row |= {"bytes": known.nbytes, "default_us": known.default_us, "oracle_us": known.oracle_us}
                row |= {"oracle_action": known.oracle_action.name, "vendor_us": known.vendor_us}
                row["learned_table_us"] = known.in_force_us(action)
        rows.append(row)
    result: dict[str, Any] = {"keys": rows, "geomean_vs_oracle": None, "gap_closed": None}
    measured = [r for r in rows if r["oracle_us"] is not None and r["learned_us"] is not None]
    if measured:
        result["geomean_vs_oracle"] = {
            name: _ratio(measured, f"{name}_us")
            for name in ("default", "learned", "vendor", "learned_table")
            if all(r.get(f"{name}_us") is not None for r in measured)
        }
        default, learned, oracle = (sum(r[f"{name}_us"] for r in measured) for name in ("default", "learned", "oracle"))
        result["gap_closed"] = (default - learned) / (default - oracle) if default > oracle else None
    return result


def _exploited(observed: list[Epoch]) -> dict[tuple[int, int], tuple[Doubles, Action, float | None]]:
    """(Communicator, key) -> times measured in its last exploit phase, the action, and the baseline."""
    found = {}
    for comm in dict.fromkeys(epoch.comm for epoch in observed):
        every = np.concatenate([epoch.samples for epoch in observed if epoch.comm == comm])
        for key in np.unique(every["key"]).tolist():
            mine = every[every["key"] == key]
            exploiting = mine["phase"] == Phase.EXPLOIT
            learning = np.flatnonzero((mine["phase"] == Phase.LEARN) | (mine["phase"] == Phase.ADAPT))
            last = mine[learning[-1] + 1 if len(learning) and exploiting[learning[-1] :].any() else 0 :]
            last = last[last["phase"] == Phase.EXPLOIT]
            own = mine["time_us"][(mine["phase"] == Phase.BASELINE) & (mine["action"] == OWN_ACTION)]
            action = action_of(int(last["action"][-1])) if len(last) else Action()
            baseline = float(np.exp(np.mean(np.log(own)))) if len(own) else None
            found[comm, key] = (last["time_us"], action, baseline)
    return found


def _detection(event: dict[str, Any], alarms: Sequence[Alarm], observed: list[Epoch]) -> dict[str, Any]:
    """Collectives between an event and its alarm: of the communicator, and of the key that raised it."""
    after = [a for a in alarms if a.anew and came_after(a.dseq, a.epoch, event)]
    if not after:
        return {}
    alarm = after[0]
    own = 0
    for epoch in observed:
        if epoch.comm == alarm.comm:
            dseq = epoch.samples["dseq"][epoch.samples["key"] == alarm.key]
            since = dseq >= event["at"] if event["by_call"] else np.full(len(dseq), epoch.number >= event["epoch"])
            own += int(np.count_nonzero(since & (dseq <= alarm.dseq)))
    delay = alarm.dseq - event["at"] if event["by_call"] else None
    return {"detection_delay": delay, "detection_delay_key_samples": own}


def _ratio(rows: list[dict[str, Any]], name: str) -> float:
    return float(np.exp(np.mean([np.log(r[name] / r["oracle_us"]) for r in rows])))
