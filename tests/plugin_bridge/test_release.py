"""``dynamiccl release``: a person gives back what a control plane left behind."""

from __future__ import annotations

import json
import os
import time

import pytest
from rig import CALLS, Rig, play, table_key, wait_for
from typer.testing import CliRunner

from dynamiccl_ray.actions import Action
from dynamiccl_ray.actors.release import release
from dynamiccl_ray.cli.app import app
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING, NcclJob, agreement_violations

RANKS = 8
CALL = CALLS[0]


def _started(rig: Rig) -> tuple[NcclJob, list[Channel]]:
    job = rig.start(play([CALL], places=range(RANKS), rate_hz=2000.0, window=6, syncs=False))
    return job, [of_process[0] for of_process in rig.channels(job)]


def _left_behind(channels: list[Channel], told: int) -> None:
    """A control plane that dies while it tells ranks of a COMMIT; ``told`` have heard."""
    table = DecisionTable.of(1, {table_key(CALL): Action(pair=6, channels=3)}, max_channels=16)
    holds = [channel.prepare(table, 20)[1] for channel in channels]
    for channel in channels[:told]:
        assert channel.decide(1, max(holds))
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("told", [0, 1, RANKS])
def test_what_was_open_is_finished_and_the_table_taken_back(rig: Rig, told: int) -> None:
    job, channels = _started(rig)
    _left_behind(channels, told)
    job.set_credit(FREE_RUNNING)
    time.sleep(0.2)
    result = CliRunner().invoke(app, ["release", "--job", rig.job_id, "--json"])
    assert result.exit_code == 0, result.output
    (of,) = json.loads(result.stdout)["communicators"]
    assert (of["ranks"], of["was_open"], of["committed"], of["was_in_force"]) == (RANKS, 1, told > 0, int(told > 0))
    before = job.progress().min()
    wait_for(lambda: job.progress().min() > before + 100, what="training going on")
    for path in [channel.path for channel in channels]:
        with Channel(path) as channel:
            assert channel.fold()
            assert channel.table is None or not channel.table.flat().any()
    job.stop()
    assert agreement_violations(job.logs()) == 0
    asked = {int(own) for rank in range(RANKS) for own in job.log(rank)["own"][-50:]}
    assert asked == {1}, "NCCL's own choice in the end"


def test_it_refuses_where_it_cannot_see_all_ranks(rig: Rig) -> None:
    job = rig.start(play([CALL], places=range(RANKS - 1), window=6, syncs=False))
    channels = [of_process[0] for of_process in rig.channels(job)]
    _left_behind(channels, 1)
    with pytest.raises(RunError, match=r"ranks \[7\] of 8 are not on this machine"):
        release(rig.job_id)
    with Channel(channels[1].path) as channel:
        assert channel.status.decision == 0, "it has changed something"
        channel.decide(1, channel.status.hold_at)


def test_it_refuses_beside_a_control_plane_and_says_which(rig: Rig) -> None:
    _, channels = _started(rig)
    with pytest.raises(RunError, match=rf"served by process {os.getpid()};"):
        release(rig.job_id)
    for channel in channels:
        channel.close()
