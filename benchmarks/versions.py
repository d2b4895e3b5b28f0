"""getCollInfo of this version of the plugin and of an earlier one, in turns on one machine, in both modes.

    python benchmarks/versions.py CHECKOUT OUT.json [--rounds 10]

CHECKOUT is one of the earlier version, with its native parts built (`make native`). Where it knows no mode in band, its
only mode stands for both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parents[1]
MODES: Mapping[str, list[str]] = {"coordinator": [], "in band": ["--in-band"]}
WHAT = ("p50", "p99", "block")


def _measured(checkout: Path, arguments: list[str]) -> dict[str, Any] | None:
    """What `dynamiccl bench plugin` says in a checkout; None where it has no such mode."""
    command = [sys.executable, "-m", "dynamiccl_ray", "bench", "plugin", "--json", *arguments]
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=env, check=False, capture_output=True, text=True)
    if done.returncode and "No such option" in done.stderr:
        return None
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr}")
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("before", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    for turn in range(given.rounds):
        for mode, arguments in MODES.items():
            for version, checkout in (("before", given.before.absolute()), ("now", HERE)):
                found = _measured(checkout, arguments)
                if found is not None:
                    rows.setdefault(f"{version}, {mode}", []).append(found)
        print(f"{turn + 1} of {given.rounds}", flush=True)
    ns = {
        name: {what: median(row["get_coll_info_ns"][what] for row in of) for what in WHAT}
        | {"above_empty": median(row["above_empty_ns"]["p50"] for row in of)}
        | {"profiler_path": median(row["profiler_path_ns"] for row in of)}
        for name, of in rows.items()
    }
    document = {"rounds": given.rounds, "ns": ns, "hardware": next(iter(rows.values()))[0]["hardware"]}
    given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(ns, indent=1))


if __name__ == "__main__":
    main()
