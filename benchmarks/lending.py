"""What measurements of one key say of others, and those of one action of the key's others, on the jobs that a policy
is trained on: the sources of the constants in ``agent/lending.py`` and ``control/comparing.py``.

    python benchmarks/lending.py [--scenarios 40]

Times are logs over NCCL's own choice, without noise.
"""

from __future__ import annotations

import argparse
import json
import warnings
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.knobs import N_PROTOCOLS
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.splits import stage_scenarios

CURRICULUM = Path(__file__).parents[1] / "experiments" / "curricula" / "default.yaml"
SEED = 0x1E4D
# All-gather with reduce-scatter, broadcast with reduce.
KIND = np.array([0, 0, 2, 2, 4])
OCTAVES = (0.5, 1, 2, 4, 8)
STEPS = (1, 2, 3, 4, 6)
BETWEEN = [f"{kind}{own}" for kind in ("algorithm", "protocol", "neither") for own in ("", ", own")]
# What is far behind is not tried, and how far does not matter.
REACH = 0.7


def ratios(scenario: Scenario, phase: int = 0) -> NDArray[np.float64]:
    """(K, pairs, channels, chunks); NaN for what is never asked for, or far behind."""
    log_us = np.log(scenario.times_us[phase].astype(np.float64))
    out = log_us - log_us[:, :1, :1, :1]
    return np.where(out - np.nanmin(out, (1, 2, 3), keepdims=True) < REACH, out, np.nan)


def spread(x: NDArray[np.float64]) -> list[float]:
    """Standard deviation, and that of the middle half, if it were normal: quartiles are 1.349 of them apart."""
    known = x[np.isfinite(x)]
    return [round(float(s), 4) for s in (known.std(), np.subtract(*np.percentile(known, [75, 25])) / 1.349)]


def by_steps(ratio: NDArray[np.float64], axis: int) -> dict[int, NDArray[np.float64]]:
    """By how many steps two channel counts (axis 2, with NCCL's own chunk) or chunks (axis 3) are apart: their
    differences over the square root of 2: the root of a semivariogram. NCCL's own is left out."""
    values = ratio[:, 1:, 1:, 0] if axis == 2 else ratio[:, 1:, :, 1:]
    return {n: (values[..., n:] - values[..., :-n]).ravel() / np.sqrt(2) for n in STEPS if n < values.shape[-1]}


def shared(ratio: NDArray[np.float64], axis: int) -> dict[str, NDArray[np.float64]]:
    """Sums (3,) of x y, x^2 and y^2 over two pairs' differences between values of an axis as in ``by_steps``, up to
    three steps apart with all else alike, and between all values and NCCL's own: of pairs of one algorithm, of one
    protocol, or of neither."""
    values = ratio[:, 1:]
    size, out = values.shape[axis], {name: np.zeros(3) for name in BETWEEN}
    differences = [(range(1 + n, size), range(1, size - n)) for n in STEPS[:3]]
    for i, (upper, lower) in enumerate([*differences, (range(1, size), [0])]):
        apart = values.take(upper, axis) - values.take(lower, axis)
        for a, b in combinations(range(values.shape[1]), 2):
            (of_a, like_a), (of_b, like_b) = divmod(a, N_PROTOCOLS), divmod(b, N_PROTOCOLS)
            name = "algorithm" if of_a == of_b else "protocol" if like_a == like_b else "neither"
            x, y = apart[:, a], apart[:, b]
            both = np.isfinite(x) & np.isfinite(y)
            out[f"{name}, own" if i == len(differences) else name] += [
                (u[both] * v[both]).sum() for u, v in ((x, y), (x, x), (y, y))
            ]
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenarios", type=int, default=40, help="of each stage")
    given = parser.parse_args()
    curriculum = load_curriculum(CURRICULUM)
    apart, mirrored = ({octaves: list[NDArray[np.float64]]() for octaves in OCTAVES} for _ in range(2))
    floor, stale, pairs = [], [], []
    alone: dict[str, dict[int, list[NDArray[np.float64]]]] = {
        name: {n: [] for n in STEPS} for name in ("channels", "chunks")
    }
    between = {name: {kind: np.zeros(3) for kind in BETWEEN} for name in alone}
    for i, stage in enumerate(curriculum.stages):
        for scenario in stage_scenarios(stage, curriculum, (SEED, i), given.scenarios):
            ratio = ratios(scenario)
            octaves = np.log2(scenario.nbytes)
            kind = KIND[scenario.collective]
            for a, b in zip(*np.nonzero(np.triu(kind[:, None] == kind, 1)), strict=True):
                distance = abs(octaves[a] - octaves[b])
                within = next((o for o in OCTAVES if distance <= o), None)
                if within is not None:
                    of = apart if scenario.collective[a] == scenario.collective[b] else mirrored
                    of[within].append((ratio[a] - ratio[b])[..., 0].ravel())
            floor.append((ratio - (ratio[..., :1] + ratio[:, :, :1] - ratio[:, :, :1, :1])).ravel())
            with np.errstate(invalid="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # pairs of which nothing is near have no mean
                of_pair = np.nanmean(ratio[:, 1:], (2, 3))
                pairs.append((of_pair - np.nanmean(of_pair, 1, keepdims=True)).ravel())
            for name, axis in (("channels", 2), ("chunks", 3)):
                for n, of in by_steps(ratio, axis).items():
                    alone[name][n].append(of)
                for kind, sums in shared(ratio, axis).items():
                    between[name][kind] += sums
            stale += [(ratios(scenario, p) - ratio).ravel() for p in range(1, len(scenario.starts))]
    print(
        json.dumps(
            {
                "apart_by_octaves": {str(o): spread(np.concatenate(of)) for o, of in apart.items() if of},
                "mirrored_by_octaves": {str(o): spread(np.concatenate(of)) for o, of in mirrored.items() if of},
                "floor": spread(np.concatenate(floor)),
                "stale": spread(np.concatenate(stale)),
                "pairs": spread(np.concatenate(pairs)),
                **{
                    f"{name}_by_steps": {n: spread(np.concatenate(of)) for n, of in apart_by.items() if of}
                    for name, apart_by in alone.items()
                },
                # Correlations of what values are worth to two pairs.
                **{
                    f"{name}_between_pairs": {
                        kind: round(float(xy / np.sqrt(xx * yy)), 2) for kind, (xy, xx, yy) in of.items()
                    }
                    for name, of in between.items()
                },
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
