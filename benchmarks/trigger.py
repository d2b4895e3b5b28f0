"""The trigger on noise as it is: collectives to a false alarm, and how soon shifts are found.

    python benchmarks/trigger.py OUT.json [--keys 400] [--samples 8000]

The detector alone, each key begun anew after an alarm; docs/trigger.md has the table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from dynamiccl_ray.control.trigger import Cusum

ARL0 = 1e6
NOISE = (
    "AR(1) 0, 2 %", "AR(1) 0, 5 %", "AR(1) 0.3, 5 %", "AR(1) 0.5, 5 %", "AR(1) 0.7, 5 %", "Student t 3, 2 %",
    "two modes", "rare and slow",
)  # fmt: skip
SHIFTS = (
    ("AR(1) 0, 2 %", 0.05, 20, 1),
    ("AR(1) 0, 2 %", 0.05, 24, 400),
    ("AR(1) 0, 5 %", 0.2, 24, 1),
    ("AR(1) 0.5, 5 %", 0.2, 40, 1),
    ("AR(1) 0.5, 5 %", 0.2, 400, 1),
    ("AR(1) 0, 5 %", 0.05, 400, 1),
    ("AR(1) 0.5, 5 %", 0.05, 400, 1),
)
"""Noise, shift, samples that are known before it, and those over which it comes."""
CHUNK = 8


def series(kind: str, rng: np.random.Generator, keys: int, samples: int) -> NDArray[np.float64]:
    """(keys, samples) of log times that do not change."""
    normal = rng.standard_normal((keys, samples + 200))
    if kind.startswith("AR(1)"):
        phi, sigma = (float(word.strip("%")) for word in kind.removeprefix("AR(1) ").removesuffix(" %").split(", "))
        scale = sigma / 100 * np.sqrt(1 - phi**2)
        return np.asarray(lfilter([scale], [1, -phi], normal, axis=-1)[:, 200:])
    normal, shape = normal[:, 200:], (keys, samples)
    if kind == "Student t 3, 2 %":
        return np.asarray(0.02 * rng.standard_t(3, shape))
    if kind == "two modes":
        return np.asarray(0.02 * normal + np.log(1.2) * (rng.random(shape) < 0.3))
    assert kind == "rare and slow"
    return np.asarray(0.03 * normal + (rng.random(shape) < 0.01) * rng.exponential(0.5, shape))


def false_alarms(kind: str, keys: int, samples: int) -> dict[str, Any]:
    detector, rows, alarms = Cusum(ARL0), np.arange(keys), 0
    detector.grow(keys)
    times = series(kind, np.random.default_rng(0), keys, samples)
    for at in range(0, samples, CHUNK):
        raised = detector.update(rows, np.full(keys, CHUNK), times[:, at : at + CHUNK].ravel()) >= 0
        alarms += int(raised.sum())
        detector.reset(rows[raised])
    return {"noise": kind, "samples": keys * samples, "false_alarms": alarms}


def found(kind: str, shift: float, known: int, over: int, keys: int) -> dict[str, Any]:
    detector, within = Cusum(ARL0), 1000
    detector.grow(keys)
    times = series(kind, np.random.default_rng(1), keys, known + within)
    times[:, known:] += np.log1p(shift) * np.minimum(1, np.arange(1, within + 1) / over)
    alarm = detector.update(np.arange(keys), np.full(keys, known + within), times.ravel()) + 1 - known
    after = alarm[alarm > 0]
    return {
        "noise": kind,
        "shift": shift,
        "known": known,
        "over": over,
        "within_50": float(np.mean((alarm > 0) & (alarm <= 50))),
        "within_1000": float(np.mean(alarm > 0)),
        "median": float(np.median(after)) if len(after) else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--keys", type=int, default=400)
    parser.add_argument("--samples", type=int, default=8000, help="of each key, without a change")
    given = parser.parse_args()
    document = {
        "arl0": ARL0,
        "false_alarms": [false_alarms(kind, given.keys, given.samples) for kind in NOISE],
        "shifts": [found(*shift, given.keys) for shift in SHIFTS],
    }
    given.out.write_text(json.dumps(document, indent=1) + "\n")
    for row in [*document["false_alarms"], *document["shifts"]]:  # type: ignore[misc]
        print(json.dumps(row))


if __name__ == "__main__":
    main()
