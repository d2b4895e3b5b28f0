"""The policy less each other chooser over all jobs that nobody had looked at when they were played.

    python benchmarks/pooled.py FILE...

Files of ``described.py`` on sets with seeds. Each set is of the loop and the policy of its day; where a file has a row
twice, the first counts. Intervals of 95 % are bootstrapped over the jobs of each set.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl_ray.arrays import Float64

DRAWS = 4000


def rows_of(content: Any) -> Iterator[dict[str, Any]]:
    """All rows of a file, however deep."""
    if isinstance(content, dict) and "of_jobs" in content:
        yield content
    elif isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from rows_of(part)


def regrets(files: list[Path]) -> dict[tuple[str, str, tuple[int, ...]], Float64]:
    """(J,) regret of each job, in per cent, by what jobs say, chooser, and seeds of the set."""
    found: dict[tuple[str, str, tuple[int, ...]], Float64] = {}
    for file in files:
        for row in rows_of(json.loads(file.read_text())):
            if row.get("seeds"):
                key = row["described"], row["chooser"], tuple(row["seeds"])
                found.setdefault(key, 100 * np.array(row["of_jobs"]))
    return found


def main() -> None:
    found = regrets([Path(name) for name in sys.argv[1:]])
    rng = np.random.default_rng(0)
    pairs = dict.fromkeys((told, chooser) for told, chooser, _ in found if chooser != "policy")
    for told, other in pairs:
        sets = [seeds for of, chooser, seeds in found if (of, chooser) == (told, other)]
        ours, theirs = ([found[told, of, seeds] for seeds in sets] for of in ("policy", other))
        behind = [a - b for a, b in zip(ours, theirs, strict=True)]
        drawn = [of[rng.integers(len(of), size=(DRAWS, len(of)))] for of in behind]
        low, high = np.percentile(np.concatenate(drawn, 1).mean(1), [2.5, 97.5])
        a, b, less = (np.concatenate(of).mean() for of in (ours, theirs, behind))
        jobs = sum(map(len, behind))
        print(f"{told}, {jobs} jobs: {a:.2f} %, {other} {b:.2f} %: {less:+.2f} ({low:+.2f} to {high:+.2f})")


if __name__ == "__main__":
    main()
