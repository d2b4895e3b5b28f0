"""The trigger on noise as it is: collectives to a false alarm, and how soon shifts are found.

    python benchmarks/trigger.py OUT.json [--keys 400] [--samples 8000]

The detectors alone, each key or communicator begun anew after an alarm; docs/trigger.md has the tables.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from dynamiccl_ray.control.trigger import BATCH, Cusum
from dynamiccl_ray.control.watch import OWN_SHARE, SHARE, Watch

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
TOGETHER = (
    ("AR(1) 0, 5 %", "nothing", 0.0, 0.0),
    ("AR(1) 0.5, 5 %", "nothing", 0.0, 0.0),
    ("AR(1) 0.7, 5 %", "nothing", 0.0, 0.0),
    ("Student t 3, 2 %", "nothing", 0.0, 0.0),
    ("two modes", "nothing", 0.0, 0.0),
    ("AR(1) 0.5, 5 %, half of it common", "nothing", 0.0, 0.0),
    ("AR(1) 0, 5 %", "all +2 %", 0.02, 0.0),
    ("AR(1) 0, 5 %", "all +5 %", 0.05, 0.0),
    ("AR(1) 0.5, 5 %", "all +5 %", 0.05, 0.0),
    ("AR(1) 0.5, 5 %, half of it common", "all +5 %", 0.05, 0.0),
    ("AR(1) 0, 5 %", "skew 5 to 10 %", 0.0, 0.05),
    ("AR(1) 0.5, 5 %", "skew 5 to 10 %", 0.0, 0.05),
)
"""Noise of the keys of a communicator, what changes, by how much times do, and skew."""
KEYS = 20
KNOWN = 800
"""Of a communicator, and collectives of each key before the change."""


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
    detector, rows, alarms = Cusum(ARL0 / OWN_SHARE), np.arange(keys), 0
    detector.grow(keys)
    times = series(kind, np.random.default_rng(0), keys, samples)
    for at in range(0, samples, BATCH):
        raised = detector.update(rows, np.full(keys, BATCH), times[:, at : at + BATCH].ravel()) >= 0
        alarms += int(raised.sum())
        detector.reset(rows[raised])
    return {"noise": kind, "samples": keys * samples, "false_alarms": alarms}


def found(kind: str, shift: float, known: int, over: int, keys: int) -> dict[str, Any]:
    detector, within = Cusum(ARL0 / OWN_SHARE), 1000
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


def together(kind: str, what: str, shift: float, skew: float, communicators: int, samples: int) -> dict[str, Any]:
    """How soon the keys' own detectors notice, the first of a communicator's, and how soon the watch over it. All keys
    exploit, and run equally often."""
    rng, rows = np.random.default_rng(2), np.arange(communicators * KEYS)
    group, kind_of_all = rows // KEYS, kind.removesuffix(", half of it common")
    times = series(kind_of_all, rng, len(rows), samples)
    if kind_of_all != kind:
        common = series(kind_of_all, rng, communicators, samples)
        times = np.sqrt(0.5) * (times + common[group])
    times[:, KNOWN:] += np.log1p(shift)
    # Half of the variance is the communicator's, half the key's.
    skews = 0.014 * rng.standard_normal((2, len(rows), samples // BATCH))
    skews = 0.05 + skews[0] + skews[1][group] + skew * (np.arange(samples // BATCH) >= KNOWN // BATCH)
    watch, own = Watch(ARL0 / SHARE), Cusum(ARL0 / OWN_SHARE)
    watch.know(group, np.tile(1 << np.arange(KEYS), communicators))
    own.grow(len(rows))
    first = np.full((2, communicators), np.inf)
    false = np.zeros(2, np.int64)
    level, sigma = times[:, :KNOWN].mean(1), times[:, :KNOWN].std(1)
    for at in range(0, samples, BATCH):
        now = times[:, at : at + BATCH]
        mean, count = now.mean(1), np.full(len(rows), float(BATCH))
        error = sigma * np.sqrt(1 / BATCH + 1 / KNOWN)
        of_all = watch.add(rows, (mean - level) / error, skews[:, at // BATCH])
        alone = own.update(rows, count.astype(np.int64), now.ravel()) >= 0
        for way, (raised, detector) in enumerate(((alone, own.reset), (of_all, watch.forget))):
            by = np.unique(group[raised])
            if at >= KNOWN and (shift or skew):
                first[way, by] = np.minimum(first[way, by], at + BATCH - KNOWN)
            else:
                false[way] += len(np.flatnonzero(raised)) if way == 0 else len(by)
            detector(rows[raised])
    return {
        "noise": kind,
        "change": what,
        "collectives": len(rows) * (KNOWN if shift or skew else samples),
        "false_own": int(false[0]),
        "false_together": int(false[1]),
        "found_own": float(np.isfinite(first[0]).mean()),
        "found_together": float(np.isfinite(first[1]).mean()),
        "median_own": _median(first[0]),
        "median_together": _median(first[1]),
    }


def _median(first: NDArray[np.float64]) -> float | None:
    """None where half of them were never found."""
    median = float(np.median(first))
    return median if np.isfinite(median) else None


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
        "together": [together(*of, given.keys // 4, given.samples // 4) for of in TOGETHER],
    }
    given.out.write_text(json.dumps(document, indent=1) + "\n")
    for row in [*document["false_alarms"], *document["shifts"], *document["together"]]:  # type: ignore[misc]
        print(json.dumps(row))


if __name__ == "__main__":
    main()
