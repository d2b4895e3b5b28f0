"""What ``nccl-tests -J FILE`` writes, as the log that it prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any


def as_log(text: str) -> str:
    """A log of the same run; empty for other JSON. What was in the environment stands there as NCCL says it."""
    try:
        return "\n".join(_lines(json.loads(text)))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return ""


def _lines(run: Mapping[str, Any]) -> Iterator[str]:
    config = run["config"]
    yield f"# Collective test starting: {PurePath(run['args'][0]).name}"
    yield "# Using devices"
    # One device stands there for each process.
    each = config["nthreads"] * config["ngpus"]
    for device in config["devices"]:
        for i in range(each):
            yield (
                f"#  Rank {device['rank'] + i} Group {device['group']} Pid {device['pid']} on {device['hostname']} "
                f"device {device['device'] + i} [{device['device_hex']}] {device['device_info']}"
            )
    yield "NCCL INFO environment"
    for name, _, value in (variable.partition("=") for variable in run["env"]):
        if name.startswith("NCCL_"):
            yield f"NCCL INFO {name} set by environment to {value}"
    yield "#  size  count  type  redop  root" + 2 * "  time  algbw  busbw  #wrong"
    for row in run["results"]:
        placed = row["out_of_place"]
        # A run under -C has cpu_time, which is not how long the collective took.
        if placed and "time" in placed:
            wrong = "N/A" if placed["nwrong"] is None else f"{placed['nwrong']:g}"
            yield (
                f"{row['size']} {row['count']} {row['type']} {row['redop']} {row['root']} {placed['time']} "
                f"{placed['alg_bw']} {placed['bus_bw']} {wrong}"
            )
