"""Both ends of the channel at once, at full speed and under every interleaving that a run meets."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from rig import CALLS, Rig, play
from test_channel import NATIVE, RECORDS

from dynamiccl_ray.plugin_bridge.layout import RECORD_DTYPE


@pytest.fixture(scope="session", params=[(), ("-DDCC_STRESS",)], ids=["as built", "interleaved"])
def stress(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stress test of both ends, as fast as it goes and with threads losing the processor where it hurts."""
    path = tmp_path_factory.mktemp("stress") / "stress"
    sources = [str(path) for path in (*(Path(__file__).parent / "native" / "stress").glob("*.c"), *NATIVE.glob("*.c"))]
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}", *request.param]
    subprocess.run(["gcc", *flags, "-o", path, *sources, "-lpthread"], check=True)
    return path


PARTS = [
    "ring",
    "agreement",
    "events",
    "lost",
    "stale",
    "groups",
    "passed-over",
    "sure",
    "mask",
    "pause",
    "timed",
    "job",
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("seed", range(3))
def test_both_ends_under_stress(rig: Rig, stress: Path, part: str, seed: int) -> None:
    env = {**os.environ, "DYNAMICCL_SHM_DIR": str(rig.shm)}
    done = subprocess.run([stress, part, str(seed)], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{part.replace('-', ' ')}: ")


def test_the_ring_from_empty_to_wrapped(rig: Rig) -> None:
    job = rig.start(play(CALLS[:1], us=1.0, syncs=False))
    ((channel,),) = rig.channels(job)
    assert len(channel.drain()) == 0

    begun = 0

    def run(n: int) -> None:
        nonlocal begun
        begun += n
        job.set_credit(begun)
        deadline = time.monotonic() + 30
        while channel.status.records + sum(channel.status.dropped.values()) < begun:
            assert time.monotonic() < deadline, channel.status
            time.sleep(0.001)

    run(1)
    one = channel.drain()
    assert one["ticket"].tolist() == one["dseq"].tolist() == [1]
    run(RECORDS)
    assert (channel.status.backlog, channel.status.dropped["full"]) == (RECORDS, 0)
    run(5)
    assert (channel.status.backlog, channel.status.dropped["full"]) == (RECORDS, 5)
    few = np.empty(100, RECORD_DTYPE)
    assert channel.drain(few)["ticket"].tolist() == list(range(2, 102))
    run(100)
    assert (channel.status.backlog, channel.status.dropped["full"]) == (RECORDS, 5)
    rest = channel.drain()
    assert rest["ticket"].tolist() == list(range(102, RECORDS + 102))
    assert sorted(rest["dseq"])[-100:] == list(range(RECORDS + 7, RECORDS + 107))
    job.stop()


def test_a_live_job_at_full_speed_loses_nothing(rig: Rig) -> None:
    total, per_step = 80_000, 100
    job = rig.start(play(CALLS[:2] * (per_step // 2), us=1.0, steps=total // per_step, syncs=False))
    ((channel,),) = rig.channels(job)
    into = np.empty(RECORDS, RECORD_DTYPE)
    seen = np.zeros(total + 1, np.uint8)
    tickets, drained = 0, 0
    deadline = time.monotonic() + 60
    while drained < total and time.monotonic() < deadline:
        # The one thing that may hold the job up is this test being put to sleep for 50 ms.
        job.set_credit((drained + RECORDS) // per_step)
        batch = channel.drain(into)
        if len(batch):
            assert np.array_equal(batch["ticket"], np.arange(tickets + 1, tickets + len(batch) + 1))
            tickets += len(batch)
            np.add.at(seen, batch["dseq"], 1)
            drained += len(batch)
        else:
            time.sleep(0.0005)
    job.wait(10)
    assert drained == total
    assert seen[0] == 0
    assert np.all(seen[1:] == 1)
    assert sum(channel.status.dropped.values()) == 0
