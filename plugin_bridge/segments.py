"""The segments of this machine: whose they are, who has claimed them, and which of them nobody needs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dynamiccl_ray.errors import ChannelBusyError, ChannelError
from dynamiccl_ray.plugin_bridge.channel import Channel, owner_lives

JOB_BYTES: Final = 63
"""Of a job id; what comes after is not looked at."""

_SEGMENT_NAME = re.compile(r"dynamiccl-(?P<job>[A-Za-z0-9_.=]+)-(?P<pid>\d+)-(?P<ordinal>\d+)")


def shm_dir() -> Path:
    """Where segments live: ``DYNAMICCL_SHM_DIR``, by default /dev/shm."""
    return Path(os.environ.get("DYNAMICCL_SHM_DIR") or "/dev/shm")


def segments(job: str | None = None) -> Iterator[Path]:
    """Names of all segments, or of one job's, in no particular order. Nothing is opened."""
    directory = shm_dir()
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        match = _SEGMENT_NAME.fullmatch(path.name)
        if match and (job is None or match["job"] == sanitized(job)):
            yield path


def jobs_here() -> set[str]:
    """Job ids of the training processes that live on this machine, as far as they are this user's."""
    jobs = set()
    for path in segments():
        with contextlib.suppress(ChannelError), Channel(path, claim=False) as channel:
            if channel.alive:
                jobs.add(channel.identity.job)
    return jobs


def look_for(job: str) -> tuple[bool, set[str]]:
    """Whether a training process of ``job`` lives on this machine, and the ids of all jobs here."""
    return any(owner_lives(path) for path in segments(job)), jobs_here()


def claimed_by(path: Path) -> int | None:
    """The process that has claimed a segment; None for nobody, and for what is no segment of ours."""
    try:
        Channel(path).close()
    except ChannelBusyError:
        with contextlib.suppress(ChannelError), Channel(path, claim=False) as channel:
            return channel.status.runner_pid
    except ChannelError:
        pass
    return None


def segment_pid(path: Path) -> int:
    """The process that a segment's name says it belongs to. Raises ValueError for another file's name."""
    match = _SEGMENT_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name} is not the name of a segment")
    return int(match["pid"])


def sanitized(job: str) -> str:
    """A job id as the plugin writes it into file names: its first 63 bytes, and as =XX those that are no ASCII letter,
    digit, _ or dot."""
    raw = job.encode(errors="surrogateescape")[:JOB_BYTES]
    return "".join(chr(c) if re.fullmatch(rb"[A-Za-z0-9_.]", bytes([c])) else f"={c:02X}" for c in raw)


def process_alive(pid: int, start_time: int) -> bool:
    """Whether ``pid`` is still the process that started at ``start_time`` (clock ticks after boot)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    fields = stat.rpartition(")")[2].split()
    return fields[0] not in "ZX" and int(fields[19]) == start_time


def remove_stale(job: str | None = None) -> list[Path]:
    """Removes segments whose process is gone and returns their names. Live ones are never touched, nor what another
    user has made."""
    removed = []
    for path in segments(job):
        try:
            with Channel(path, claim=False) as channel:
                stale = not channel.alive
        except ChannelBusyError:
            stale = not owner_lives(path)
        except ChannelError:
            # Perhaps of a build that took no lock.
            stale = _is_ours(path) and not owner_lives(path) and not Path(f"/proc/{segment_pid(path)}").exists()
        if stale:
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False
