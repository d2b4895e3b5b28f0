"""What a run achieved, in the keys that scripts rely on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.actions import Action
from dynamiccl_ray.experiment import Online
from dynamiccl_ray.keys import key_name
from dynamiccl_ray.reward import means
from plugin_bridge.played import PlayedFabric

Doubles = npt.NDArray[np.float64]


def summarise(
    run: str,
    experiment: Online,
    fabric: PlayedFabric | None,
    observed: list[dict[str, Any]],
    status: dict[str, Any],
    events: list[dict[str, Any]],
    violations: int | None,
) -> dict[str, Any]:
    """The summary of a run. Times in us; ``learned_us`` is the geometric mean of what was measured while the policy
    was exploited, everything else of an emulated fabric is noise-free.

    ``keys`` and the ratios are about the fabric before the first event; ``after`` has the same for each event.
    """
    summary: dict[str, Any] = {
        "run": run,
        "name": experiment.name,
        "seed": experiment.seed,
        "mode": experiment.mode,
        "epochs": status["epoch"],
        "rounds": status["round"],
        "collectives": status["collectives"],
        "switches": status["switches"],
        "digest_mismatches": status["digest_mismatches"],
        "agreement_violations": violations,
        "dropped_records": status["dropped"],
        "unused_records": status["unused"],
        "alarms": status["alarms"],
        "off": status["off"],
        "events": events,
        "history": status["history"],
        "reward": _reward(experiment, observed),
        "detection_delay": None,
        "detection_delay_key_samples": None,
        "after": [],
    }
    edges = [0, *(event["at"] for event in events), 2**62]
    regimes = [_regime(fabric, observed, phase, edges[phase], edges[phase + 1]) for phase in range(len(edges) - 1)]
    summary |= regimes[0]
    summary["after"] = [{"event": e["name"], **r} for e, r in zip(events, regimes[1:], strict=True)]
    if events:
        summary |= _detection(events[0], status["alarms"], observed)
    if fabric is not None:
        summary["stands_for"] = fabric.sample()
    return summary


def _reward(experiment: Online, observed: list[dict[str, Any]]) -> dict[str, Any]:
    """Weights, terms that were off, and by phase the mean of every term over the epochs that had it."""
    weights = experiment.reward
    phases: dict[str, dict[str, list[float]]] = {}
    for epoch in observed:
        for name, value in means(epoch["terms"]).items():
            phases.setdefault(epoch["phase"], {}).setdefault(name, []).append(value)
    return {
        "weights": weights.model_dump(),
        "off": weights.off,
        "terms": {phase: {n: float(np.mean(v)) for n, v in terms.items()} for phase, terms in phases.items()},
    }


def _regime(
    fabric: PlayedFabric | None, observed: list[dict[str, Any]], phase: int, start: int, end: int
) -> dict[str, Any]:
    """One stretch of the run between two events."""
    exploited = _exploited(observed, start, end)
    rows = []
    for key, (times, action, baseline) in sorted(exploited.items()):
        row: dict[str, Any] = {"key": key_name(key), "default_us": baseline, "oracle_us": None, "vendor_us": None}
        row["learned_us"] = float(np.exp(np.mean(np.log(times)))) if len(times) else None
        row["action"] = action.name
        if fabric is not None:
            at = int(np.flatnonzero(fabric.keys == key)[0])
            time_us = fabric.time_us[phase, at]
            row["bytes"] = int(fabric.nbytes[at])
            row["default_us"] = float(time_us[0, 0])
            row["oracle_us"] = float(np.nanmin(time_us))
            row["oracle_action"] = _best(time_us).name
            row["learned_table_us"] = float(time_us[action.pair, action.channels])
            if phase == 0 and np.isfinite(fabric.vendor_us[at]):
                row["vendor_us"] = float(fabric.vendor_us[at])
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


def _exploited(observed: list[dict[str, Any]], start: int, end: int) -> dict[int, tuple[Doubles, Action, float | None]]:
    """Key -> times measured in the last exploit phase within [start, end), the action, and the baseline."""
    epochs = [e for e in observed if len(e["samples"].dseq) and start <= e["samples"].dseq[0] < end]
    last = [e["epoch"] for e in epochs if e["phase"] == "exploit"]
    broken = [e["epoch"] for e in epochs if e["phase"] in ("learn", "adapt") and last and e["epoch"] < last[-1]]
    first = max(broken, default=-1)
    times: dict[int, list[Doubles]] = {}
    actions: dict[int, Action] = {}
    baseline: dict[int, list[Doubles]] = {}
    for epoch in epochs:
        samples = epoch["samples"]
        inside = (samples.dseq >= start) & (samples.dseq < end)
        for key in np.unique(samples.key):
            mine = samples.time_us[(samples.key == key) & inside]
            action = epoch["actions"].get(int(key), Action())
            if epoch["phase"] == "baseline" and action == Action():
                baseline.setdefault(int(key), []).append(mine)
            if epoch["phase"] == "exploit" and epoch["epoch"] > first:
                times.setdefault(int(key), []).append(mine)
                actions[int(key)] = action
    return {
        key: (
            np.concatenate(times.get(key, [np.zeros(0)])),
            actions.get(key, Action()),
            float(np.exp(np.mean(np.log(np.concatenate(baseline[key]))))) if key in baseline else None,
        )
        for key in times.keys() | baseline.keys()
    }


def _detection(event: dict[str, Any], alarms: list[dict[str, Any]], observed: list[dict[str, Any]]) -> dict[str, Any]:
    """Collectives between an event and its alarm: of the communicator, and of the key that raised it."""
    after = [a for a in alarms if a["dseq"] >= event["at"]]
    if not after:
        return {}
    alarm = after[0]
    own = sum(
        int(
            (
                (e["samples"].key == alarm["key"])
                & (e["samples"].dseq >= event["at"])
                & (e["samples"].dseq <= alarm["dseq"])
            ).sum()
        )
        for e in observed
        if e["comm"] == alarm["comm"]
    )
    return {"detection_delay": alarm["dseq"] - event["at"], "detection_delay_key_samples": own}


def _best(time_us: Doubles) -> Action:
    pair, channels = np.unravel_index(np.nanargmin(time_us), time_us.shape)
    return Action(pair=int(pair), channels=int(channels))


def _ratio(rows: list[dict[str, Any]], name: str) -> float:
    return float(np.exp(np.mean([np.log(r[name] / r["oracle_us"]) for r in rows])))
