"""A run beside a job ends with the job, and not with a part of the control plane that begins anew."""

from __future__ import annotations

import pytest
from trained import Trained

from dynamiccl_ray.actors.status import Status
from dynamiccl_ray.plugin_bridge.channel import owner_lives
from dynamiccl_ray.plugin_bridge.segments import segments
from dynamiccl_ray.trainers.online.run import has_gone


def lives(job: str) -> bool:
    return any(owner_lives(path) for path in segments(job))


SERVED_NOBODY = Status(collectives=100, ranks=0, runners=("node:1", "node:2"))


def test_a_job_that_was_measured_and_has_no_rank_any_more_has_gone(job: str) -> None:
    assert has_gone(SERVED_NOBODY, lambda: lives(job))
    assert not has_gone(Status(collectives=0, ranks=0, runners=("node:1",)), lambda: lives(job)), "it has not come"
    assert not has_gone(Status(collectives=100, ranks=4, runners=("node:1",)), lambda: lives(job))


def test_a_coordinator_to_which_no_runner_has_come_back_does_not_end_the_run(job: str) -> None:
    assert not has_gone(Status(collectives=100, ranks=0, runners=()), lambda: lives(job))


def test_runners_that_have_yet_to_claim_the_ranks_again_do_not_end_the_run(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAMICCL_JOB_ID", job)
    living = Trained(job, 0x51, 2)
    assert not has_gone(SERVED_NOBODY, lambda: lives(job))
    living.close()
    assert has_gone(SERVED_NOBODY, lambda: lives(job))
