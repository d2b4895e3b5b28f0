"""What communicators leave behind in a process that makes one after the other: nothing of the plugin's."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from real_jobs import Jobs, wait_for

from dynamiccl_ray.plugin_bridge.program import Program
from dynamiccl_ray.plugin_bridge.segments import segments

COMMUNICATORS, WARM, EVERY = 100, 20, 20
MOST_PER_COMMUNICATOR_KB = 16


@dataclass(frozen=True)
class Left:
    anonymous_kb: int
    files: int


def left(pid: int) -> Left:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    anonymous = re.search(r"^Anonymous:\s+(\d+) kB", rollup, re.MULTILINE)
    assert anonymous
    return Left(int(anonymous[1]), len(os.listdir(f"/proc/{pid}/fd")))


def measured(jobs: Jobs, plugin: Path | None) -> list[Left]:
    """What a process holds after some communicators, and some more. Of one rank they are made in a moment."""
    program = Program(ranks_per_node=1, steps=COMMUNICATORS)
    comm = program.comm("one")
    (rank,) = program.ranks
    rank.step.init(comm)
    rank.step.destroy(comm)
    job, reader = jobs.start(program, plugin=plugin, credit=WARM)
    found = []
    for credit in range(WARM, COMMUNICATORS + 1, EVERY):
        job.set_credit(credit)
        wait_for(
            lambda credit=credit: job.progress().min() >= credit and set(job.states()) <= {"waiting", "finished"},
            timeout=90,
            what=f"{credit} communicators",
        )
        if credit < COMMUNICATORS:
            found.append(left(job.pids()[0]))
            assert list(segments()) == []
    job.wait()
    assert len(reader.finish()) == 0 if plugin else COMMUNICATORS
    return found


def test_a_hundred_communicators_leave_nothing(jobs: Jobs) -> None:
    ours, without = measured(jobs, None), measured(jobs, Path("none"))
    growth_kb = [np.polyfit(np.arange(len(x)) * EVERY, [y.anonymous_kb for y in x], 1)[0] for x in (ours, without)]
    assert growth_kb[0] - growth_kb[1] < MOST_PER_COMMUNICATOR_KB, (ours, without)
    # NCCL's own files differ by where its threads are.
    assert ours[-1].files - ours[0].files <= max(0, without[-1].files - without[0].files) + 2, (ours, without)
    assert os.listdir(jobs.shm) == []
