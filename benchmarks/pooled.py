"""The policy less each other chooser over all jobs that nobody had looked at when they were played, and by cluster; and
how many times what it loses there with the right model it loses with another's name, or with nothing said.

    python benchmarks/pooled.py FILE...

Files of ``described.py`` on sets with seeds. Each set is of the loop and the policy of its day; where a file has a row
twice, the first counts. Intervals of 95 % are bootstrapped over jobs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.arrays import Float64, Int64

DRAWS = 4000


def rows_of(content: Any) -> Iterator[dict[str, Any]]:
    """All rows of a file, however deep, that have seeds."""
    if isinstance(content, dict) and content.get("seeds") and "of_jobs" in content:
        yield content
    elif isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from rows_of(part)


def compared(ours: Float64, theirs: Float64) -> str:
    """Means of regrets (J,) of the same jobs, and of their difference, in per cent."""
    less = ours - theirs
    drawn = np.random.default_rng(0).integers(len(less), size=(DRAWS, len(less)))
    low, high = np.percentile(less[drawn].mean(1), [2.5, 97.5])
    return f"{ours.mean():.2f} and {theirs.mean():.2f} %: {less.mean():+.2f} ({low:+.2f} to {high:+.2f})"


def ratio(ours: Float64, right: Float64) -> str:
    """Of means of regrets (J,) of the same jobs."""
    drawn = np.random.default_rng(0).integers(len(ours), size=(DRAWS, len(ours)))
    low, high = np.percentile(ours[drawn].mean(1) / right[drawn].mean(1), [2.5, 97.5])
    return f"{ours.mean():.2f} over {right.mean():.2f} %: {ours.mean() / right.mean():.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    rows = [row for name in sys.argv[1:] for row in rows_of(json.loads(Path(name).read_text()))]
    clusters = next(list(row["by_cluster"]) for row in rows if "by_cluster" in row)
    found: dict[tuple[str, str, tuple[int, ...]], Float64] = {}
    cluster: dict[tuple[int, ...], Int64] = {}
    for row in rows:
        seeds = tuple(row["seeds"])
        found.setdefault((row["described"], row["chooser"], seeds), 100 * np.array(row["of_jobs"]))
        # A seed has as many jobs of each cluster, one cluster's after the other's.
        each = len(row["of_jobs"]) // len(seeds) // len(clusters)
        cluster[seeds] = np.tile(np.repeat(np.arange(len(clusters)), each), len(seeds))
    for told, other in dict.fromkeys((told, chooser) for told, chooser, _ in found if chooser != "policy"):
        sets = [seeds for of, chooser, seeds in found if (of, chooser) == (told, other)]
        ours, theirs = (np.concatenate([found[told, of, seeds] for seeds in sets]) for of in ("policy", other))
        print(f"{told}, policy and {other}, {len(ours)} jobs: {compared(ours, theirs)}")
        of = np.concatenate([cluster[seeds] for seeds in sets])
        for i, name in enumerate(clusters):
            print(f"    {name}: {compared(ours[of == i], theirs[of == i])}")
    for told in ("wrong", "none"):
        both = [seeds for of, chooser, seeds in found if (of, chooser) == (told, "policy")]
        both = [seeds for seeds in both if ("right", "policy", seeds) in found]
        ours, right = (np.concatenate([found[of, "policy", seeds] for seeds in both]) for of in (told, "right"))
        print(f"policy, {told} over right, {len(ours)} jobs: {ratio(ours, right)}")


if __name__ == "__main__":
    main()
