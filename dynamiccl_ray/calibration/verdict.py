"""The line at the end of advice: is tuning worth it, for which sizes, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from dynamiccl_ray.calibration.advice import WORTH, Row
from dynamiccl_ray.keys import bytes_name


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """In words, over all rows."""

    worth: str
    """``yes``, ``no``, or ``unknown`` where more has to be measured to say."""
    why: str
    next: str
    """What to do, with the command."""

    def __str__(self) -> str:
        words = {"yes": "Worth it", "no": "Not worth it", "unknown": "Not known yet"}
        return f"{words[self.worth]}: {self.why} Next: {self.next}"


def verdict(rows: Sequence[Row], directory: str) -> Verdict:
    """Of what was found in a directory, by its name."""
    sure, still = [r for r in rows if r.sure], [r for r in rows if r.open]
    if sure:
        measured = [r for r in sure if r.basis == "measured"]
        gains = [r.low for r in sure if r.low is not None]
        least = "" if len(measured) == len(sure) else "at least "
        why = f"{where(sure)} gains {WORTH - 1:.0%} or more, {least}{max(gains):.2f}x at the best of them."
        if still:
            why += f" Not known for {where(still)}."
        if measured:
            return Verdict(worth="yes", why=why, next=f"dynamiccl evaluate --measured {directory}")
        return Verdict(worth="yes", why=why, next=_measure([*sure, *still], directory))
    if still:
        why = f"NCCL's own choice may be the best or not for {where(still)}."
        return Verdict(worth="unknown", why=why, next=_measure(still, directory))
    why = f"no size gains {WORTH - 1:.0%}, which is what sessions differ by."
    return Verdict(worth="no", why=why, next="leave NCCL as it is; look again when the network or NCCL has changed.")


def where(rows: Sequence[Row]) -> str:
    """Collectives, scales and sizes of some rows: ``all_reduce on 8x8 GPUs at 3 sizes from 16KiB to 64KiB``."""
    found = []
    ordered = sorted(rows, key=lambda r: (r.collective, r.nodes, r.gpus_per_node, r.bytes))
    for (collective, nodes, local), of in groupby(ordered, key=lambda r: (r.collective, r.nodes, r.gpus_per_node)):
        sizes = sorted({r.bytes for r in of})
        least, most = bytes_name(sizes[0]), bytes_name(sizes[-1])
        span = least if len(sizes) == 1 else f"{len(sizes)} sizes from {least} to {most}"
        found.append(f"{collective} on {nodes}x{local} GPUs at {span}")
    return "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")


def _measure(rows: Sequence[Row], directory: str) -> str:
    """The commands of nccl-tests for what is to be forced."""
    test = f"{rows[0].collective}_perf"
    least, most = (f(r.bytes for r in rows if r.collective == rows[0].collective) for f in (min, max))
    own = [r for r in rows if r.basis == "own unknown"]
    if len(own) == len(rows):
        default = f"{test} -b {least} -e {most} -f 2 | tee {directory}/default.log"
        return f"NCCL_DEBUG=INFO mpirun ... {default}, and advise again"
    return (
        f"NCCL_DEBUG=INFO NCCL_ALGO=Ring NCCL_PROTO=LL mpirun ... {test} -b {least} -e {most} -f 2 "
        f"| tee {directory}/ring-ll.log, once per algorithm and protocol, and advise again"
    )
