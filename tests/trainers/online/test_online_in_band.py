"""A run beside a job that puts tables in force itself, at the end of its steps."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from attached import training
from small import small_experiment

from dynamiccl_ray.plugin_bridge.boundary import Boundary
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob, agreement_violations
from dynamiccl_ray.plugin_bridge.segments import segments
from dynamiccl_ray.trainers.online.run import run_online

RANKS, COMMS = 4, 2


class Boundaries:
    """What ``dynamiccl_ray.torch`` does in each process, for all of them."""

    def __init__(self, job: str) -> None:
        self.channels = [Channel(path, claim=False) for path in segments(job)]
        self.taken = 0
        of_process: dict[int, list[Channel]] = {}
        for channel in self.channels:
            of_process.setdefault(channel.identity.pid, []).append(channel)
        self.of = []
        for channels in of_process.values():
            self.of.append(Boundary())
            self.of[-1].serve(channels)

    def step(self) -> None:
        least = np.min([of.words for of in self.of], axis=0)
        offering = sum(channel.status.offered_version > 0 for channel in self.channels)
        for of in self.of:
            of.words[:] = least
            assert of.take() == 0
        self.taken += offering - sum(channel.status.offered_version > 0 for channel in self.channels)
        for of in self.of:
            of.bring()


def _step(running: NcclJob) -> None:
    credit = running.add_credit(1)
    while running.progress().min() < credit or set(running.states()) - {"waiting", "finished"}:
        time.sleep(0.0002)


def test_tables_come_into_force_between_two_steps_and_go_again(tmp_path: Path, job: str) -> None:
    learning = {"baseline_samples": 4, "draws": 6, "draw_samples": 1, "compares": 2, "compare_samples": 2}
    attached = small_experiment(
        job,
        fabric={"kind": "nccl", "intra": "pcie", "inter": "tcp", "processes": None, "rate_hz": None},
        control={"learning": learning},
        stop={"rounds": None, "exploit_rounds_after_last_event": 1},
    )
    done: dict[str, Any] = {}
    with training(job, tmp_path / "job") as running:
        running.set_credit(0)
        running.start()
        running.await_ranks()
        boundaries = Boundaries(job)
        said: list[str] = []
        run = threading.Thread(
            target=lambda: done.update(run_online(attached, tmp_path / "run", serial=True, say=said.append))
        )
        run.start()
        while run.is_alive():
            _step(running)
            boundaries.step()
        run.join()
        status = [channel.status for channel in boundaries.channels]
        tables = [channel.table for channel in boundaries.channels]
        running.stop()
        log = running.logs()
    assert len(status) == RANKS * COMMS
    assert not any(of.hold_waits for of in status), "a rank waited"
    assert done["switches"] > 6
    assert boundaries.taken >= RANKS * done["switches"]
    assert agreement_violations(log) == 0
    assert (log["own"] == 0).any(), "never tuned"
    assert said[-1] == "in force: NCCL's own choice"
    assert all(table is None or not table.flat().any() for table in tables)
