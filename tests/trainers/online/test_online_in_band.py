"""A run beside a job that puts tables in force itself, at the end of its steps."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from attached import training
from small import small_experiment

from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob, agreement_violations
from dynamiccl_ray.plugin_bridge.segments import segments
from dynamiccl_ray.trainers.online.run import run_online

RANKS, COMMS = 4, 2


class Boundaries:
    """What ``dynamiccl_ray.torch`` does in each process, for all of them: an offer, and what came of the one before."""

    def __init__(self, job: str) -> None:
        self.channels = [Channel(path, claim=False) for path in segments(job)]
        self.offers: dict[int, set[tuple[int, int, int]]] = {}
        self.taken = 0
        for channel in self.channels:
            channel.join_in_band()

    def step(self) -> None:
        agreed = {comm for comm, offers in self.offers.items() if len(offers) == 1 and min(offers)[0] > 0}
        for channel in self.channels:
            if channel.identity.comm_id in agreed:
                channel.take_offer()
        self.taken += len(agreed)
        self.offers = {}
        for channel in self.channels:
            self.offers.setdefault(channel.identity.comm_id, set()).add(channel.offer())


def _step(running: NcclJob) -> None:
    credit = running.add_credit(1)
    while running.progress().min() < credit or set(running.states()) - {"waiting", "finished"}:
        time.sleep(0.0002)


@pytest.mark.timeout(180)
def test_tables_come_into_force_between_two_steps_and_go_again(tmp_path: Path, job: str) -> None:
    learning = {"baseline_samples": 4, "draws": 6, "draw_samples": 1, "compares": 2, "compare_samples": 2}
    attached = small_experiment(
        job,
        fabric={"kind": "nccl", "intra": "pcie", "inter": "tcp", "processes": None, "rate_hz": None},
        control={"learning": learning},
        stop={"rounds": 12},
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
    assert boundaries.taken >= done["switches"]
    assert agreement_violations(log) == 0
    assert (log["own"] == 0).any(), "never tuned"
    assert said[-1] == "in force: NCCL's own choice"
    assert all(table is None or not table.flat().any() for table in tables)
