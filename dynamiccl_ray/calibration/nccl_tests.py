"""Logs of nccl-tests (all_reduce_perf and its siblings) as rows of measurements.

The header says which GPUs took part and where; NCCL's own lines, where ``NCCL_DEBUG=INFO`` printed them, say what was
forced. What a log does not say (the links) stays empty; one host of a cluster is of the same machine as many, so that
all logs have a network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from dynamiccl_ray.errors import ConfigError

_RANK: Final = re.compile(
    r"^#\s+Rank\s+(?P<rank>\d+).*?\s+on\s+(?P<host>\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(?P<gpu>.+?)\s*$", re.MULTILINE
)
_HEADER: Final = re.compile(r"^#\s+size\s+count\s+type\s+(redop\s+)?(root\s+)?time\s+algbw\s+busbw", re.MULTILINE)
_STARTED: Final = re.compile(r"Collective test starting:\s*(\w+)_perf")
_FORCED: Final = re.compile(r"NCCL_(ALGO|PROTO|MIN_NCHANNELS|MAX_NCHANNELS) set by environment to (\S+?)\.?\s*$", re.M)
_NAMES: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "sendrecv")
_SUFFIXES: Final = (".txt", ".log", ".out")
# Time comes after size, count, type and, where the header names them, redop and root.
_BEFORE_TIME: Final = 3


def is_nccl_tests(path: Path) -> bool:
    """Whether a file is a log with a table of nccl-tests in it."""
    return path.suffix in _SUFFIXES and bool(_HEADER.search(path.read_text(encoding="utf-8", errors="replace")))


def read_nccl_tests(path: Path) -> Iterable[tuple[str, Mapping[str, str]]]:
    """(where, row) for every line of the tables, out of place, in the columns of a CSV of measurements.

    Raises ConfigError where the log does not say which collective it is, or which GPUs took part.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    collective = _collective(path, text)
    devices = {int(m["rank"]): (m["host"], m["gpu"]) for m in _RANK.finditer(text)}
    if not devices:
        raise ConfigError(f"{path}: no line '# Rank ...' says which GPUs took part; keep the header of nccl-tests")
    hosts = {host for host, _ in devices.values()}
    if len(devices) % len(hosts):
        raise ConfigError(f"{path}: {len(devices)} ranks on {len(hosts)} hosts; expected as many on each")
    forced = {name: value.lower() for name, value in _FORCED.findall(text)}
    channels = forced.get("MAX_NCHANNELS", "")
    fixed = {
        "source_id": path.stem,
        "collective": collective,
        "nodes": str(len(hosts)),
        "ranks": str(len(devices)),
        "gpus_per_node": str(len(devices) // len(hosts)),
        "gpu": devices[min(devices)][1],
        "intra": "",
        "inter": "network",
        "algo": forced.get("ALGO", "default"),
        "proto": forced.get("PROTO", "default"),
        "nchannels": channels if channels == forced.get("MIN_NCHANNELS") else "",
    }
    position = None
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            position = _BEFORE_TIME + sum(name is not None for name in header.groups())
        words = line.split()
        if position is None or len(words) <= position + 2 or not words[0].isdecimal():
            continue
        yield f"{path}, line {number}", {**fixed, "bytes": words[0], "time_us": words[position]}


def _collective(path: Path, text: str) -> str:
    started = _STARTED.search(text)
    found = [name for name in _NAMES if name in (started[1] if started else path.name.lower())]
    if not found:
        raise ConfigError(
            f"{path}: which collective? Neither the log nor its name says; name the file after one of "
            f"{', '.join(_NAMES)}"
        )
    return found[0]
