"""Memory and open files of processes, over their lives."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Use:
    rss_mib: float
    own_mib: float
    """Of that, what only this process has: without files and what it shares with others, as Ray's object store."""
    files: int


_KIB = ("VmRSS", "RssAnon")


def use_of(pid: int) -> Use | None:
    """None where it is gone."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path(f"/proc/{pid}/status").read_text()
        kib = {name: next(int(s.split()[1]) for s in status.splitlines() if s.startswith(name)) for name in _KIB}
        return Use(*(of / 1024 for of in kib.values()), len(list(Path(f"/proc/{pid}/fd").iterdir())))
    return None


@dataclass
class Growth:
    """First and last use of every process, by what it is."""

    _seen: dict[tuple[str, int], list[tuple[float, Use]]] = field(default_factory=dict)

    def look(self, now: float, parts: dict[str, list[int]]) -> None:
        for part, pids in parts.items():
            for pid in pids:
                if (use := use_of(pid)) is not None:
                    self._seen.setdefault((part, pid), []).append((now, use))

    def longest(self, settled_s: float = 5.0) -> dict[str, dict[str, float]]:
        """Of each part the process that lived longest: how long, and its use once it had settled and at the end."""
        out: dict[str, dict[str, float]] = {}
        for (part, _), looks in self._seen.items():
            begin, end = looks[0][0], looks[-1][0]
            if end - begin < 2 * settled_s or end - begin <= out.get(part, {}).get("lived_s", 0.0):
                continue
            first, last = next(use for at, use in looks if at >= begin + settled_s), looks[-1][1]
            out[part] = {
                "lived_s": end - begin,
                "rss_mib": first.rss_mib,
                "rss_mib_end": last.rss_mib,
                "files": first.files,
                "files_end": last.files,
            }
        return out
