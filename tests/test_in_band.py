"""In-band agreement under real DDP and FSDP jobs: whatever happens to the control plane, no call of a communicator has
two tables, and training is what it is without us."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dynamiccl_ray.actions import Action
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import ChannelError
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import CHANNEL_VALUES, Algorithm, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.layout import Prepared
from dynamiccl_ray.plugin_bridge.segments import segments

RANKS = 4
KEYS = [key_of(4, (64 << call) << 10, False) for call in range(4)]
PAIRS = [pair_index(a, p) for a in (Algorithm.TREE, Algorithm.RING) for p in Protocol]
HERE = Path(__file__)


def table_of(version: int) -> DecisionTable:
    chance = random.Random(version)
    channels = [i for i, count in enumerate(CHANNEL_VALUES) if count <= 16]
    actions = {key: Action(pair=chance.choice(PAIRS), channels=chance.choice(channels)) for key in KEYS}
    return DecisionTable.of(version, actions, max_channels=16)


def stage_for_ever(job: str, seed: int) -> None:
    """A control plane that is nothing but staging: on all ranks of a communicator mostly, on some at times, in any
    order, one table over another before it was taken, and at times different ones."""
    chance, channels, version = random.Random(seed), {}, 0
    while True:
        for path in segments(job):
            if path not in channels:
                try:
                    channels[path] = Channel(path)
                except ChannelError:
                    continue
        for path in [path for path, channel in channels.items() if not channel.alive]:
            channels.pop(path).close()
        comms: dict[int, list[Channel]] = {}
        for channel in channels.values():
            comms.setdefault(channel.identity.comm_id, []).append(channel)
            version = max(version, channel.status.base_version, channel.status.offered_version)
        for of in comms.values():
            version += 1
            chance.shuffle(of)
            some = of if chance.random() < 0.8 else of[: chance.randrange(len(of) + 1)]
            for i, channel in enumerate(some):
                channel.stage(table_of(version + (chance.random() < 0.02) * (i + 1)))
                time.sleep(chance.random() * 0.0005)
        time.sleep(chance.random() * 0.01)


def start(job: str, out: Path, steps: int, *options: str) -> list[subprocess.Popen[bytes]]:
    out.mkdir(exist_ok=True)
    env = os.environ | {
        "DYNAMICCL_JOB_ID": job,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1]), *sys.path]),
    }
    words = [sys.executable, str(HERE.with_name("in_band_job.py"))]
    return [
        subprocess.Popen([*words, *map(str, (rank, RANKS, steps, out / f"{rank}.json")), *options], env=env)
        for rank in range(RANKS)
    ]


def finished(processes: list[subprocess.Popen[bytes]], out: Path) -> list[dict[str, Any]]:
    assert [process.wait(120) for process in processes] == [0] * RANKS
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]


def switches(told: list[list[int]]) -> int:
    """Tables that were in force; the first key's calls tell them apart."""
    first = [tuple(of) for of in told[::4]]
    return sum(a != b for a, b in itertools.pairwise(first))


STEPS = 240


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="hook"),
        pytest.param(("fsdp",), id="fsdp"),
        pytest.param(("explicit",), id="explicit", marks=pytest.mark.slow),
    ],
)
def test_control_planes_come_and_die_and_training_is_as_without_us(
    tmp_path: Path, job: str, options: tuple[str, ...]
) -> None:
    job_processes = start(job, tmp_path / "out", STEPS, *options)
    chance, seed, planes = random.Random(1), 0, []
    while any(process.poll() is None for process in job_processes):
        seed += 1
        code = f"import test_in_band; test_in_band.stage_for_ever({job!r}, {seed})"
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
        planes = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]
        time.sleep(1.5 + chance.random())
        planes[0].send_signal(chance.choice([signal.SIGKILL, signal.SIGSTOP]))
        time.sleep(chance.random())
        for plane in planes:
            plane.kill()
            plane.wait()
    said = finished(job_processes, tmp_path / "out")
    world = [of["told"]["world"] for of in said]
    assert all(told == world[0] for told in world), "a call had two tables"
    assert len(world[0]) == 4 * STEPS
    for first in (0, 2):
        pair = [said[first + i]["told"]["pair"] for i in range(2)]
        assert pair[0] == pair[1], "a call of a pair had two tables"
    assert switches(world[0]) > 10
    alone = finished(start(job, tmp_path / "without", STEPS, "without", *options), tmp_path / "without")
    assert [of["losses"] for of in said] == [of["losses"] for of in alone], "training is another"
    assert not list(segments(job))


def test_boundaries_that_differ_are_noticed_and_change_nothing(tmp_path: Path, job: str) -> None:
    job_processes = start(job, tmp_path / "out", 240, "skew")
    refused = 0
    version, channels = 0, []
    deadline = time.monotonic() + 150
    while any(process.poll() is None for process in job_processes) and time.monotonic() < deadline:
        if len(channels) < RANKS:
            for path in segments(job):
                with_it = None
                try:
                    with_it = Channel(path)
                except ChannelError:
                    continue
                if with_it.identity.comm_id == 0x77:
                    channels.append(with_it)
        elif all(channel.alive for channel in channels):
            version = 1 + max([version, *(channel.status.base_version for channel in channels)])
            outcomes = {channel.stage(table_of(version)) for channel in channels}
            refused += outcomes == {Prepared.REFUSED}
        time.sleep(0.002)
    said = finished(job_processes, tmp_path / "out")
    assert all(channel.status.out_of_step for channel in channels)
    assert refused > 0
    world = [of["told"]["world"] for of in said]
    extra = 4 * (240 // 2) + 4
    assert world[0][:extra] == world[1][:extra]
    assert world[1][extra + 1 :] == world[0][extra:], "the extra call aside"
    assert 1 < switches(world[0]) < 120
    for channel in channels:
        channel.close()
